// SPDX-License-Identifier: MIT
#include "cli/cases/golden_fast.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cli/cases/pytorch.h"

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

Scaled zeros(at::IntArrayRef sizes) {
  return {at::zeros(sizes, at::kDouble), at::zeros(sizes, at::kDouble)};
}

void add(const Scaled& to, const Scaled& x) {
  to.value.add_(x.value);
  to.scale.add_(x.scale);
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
  at::Tensor weights;  // (B, Lq, Lk), averaged; where they are asked for
  double lambda = 0;
  Scaled dquery, dkey, dvalue;  // where there is a gradient of out
};

at::Tensor no_bias() { return at::zeros({}, at::kDouble); }

// Some heads and queries of a batch row, and the keys between the first and the
// last that any of them sees.
struct Tile {
  int64_t b, h, heads, i, rows, j, keys;

  at::Tensor of_queries(const at::Tensor& x) const {  // (B, H, Lq, …)
    return x[b].narrow(0, h, heads).narrow(1, i, rows);
  }
  at::Tensor of_keys(const at::Tensor& x) const {  // (B, H, Lk, …)
    return x[b].narrow(0, h, heads).narrow(1, j, keys);
  }
  at::Tensor of_pairs(const at::Tensor& x) const {  // (B, H, Lq, Lk)
    return of_queries(x).narrow(2, j, keys);
  }
  Scaled of_queries(const Scaled& x) const {
    return {of_queries(x.value), of_queries(x.scale)};
  }
  Scaled of_keys(const Scaled& x) const {
    return {of_keys(x.value), of_keys(x.scale)};
  }
};

// Tiles of at most 16 MiB of scores; rows that see no key are left out.
template <typename Visit>
void for_each_tile(const at::Tensor& keep, Visit visit) {
  constexpr int64_t kRows = 512, kScores = int64_t{1} << 21;
  const int64_t B = keep.size(0), H = keep.size(1), Lq = keep.size(2),
                Lk = keep.size(3), rows = std::min(Lq, kRows),
                heads = std::clamp<int64_t>(kScores / (rows * Lk), 1, H);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; h += heads)
      for (int64_t i = 0; i < Lq; i += rows) {
        Tile tile{b, h, std::min(heads, H - h), i, std::min(rows, Lq - i),
                  0, Lk};
        const at::Tensor seen =
            tile.of_queries(keep).flatten(0, 1).any(0).nonzero();
        if (seen.numel() == 0) continue;
        tile.j = seen.min().item<int64_t>();
        tile.keys = seen.max().item<int64_t>() + 1 - tile.j;
        visit(tile);
      }
}

// The gradients of Σ out·dout from a tile's weights, by the steps of
// reference::backward.
void add_gradients(const Heads& x, const Tile& tile, const at::Tensor& w,
                   const Scaled& all_dout, Attended& result) {
  const Scaled q = tile.of_queries(x.query), k = tile.of_keys(x.key),
               v = tile.of_keys(x.value), dout = tile.of_queries(all_dout);
  const Scaled dw = matmul(dout, transposed(v));
  const at::Tensor mean = (w * dw.value).sum(-1, /*keepdim=*/true),
                   mean_scale = (w * dw.scale).sum(-1, /*keepdim=*/true);
  const Scaled ds{(dw.value - mean).mul_(w).mul_(x.scale),
                  (dw.scale + mean_scale).mul_(w).mul_(std::abs(x.scale))};
  add(tile.of_queries(result.dquery), matmul(ds, k));
  add(tile.of_keys(result.dkey), matmul(transposed(ds), q));
  add(tile.of_keys(result.dvalue), matmul(transposed({w, w}), dout));
}

// `dout` without tensors: no gradients.
Attended attend(const Heads& x, const Scaled& dout) {
  const auto sizes = x.query.value.sizes();
  const int64_t B = sizes[0], H = sizes[1], Lq = sizes[2],
                Lk = x.key.value.size(2), Dv = x.value.value.size(3);
  Attended result;
  result.out = zeros({B, H, Lq, Dv});
  if (x.average_weights) result.weights = at::zeros({B, Lq, Lk}, at::kDouble);
  if (dout.value.defined()) {
    result.dquery = zeros(sizes);
    result.dkey = zeros(x.key.value.sizes());
    result.dvalue = zeros(x.value.value.sizes());
  }
  const at::Tensor keep = x.keep.expand({B, H, Lq, Lk}),
                   bias = x.bias.expand({B, H, Lq, Lk});
  for_each_tile(keep, [&](const Tile& tile) {
    const Scaled q = tile.of_queries(x.query), k = tile.of_keys(x.key);
    const at::Tensor blocked = tile.of_pairs(keep).logical_not();
    const at::Tensor w = at::matmul(q.value, k.value.mT())
                             .mul_(x.scale)
                             .add_(tile.of_pairs(bias))
                             .masked_fill_(blocked, -kInfinity)
                             .softmax(-1)
                             .masked_fill_(blocked, 0);
    const at::Tensor sizes_of_scores = at::matmul(q.scale, k.scale.mT())
                                           .mul_(std::abs(x.scale))
                                           .add_(tile.of_pairs(bias).abs())
                                           .masked_fill_(blocked, 0);
    result.lambda =
        std::max(result.lambda, sizes_of_scores.max().item<double>());
    add(tile.of_queries(result.out), matmul({w, w}, tile.of_keys(x.value)));
    if (x.average_weights)
      result.weights[tile.b]
          .narrow(0, tile.i, tile.rows)
          .narrow(1, tile.j, tile.keys)
          .add_(w.sum(0) / H);
    if (dout.value.defined()) add_gradients(x, tile, w, dout, result);
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

// `dy` is the gradient of the output, batch first.
void add_gradients(const LayerInputs& inputs, const Attended& x,
                   const Scaled& dy, Reference& reference) {
  const multihead::AttentionLayer& layer = inputs.layer;
  const auto joined = [](const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v) {
    return at::cat({q, k, v}, -1);
  };
  const Scaled q = merged(x.dquery), k = merged(x.dkey), v = merged(x.dvalue);
  const Scaled drows{joined(q.value, k.value, v.value),
                     joined(q.scale, k.scale, v.scale)};
  const Scaled dinput =
      matmul(drows, Scaled(layer.in_proj_weight))
          .view([&](const at::Tensor& t) { return batch_first(t, layer); });
  const LinearGradients in = linear_backward(
                            Scaled(batch_first(inputs.query, layer)), drows),
                        out = linear_backward(merged(x.out), dy);
  for (const auto& [name, gradient] : {std::pair("d query", dinput),
                                       {"d in_proj_weight", in.weight},
                                       {"d in_proj_bias", in.bias},
                                       {"d out_proj_weight", out.weight},
                                       {"d out_proj_bias", out.bias}})
    reference.parts.push_back(
        {name, gradient, &reference::Precision::backward});
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
  const Attended y = attend(x, dout.defined() ? Scaled(dout) : Scaled());
  Reference reference{.parts = {{"output", y.out}}, .lambda = y.lambda};
  if (!dout.defined()) return reference;
  const auto grouped = [&](const at::Tensor& heads) {
    return heads.unflatten(1, {G, group}).sum(2);
  };
  using reference::Precision;
  reference.parts.insert(
      reference.parts.end(),
      {{"d query", y.dquery, &Precision::backward},
       {"d key", y.dkey.view(grouped), &Precision::backward},
       {"d value", y.dvalue.view(grouped), &Precision::backward_value}});
  return reference;
}

Reference reference_of(const LayerInputs& inputs, const at::Tensor& dout) {
  const multihead::AttentionLayer& layer = inputs.layer;
  Scaled dy, dheads;
  if (dout.defined()) {
    dy = Scaled(batch_first(dout, layer));
    dheads = split(matmul(dy, Scaled(layer.out_proj_weight)), layer.num_heads);
  }
  const Attended x = attend(project(inputs), dheads);
  const Scaled out =
      linear(merged(x.out), layer.out_proj_weight, layer.out_proj_bias)
          .view([&](const at::Tensor& t) { return batch_first(t, layer); });
  Reference reference{.parts = {{"output", out}}, .lambda = x.lambda};
  if (x.weights.defined())
    reference.parts.push_back({"weights", {x.weights, x.weights}});
  if (dout.defined()) add_gradients(inputs, x, dy, reference);
  return reference;
}

double budget_share(const at::Tensor& x, const Scaled& expected, double factor,
                    double lambda, const reference::Precision& precision) {
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
                  const reference::Precision& precision) {
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
