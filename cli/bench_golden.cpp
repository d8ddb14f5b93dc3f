// SPDX-License-Identifier: MIT
#include "cli/bench_golden.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "cli/pytorch.h"

namespace cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Values in float64 and the scales that stand for their absolute values.
struct Scaled {
  explicit Scaled(const at::Tensor& x)
      : value(x.to(at::kDouble)), scale(value.abs()) {}
  Scaled(at::Tensor value, at::Tensor scale)
      : value(std::move(value)), scale(std::move(scale)) {}

  template <typename View>
  Scaled view(View view) const {
    return {view(value), view(scale)};
  }
  at::Tensor value, scale;
};

// query (B, H, Lq, D), key (B, H, Lk, D), value (B, H, Lk, Dv).
struct Heads {
  Scaled query, key, value;
  at::Tensor keep;  // bool, broadcasts to (B, H, Lq, Lk)
  at::Tensor bias;  // the same in float64
  double scale;
  bool average_weights;
};

at::Tensor no_bias() { return at::zeros({}, at::kDouble); }

Reference attend(const Heads& x) {
  const auto sizes = x.query.value.sizes();
  const int64_t B = sizes[0], H = sizes[1], Lq = sizes[2],
                Lk = x.key.value.size(2), Dv = x.value.value.size(3);
  // As many heads at once as keep their scores within 64 MiB.
  const int64_t step =
      std::clamp<int64_t>((int64_t{1} << 23) / (Lq * Lk), 1, H);
  const at::Tensor keep = x.keep.expand({B, H, Lq, Lk}),
                   bias = x.bias.expand({B, H, Lq, Lk});
  Reference result{at::empty({B, H, Lq, Dv}, at::kDouble),
                   at::empty({B, H, Lq, Dv}, at::kDouble),
                   {}};
  if (x.average_weights) result.weights = at::zeros({B, Lq, Lk}, at::kDouble);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; h += step) {
      const auto some = [&](const at::Tensor& all) {
        return all[b].slice(0, h, std::min(H, h + step));
      };
      const Scaled q = x.query.view(some), k = x.key.view(some),
                   v = x.value.view(some);
      const at::Tensor blocked = some(keep).logical_not();
      const at::Tensor w = at::matmul(q.value, k.value.mT())
                               .mul_(x.scale)
                               .add_(some(bias))
                               .masked_fill_(blocked, -kInfinity)
                               .softmax(-1)
                               .masked_fill_(blocked, 0);
      some(result.out).copy_(at::matmul(w, v.value));
      some(result.out_scale).copy_(at::matmul(w, v.scale));
      const at::Tensor sizes_of_scores = at::matmul(q.scale, k.scale.mT())
                                             .mul_(std::abs(x.scale))
                                             .add_(some(bias).abs())
                                             .masked_fill_(blocked, 0);
      result.lambda =
          std::max(result.lambda, sizes_of_scores.max().item<double>());
      if (x.average_weights) result.weights[b] += w.sum(0) / H;
    }
  return result;
}

Scaled linear(const Scaled& x, const at::Tensor& weight,
              const at::Tensor& bias) {
  const Scaled w(weight);
  if (!bias.defined())
    return {at::linear(x.value, w.value), at::linear(x.scale, w.scale)};
  const Scaled b(bias);
  return {at::linear(x.value, w.value, b.value),
          at::linear(x.scale, w.scale, b.scale)};
}

}  // namespace

Reference reference_of(const AttentionInputs& inputs) {
  const multihead::AttentionOptions& options = inputs.options;
  const int64_t group = inputs.query.size(1) / inputs.key.size(1);
  return attend(
      {.query = Scaled(inputs.query),
       .key = Scaled(inputs.key.repeat_interleave(group, 1)),
       .value = Scaled(inputs.value.repeat_interleave(group, 1)),
       .keep = pytorch::keep_mask(inputs.query, inputs.key, options),
       .bias = pytorch::has_bias(options) ? options.attn_mask.to(at::kDouble)
                                          : no_bias(),
       .scale = options.scale.value_or(1 / std::sqrt(inputs.query.size(3))),
       .average_weights = false});
}

Reference reference_of(const LayerInputs& inputs) {
  const multihead::AttentionLayer& layer = inputs.layer;
  const int64_t H = layer.num_heads;
  const auto batch_first = [&](const at::Tensor& x) {
    return layer.batch_first ? x : x.transpose(0, 1);
  };
  const auto heads = [&](const at::Tensor& x, int64_t index) {
    const at::Tensor& bias = layer.in_proj_bias;
    return linear(Scaled(batch_first(x)), layer.in_proj_weight.chunk(3)[index],
                  bias.defined() ? bias.chunk(3)[index] : bias)
        .view([&](const at::Tensor& rows) {
          return rows.unflatten(-1, {H, -1}).transpose(1, 2);
        });
  };
  Heads x{.query = heads(inputs.query, 0),
          .key = heads(inputs.key, 1),
          .value = heads(inputs.value, 2),
          .keep = {},
          .bias = no_bias(),
          .scale = 1 / std::sqrt(layer.embed_dim / H),
          .average_weights = true};
  multihead::AttentionOptions options;
  options.is_causal = inputs.options.is_causal();
  x.keep = pytorch::keep_mask(x.query.value, x.key.value, options);
  if (const at::Tensor& mask = inputs.options.attn_mask(); mask.defined())
    x.keep = x.keep.logical_and(mask.logical_not());
  Reference result = attend(x);
  const auto merged = [](const at::Tensor& y) {
    return y.transpose(1, 2).flatten(2);
  };
  const Scaled out =
      linear(Scaled(merged(result.out), merged(result.out_scale)),
             layer.out_proj_weight, layer.out_proj_bias);
  result.out = batch_first(out.value);
  result.out_scale = batch_first(out.scale);
  return result;
}

double budget_share(const at::Tensor& x, const at::Tensor& value,
                    const at::Tensor& scale, double lambda,
                    const naive::Precision& precision) {
  if (!x.defined() || x.sizes() != value.sizes()) return kInfinity;
  const at::Tensor allowed =
      scale * (precision.forward * precision.unit(lambda)) + precision.tiny;
  const double share =
      ((x.to(at::kDouble) - value).abs() / allowed).max().item<double>();
  return std::isnan(share) ? kInfinity : share;
}

}  // namespace cli
