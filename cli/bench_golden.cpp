// SPDX-License-Identifier: MIT
#include "cli/bench_golden.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cli/pytorch.h"

namespace cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// --- Tensors with their scales -----------------------------------------------

Scaled matmul(const Scaled& a, const Scaled& b) {
  return {at::matmul(a.value, b.value), at::matmul(a.scale, b.scale)};
}

Scaled transposed(const Scaled& x) {
  return x.view([](const at::Tensor& t) { return t.mT(); });
}

Scaled empty(at::IntArrayRef sizes) {
  return {at::empty(sizes, at::kDouble), at::empty(sizes, at::kDouble)};
}

void copy(const Scaled& to, const Scaled& from) {
  to.value.copy_(from.value);
  to.scale.copy_(from.scale);
}

// x · weightᵀ + bias; bias may be undefined.
Scaled linear(const Scaled& x, const at::Tensor& weight,
              const at::Tensor& bias) {
  const Scaled y = matmul(x, transposed(Scaled(weight)));
  if (!bias.defined()) return y;
  const Scaled b(bias);
  return {y.value + b.value, y.scale + b.scale};
}

// --- Attention ---------------------------------------------------------------

// query (B, H, Lq, D), key (B, H, Lk, D), value (B, H, Lk, Dv).
struct Heads {
  Scaled query, key, value;
  at::Tensor keep;  // bool, broadcasts to (B, H, Lq, Lk)
  at::Tensor bias;  // the same in float64
  double scale;
  bool average_weights;
};

struct Attended {
  Scaled out;          // (B, H, Lq, Dv)
  at::Tensor weights;  // (B, Lq, Lk), averaged
  double lambda = 0;
};

struct Gradients {
  Scaled query, key, value;
};

at::Tensor no_bias() { return at::zeros({}, at::kDouble); }

// Calls visit(heads, weights) for as many heads of a batch row at once as keep
// their scores within 64 MiB; heads(x) are those of a (B, H, …) tensor.
template <typename Visit>
void for_each_weights(const Heads& x, double* lambda, Visit visit) {
  const auto sizes = x.query.value.sizes();
  const int64_t B = sizes[0], H = sizes[1], Lq = sizes[2],
                Lk = x.key.value.size(2);
  const int64_t step =
      std::clamp<int64_t>((int64_t{1} << 23) / (Lq * Lk), 1, H);
  const at::Tensor keep = x.keep.expand({B, H, Lq, Lk}),
                   bias = x.bias.expand({B, H, Lq, Lk});
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; h += step) {
      const auto heads = [=](const at::Tensor& all) {
        return all[b].slice(0, h, std::min(H, h + step));
      };
      const Scaled q = x.query.view(heads), k = x.key.view(heads);
      const at::Tensor blocked = heads(keep).logical_not();
      const at::Tensor w = at::matmul(q.value, k.value.mT())
                               .mul_(x.scale)
                               .add_(heads(bias))
                               .masked_fill_(blocked, -kInfinity)
                               .softmax(-1)
                               .masked_fill_(blocked, 0);
      if (lambda) {
        const at::Tensor sizes_of_scores = at::matmul(q.scale, k.scale.mT())
                                               .mul_(std::abs(x.scale))
                                               .add_(heads(bias).abs())
                                               .masked_fill_(blocked, 0);
        *lambda = std::max(*lambda, sizes_of_scores.max().item<double>());
      }
      visit(heads, b, w);
    }
}

Attended attend(const Heads& x) {
  const auto sizes = x.query.value.sizes();
  const int64_t B = sizes[0], H = sizes[1], Lq = sizes[2],
                Lk = x.key.value.size(2), Dv = x.value.value.size(3);
  Attended result{.out = empty({B, H, Lq, Dv}), .weights = {}};
  if (x.average_weights) result.weights = at::zeros({B, Lq, Lk}, at::kDouble);
  for_each_weights(x, &result.lambda,
                   [&](const auto& heads, int64_t b, const at::Tensor& w) {
                     copy(result.out.view(heads),
                          matmul({w, w}, x.value.view(heads)));
                     if (x.average_weights) result.weights[b] += w.sum(0) / H;
                   });
  return result;
}

// The gradients of Σ out·dout, by the steps of naive::backward.
Gradients attend_backward(const Heads& x, const Scaled& dout) {
  Gradients result{empty(x.query.value.sizes()), empty(x.key.value.sizes()),
                   empty(x.value.value.sizes())};
  for_each_weights(
      x, nullptr, [&](const auto& heads, int64_t, const at::Tensor& w) {
        const Scaled d = dout.view(heads);
        const Scaled dw = matmul(d, transposed(x.value.view(heads)));
        const at::Tensor mean = (w * dw.value).sum(-1, /*keepdim=*/true),
                         mean_scale = (w * dw.scale).sum(-1, /*keepdim=*/true);
        const Scaled ds{
            (dw.value - mean).mul_(w).mul_(x.scale),
            (dw.scale + mean_scale).mul_(w).mul_(std::abs(x.scale))};
        copy(result.query.view(heads), matmul(ds, x.key.view(heads)));
        copy(result.key.view(heads),
             matmul(transposed(ds), x.query.view(heads)));
        copy(result.value.view(heads), matmul(transposed({w, w}), d));
      });
  return result;
}

// --- Layers ------------------------------------------------------------------

// Tensors of a layer with the batch first, whatever the layer has.
at::Tensor batch_first(const at::Tensor& x,
                       const multihead::AttentionLayer& layer) {
  return layer.batch_first ? x : x.transpose(0, 1);
}

// (B, L, H·D) ↔ (B, H, L, D)
Scaled split(const Scaled& rows, int64_t num_heads) {
  return rows.view([=](const at::Tensor& x) {
    return x.unflatten(-1, {num_heads, -1}).transpose(1, 2);
  });
}
Scaled merged(const Scaled& heads) {
  return heads.view(
      [](const at::Tensor& x) { return x.transpose(1, 2).flatten(2); });
}

Heads project(const LayerInputs& inputs) {
  const multihead::AttentionLayer& layer = inputs.layer;
  const auto heads = [&](const at::Tensor& x, int64_t index) {
    const at::Tensor& bias = layer.in_proj_bias;
    return split(linear(Scaled(batch_first(x, layer)),
                        layer.in_proj_weight.chunk(3)[index],
                        bias.defined() ? bias.chunk(3)[index] : bias),
                 layer.num_heads);
  };
  Heads x{.query = heads(inputs.query, 0),
          .key = heads(inputs.key, 1),
          .value = heads(inputs.value, 2),
          .keep = {},
          .bias = no_bias(),
          .scale = 1 / std::sqrt(layer.embed_dim / layer.num_heads),
          .average_weights = inputs.options.need_weights()};
  multihead::AttentionOptions options;
  options.is_causal = inputs.options.is_causal();
  x.keep = pytorch::keep_mask(x.query.value, x.key.value, options);
  if (const at::Tensor& mask = inputs.options.attn_mask(); mask.defined())
    x.keep = x.keep.logical_and(mask.logical_not());
  return x;
}

// y = x · weightᵀ + bias: the gradients of weight and bias from that of y.
struct LinearGradients {
  Scaled weight, bias;
};
LinearGradients linear_backward(const Scaled& x, const Scaled& dy) {
  const auto rows = [](const at::Tensor& t) { return t.flatten(0, 1); };
  const Scaled d = dy.view(rows);
  return {matmul(transposed(d), x.view(rows)),
          d.view([](const at::Tensor& t) { return t.sum(0); })};
}

void add_gradients(const LayerInputs& inputs, const Heads& x,
                   const Scaled& attended, const at::Tensor& dout,
                   Reference& reference) {
  const multihead::AttentionLayer& layer = inputs.layer;
  const Scaled dy(batch_first(dout, layer));
  const Gradients d = attend_backward(
      x, split(matmul(dy, Scaled(layer.out_proj_weight)), layer.num_heads));
  const auto joined = [](const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v) {
    return at::cat({q, k, v}, -1);
  };
  const Scaled q = merged(d.query), k = merged(d.key), v = merged(d.value);
  const Scaled drows{joined(q.value, k.value, v.value),
                     joined(q.scale, k.scale, v.scale)};
  const Scaled dinput =
      matmul(drows, Scaled(layer.in_proj_weight))
          .view([&](const at::Tensor& t) { return batch_first(t, layer); });
  const LinearGradients in = linear_backward(
                            Scaled(batch_first(inputs.query, layer)), drows),
                        out = linear_backward(merged(attended), dy);
  for (const auto& [name, gradient] : {std::pair("d query", dinput),
                                       {"d in_proj_weight", in.weight},
                                       {"d in_proj_bias", in.bias},
                                       {"d out_proj_weight", out.weight},
                                       {"d out_proj_bias", out.bias}})
    reference.parts.push_back({name, gradient, &naive::Precision::backward});
}

}  // namespace

Reference reference_of(const AttentionInputs& inputs, const at::Tensor& dout) {
  const multihead::AttentionOptions& options = inputs.options;
  const int64_t G = inputs.key.size(1), group = inputs.query.size(1) / G;
  const auto repeated = [&](const at::Tensor& heads) {
    return Scaled(heads.detach().repeat_interleave(group, 1));
  };
  const Heads x{
      .query = Scaled(inputs.query),
      .key = repeated(inputs.key),
      .value = repeated(inputs.value),
      .keep = pytorch::keep_mask(inputs.query, inputs.key, options),
      .bias = pytorch::has_bias(options) ? options.attn_mask.to(at::kDouble)
                                         : no_bias(),
      .scale = options.scale.value_or(1 / std::sqrt(inputs.query.size(3))),
      .average_weights = false};
  const Attended attended = attend(x);
  Reference reference{.parts = {{"output", attended.out}},
                      .lambda = attended.lambda};
  if (!dout.defined()) return reference;
  const Gradients d = attend_backward(x, Scaled(dout));
  const auto grouped = [&](const at::Tensor& heads) {
    return heads.unflatten(1, {G, group}).sum(2);
  };
  using naive::Precision;
  reference.parts.insert(
      reference.parts.end(),
      {{"d query", d.query, &Precision::backward},
       {"d key", d.key.view(grouped), &Precision::backward},
       {"d value", d.value.view(grouped), &Precision::backward_value}});
  return reference;
}

Reference reference_of(const LayerInputs& inputs, const at::Tensor& dout) {
  const multihead::AttentionLayer& layer = inputs.layer;
  const Heads x = project(inputs);
  const Attended attended = attend(x);
  const Scaled out =
      linear(merged(attended.out), layer.out_proj_weight, layer.out_proj_bias)
          .view([&](const at::Tensor& t) { return batch_first(t, layer); });
  Reference reference{.parts = {{"output", out}}, .lambda = attended.lambda};
  if (attended.weights.defined())
    reference.parts.push_back(
        {"weights", {attended.weights, attended.weights}});
  if (dout.defined()) add_gradients(inputs, x, attended.out, dout, reference);
  return reference;
}

double budget_share(const at::Tensor& x, const Scaled& expected, double factor,
                    double lambda, const naive::Precision& precision) {
  if (!x.defined() || x.sizes() != expected.value.sizes()) return kInfinity;
  const at::Tensor allowed =
      expected.scale * (factor * precision.unit(lambda)) + precision.tiny;
  const double share =
      ((x.detach().to(at::kDouble) - expected.value).abs() / allowed)
          .max()
          .item<double>();
  return std::isnan(share) ? kInfinity : share;
}

std::string fault(const std::vector<at::Tensor>& out,
                  const Reference& reference,
                  const naive::Precision& precision) {
  for (size_t i = 0; i < reference.parts.size(); ++i) {
    const Expected& part = reference.parts[i];
    const double share =
        budget_share(i < out.size() ? out[i] : at::Tensor(), part.result,
                     precision.*part.factor, reference.lambda, precision);
    if (!(share <= 1))
      return c10::str(part.name, " differs from float64 by ", share,
                      " times what rounding allows");
  }
  return "";
}

}  // namespace cli
