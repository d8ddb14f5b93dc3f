// SPDX-License-Identifier: MIT
#include "reference/tensors.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

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
// backward.
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

}  // namespace

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

Scaled matmul(const Scaled& a, const Scaled& b) {
  return {at::matmul(a.value, b.value), at::matmul(a.scale, b.scale)};
}

Scaled linear(const Scaled& x, const at::Tensor& weight,
              const at::Tensor& bias) {
  Scaled y = matmul(x, transposed(Scaled(weight)));
  if (!bias.defined()) return y;
  const Scaled b(bias);
  return {y.value + b.value, y.scale + b.scale};
}

LinearGradients linear_backward(const Scaled& x, const Scaled& dy) {
  const auto rows = [](const at::Tensor& t) { return t.flatten(0, 1); };
  const Scaled d = dy.view(rows);
  return {matmul(transposed(d), x.view(rows)),
          d.view([](const at::Tensor& t) { return t.sum(0); })};
}

double budget_share(const at::Tensor& x, const Scaled& expected, double factor,
                    double lambda, const Precision& precision) {
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
                  const Reference& reference, const Precision& precision) {
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

}  // namespace reference
