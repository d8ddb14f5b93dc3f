// SPDX-License-Identifier: MIT
//
// A whole attention layer in plain float64 loops, around attention.h:
// projections, heads, attention, output projection. Condition scales run
// through all of it.
#pragma once

#include "reference/attention.h"

namespace reference {

/// rows (n, width) with the scales that stand for their absolute values.
struct Rows {
  explicit Rows(Values v) : value(std::move(v)), scale(value) {
    for (double& s : scale) s = std::abs(s);
  }
  Rows(Values v, Values s) : value(std::move(v)), scale(std::move(s)) {}
  Values value, scale;
};

/// weight (out, in) and bias (out, or absent).
struct Linear {
  Values weight = {}, bias = {};
};

/// x (n, in) → x · weightᵀ + bias (n, out).
inline Rows linear(const Rows& x, const Linear& layer, int64_t in) {
  const int64_t n = x.value.size() / in, out = layer.weight.size() / in;
  Rows y(Values(n * out), Values(n * out));
  for (int64_t r = 0; r < n; ++r)
    for (int64_t o = 0; o < out; ++o) {
      double sum = layer.bias.empty() ? 0 : layer.bias[o];
      double scale = std::abs(sum);
      for (int64_t i = 0; i < in; ++i) {
        const double w = layer.weight[o * in + i];
        sum += x.value[r * in + i] * w;
        scale += x.scale[r * in + i] * std::abs(w);
      }
      y.value[r * out + o] = sum;
      y.scale[r * out + o] = scale;
    }
  return y;
}

/// Parameters and arguments of one layer; `attention` has the sizes (Lk counts
/// what bias_k and add_zero_attn append) and everything that acts on scores.
struct Layer {
  Attention attention;
  int64_t embed_dim = 0, kdim = 0, vdim = 0;
  Values query = {}, key = {},
         value = {};  ///< (B, Lq, E), (B, Lk, kdim), (B, Lk, vdim)
  Linear q = {}, k = {}, v = {}, out = {};
  Values bias_k = {}, bias_v = {};  ///< (G·D), appended after the last key
  bool add_zero_attn = false;
};

/// out (B, Lq, E) and weights (B, H, Lq, Lk).
struct LayerOutput {
  Rows out;
  Values weights;
  double lambda;
};

/// (B·L, G·D) → (B, G, L + extra, D), with what is appended to every sequence.
inline Values split_heads(const Values& rows, int64_t B, int64_t G, int64_t D,
                          const std::vector<Values>& extra) {
  const int64_t L = rows.size() / (B * G * D);
  const int64_t total = L + static_cast<int64_t>(extra.size());
  Values heads(B * G * total * D);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t g = 0; g < G; ++g)
      for (int64_t l = 0; l < total; ++l)
        for (int64_t d = 0; d < D; ++d)
          heads[((b * G + g) * total + l) * D + d] =
              l < L ? rows[((b * L + l) * G + g) * D + d]
                    : extra[l - L][g * D + d];
  return heads;
}

/// (B, H, L, D) → (B·L, H·D)
inline Values merge_heads(const Values& heads, const Attention& a) {
  Values rows(heads.size());
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t l = 0; l < a.Lq; ++l)
        for (int64_t d = 0; d < a.Dv; ++d)
          rows[((b * a.Lq + l) * a.H + h) * a.Dv + d] =
              heads[((b * a.H + h) * a.Lq + l) * a.Dv + d];
  return rows;
}

inline LayerOutput forward(const Layer& layer) {
  Attention a = layer.attention;
  // 1. Queries, keys and values.
  const Rows q = linear(Rows(layer.query), layer.q, layer.embed_dim);
  const Rows k = linear(Rows(layer.key), layer.k, layer.kdim);
  const Rows v = linear(Rows(layer.value), layer.v, layer.vdim);
  // 2. Heads; keys and values get what the layer appends.
  const auto split = [&](const Rows& rows, const Values& bias, Values& value,
                         Values& scale) {
    std::vector<Values> extra, extra_scale;
    if (!bias.empty()) {
      const Rows appended(bias);
      extra.push_back(appended.value);
      extra_scale.push_back(appended.scale);
    }
    if (layer.add_zero_attn) {
      extra.emplace_back(a.G * a.D);
      extra_scale.emplace_back(a.G * a.D);
    }
    value = split_heads(rows.value, a.B, a.G, a.D, extra);
    scale = split_heads(rows.scale, a.B, a.G, a.D, extra_scale);
  };
  a.query = split_heads(q.value, a.B, a.H, a.D, {});
  a.query_scale = split_heads(q.scale, a.B, a.H, a.D, {});
  split(k, layer.bias_k, a.key, a.key_scale);
  split(v, layer.bias_v, a.value, a.value_scale);
  // 3. Attention.
  Output result = forward(a);
  // 4. Heads side by side, and the output projection.
  const Rows merged(merge_heads(result.out, a),
                    merge_heads(result.out_scale, a));
  return {linear(merged, layer.out, a.H * a.Dv), std::move(result.weights),
          result.lambda};
}

/// Weights (B, H, Lq, Lk) averaged over heads: (B, Lq, Lk).
inline Values average_heads(const Values& weights, const Attention& a) {
  const int64_t pairs = a.Lq * a.Lk;
  Values mean(a.B * pairs);
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t p = 0; p < pairs; ++p)
        mean[b * pairs + p] += weights[(b * a.H + h) * pairs + p] / a.H;
  return mean;
}

}  // namespace reference
