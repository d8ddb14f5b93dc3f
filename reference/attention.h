// SPDX-License-Identifier: MIT
//
// Attention in plain float64 loops: the one reference of the C++ side, used by
// the tests and by `multihead verify`. No torch, no blocking, no cleverness:
// one numbered pass per step of the definition, forward and backward alike.
//
// Every result comes with its condition scale: the same formula on absolute
// values, by which an error is judged element by element,
//     |x − golden| ≤ c·u·scale + tiny,
// with u from precision.h. The scale of a sum is what its terms would add up to
// without cancellation, so the bound holds for any order of summation.
//
// Letters: B batch, H query heads, G key/value heads, Lq and Lk lengths, D head
// width, Dv value head width. All arrays are dense, last index fastest.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "reference/precision.h"

namespace reference {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// One call of attention. Empty vectors are absent arguments.
struct Attention {
  int64_t B = 1, H = 1, G = 1, Lq = 1, Lk = 1, D = 1, Dv = 1;
  Values query = {};  ///< (B, H, Lq, D)
  Values key = {};    ///< (B, G, Lk, D); head h reads key head h / (H / G)
  Values value = {};  ///< (B, G, Lk, Dv)

  Values bias = {};  ///< (B, H, Lq, Lk), added to the scores; −inf blocks
  bool is_causal = false;
  bool bottom_right = false;  ///< offset = length − Lq instead of 0
  std::vector<int64_t> query_offsets = {};  ///< (B), the offsets themselves
  std::optional<std::array<int64_t, 2>> window =
      {};                                 ///< left, right; −1 = no limit
  std::vector<int64_t> key_lengths = {};  ///< (B); default Lk
  std::vector<bool> key_mask = {};        ///< (B, Lk), false blocks
  std::optional<double> scale = {};       ///< default 1/√D
  std::optional<double> softcap = {};
  Values alibi_slopes = {};  ///< (B, H)
  Values sinks = {};         ///< (H)
  Values dropout = {};       ///< (B, H, Lq, Lk), factors 0 or 1/(1 − p)

  /// Where query, key and value are results themselves: their own condition
  /// scales, which then stand for their absolute values.
  Values query_scale = {}, key_scale = {}, value_scale = {};
};

/// What forward returns.
struct Output {
  Values out;        ///< (B, H, Lq, Dv)
  Values weights;    ///< (B, H, Lq, Lk), before dropout; invisible keys 0
  Values logsumexp;  ///< (B, H, Lq), sink included
  Values out_scale;  ///< like out: Σ weight·|v|
  /// Λ: the largest visible |scale|·Σ|q||k| + |bias| + |alibi|, or |sink|.
  double lambda = 0;
};

/// What backward returns, each with its condition scale.
struct Gradients {
  Values query, key, value;                    ///< like the arguments
  Values query_scale, key_scale, value_scale;  ///< like the arguments
  Values bias, bias_scale;                     ///< (B, H, Lq, Lk)
  Values alibi_slopes, alibi_slopes_scale;     ///< (B, H)
  Values sinks, sinks_scale;                   ///< (H)
};

/// One query row: positions in the arrays, and the keys it may see.
struct Row {
  Row(const Attention& a, int64_t b, int64_t h, int64_t i)
      : b(b),
        h(h),
        i(i),
        number((b * a.H + h) * a.Lq + i),
        first_key((b * a.G + h / (a.H / a.G)) * a.Lk),
        length(a.key_lengths.empty() ? a.Lk : a.key_lengths[b]),
        offset(!a.query_offsets.empty() ? a.query_offsets[b]
               : a.bottom_right         ? length - a.Lq
                                        : 0) {}

  int64_t distance(int64_t j) const { return std::abs(i + offset - j); }

  bool sees(const Attention& a, int64_t j) const {
    if (j >= length) return false;
    if (!a.key_mask.empty() && !a.key_mask[b * a.Lk + j]) return false;
    if (a.is_causal && j > i + offset) return false;
    if (a.window) {
      auto [left, right] = *a.window;
      if (left >= 0 && j < i + offset - left) return false;
      if (right >= 0 && j > i + offset + right) return false;
    }
    return a.bias.empty() || a.bias[number * a.Lk + j] != -kInfinity;
  }

  int64_t b, h, i;
  int64_t number;     ///< (b, h, i) as one index
  int64_t first_key;  ///< (b, g, 0) as one index
  int64_t length;     ///< keys that exist
  int64_t offset;     ///< query i stands at key i + offset
};

inline double scale_of(const Attention& a) {
  return a.scale ? *a.scale : 1 / std::sqrt(static_cast<double>(a.D));
}

/// Σ x·y and Σ of the scales that stand for |x|·|y|.
struct Product {
  double value = 0, scale = 0;
};
inline double magnitude(const Values& x, const Values& scale, int64_t at) {
  return scale.empty() ? std::abs(x[at]) : scale[at];
}

/// scale·(q·k) of one pair, before softcap, bias and ALiBi.
inline Product raw_score(const Attention& a, const Row& row, int64_t j) {
  Product dot;
  for (int64_t d = 0; d < a.D; ++d) {
    const int64_t q = row.number * a.D + d, k = (row.first_key + j) * a.D + d;
    dot.value += a.query[q] * a.key[k];
    dot.scale +=
        magnitude(a.query, a.query_scale, q) * magnitude(a.key, a.key_scale, k);
  }
  return {scale_of(a) * dot.value, std::abs(scale_of(a)) * dot.scale};
}

/// The score of one visible pair; its scale is its share of Λ.
inline Product score(const Attention& a, const Row& row, int64_t j) {
  Product s = raw_score(a, row, j);
  if (a.softcap) s.value = *a.softcap * std::tanh(s.value / *a.softcap);
  if (!a.bias.empty()) {
    const double bias = a.bias[row.number * a.Lk + j];
    s.value += bias;
    s.scale += std::abs(bias);
  }
  if (!a.alibi_slopes.empty()) {
    const double penalty =
        a.alibi_slopes[row.b * a.H + row.h] * row.distance(j);
    s.value -= penalty;
    s.scale += std::abs(penalty);
  }
  return s;
}

/// softmax of one row: fills its weights and logsumexp, raises lambda.
inline void softmax_row(const Attention& a, const Row& row, Output& result) {
  double* weights = result.weights.data() + row.number * a.Lk;
  // 1. Scores of the visible keys; the others stay at −inf.
  Values scores(a.Lk, -kInfinity);
  for (int64_t j = 0; j < a.Lk; ++j) {
    if (!row.sees(a, j)) continue;
    const Product s = score(a, row, j);
    scores[j] = s.value;
    result.lambda = std::max(result.lambda, s.scale);
  }
  // 2. The largest one, sink included; none at all: the row stays zero.
  const double sink = a.sinks.empty() ? -kInfinity : a.sinks[row.h];
  if (std::isfinite(sink))
    result.lambda = std::max(result.lambda, std::abs(sink));
  double largest = sink;
  for (double s : scores)
    if (s > largest || std::isnan(s)) largest = s;
  if (largest == -kInfinity) {
    result.logsumexp[row.number] = -kInfinity;
    return;
  }
  // 3. Exponentials and their sum, in which the sink takes part; in more
  // precision, because hundreds of equal roundings would be judged as the
  // fault of float64 kernels.
  long double sum = std::exp(sink - largest);
  for (int64_t j = 0; j < a.Lk; ++j)
    if (row.sees(a, j)) sum += weights[j] = std::exp(scores[j] - largest);
  // 4. Weights and logsumexp.
  for (int64_t j = 0; j < a.Lk; ++j)
    weights[j] = static_cast<double>(weights[j] / sum);
  result.logsumexp[row.number] = largest + std::log(static_cast<double>(sum));
}

template <typename F>
void for_each_row(const Attention& a, F&& f) {
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t i = 0; i < a.Lq; ++i) f(Row(a, b, h, i));
}

inline double dropout_of(const Attention& a, int64_t row, int64_t j) {
  return a.dropout.empty() ? 1 : a.dropout[row * a.Lk + j];
}

/// softmax(scale·query·keyᵀ + bias)·value with everything in `a`.
inline Output forward(const Attention& a) {
  const int64_t rows = a.B * a.H * a.Lq;
  Output result{.out = Values(rows * a.Dv),
                .weights = Values(rows * a.Lk),
                .logsumexp = Values(rows),
                .out_scale = Values(rows * a.Dv)};
  for_each_row(a, [&](const Row& row) {
    softmax_row(a, row, result);  // passes 1 to 4
    // 5. Values, weighted.
    for (int64_t j = 0; j < a.Lk; ++j) {
      if (!row.sees(a, j)) continue;
      const double weight =
          result.weights[row.number * a.Lk + j] * dropout_of(a, row.number, j);
      for (int64_t c = 0; c < a.Dv; ++c) {
        const int64_t v = (row.first_key + j) * a.Dv + c;
        const int64_t o = row.number * a.Dv + c;
        result.out[o] += weight * a.value[v];
        result.out_scale[o] += weight * magnitude(a.value, a.value_scale, v);
      }
    }
  });
  return result;
}

/// Gradients of one row's scores, softmax backwards.
struct RowGradient {
  Values score, scale;  ///< (Lk): ds and its condition scale
  /// Σ weight·dweight − dlogsumexp, what a sink's gradient needs.
  double mean = 0, mean_scale = 0;
};

inline RowGradient softmax_row_backward(const Attention& a, const Row& row,
                                        const Output& result,
                                        const Values& dout,
                                        const Values& dlogsumexp) {
  RowGradient g{Values(a.Lk), Values(a.Lk)};
  const double* weights = result.weights.data() + row.number * a.Lk;
  // 5ʹ. dweight = dropout·(dout·v), and its mean under the weights.
  for (int64_t j = 0; j < a.Lk; ++j) {
    if (!row.sees(a, j)) continue;
    for (int64_t c = 0; c < a.Dv; ++c) {
      const double d = dout[row.number * a.Dv + c];
      const double v = a.value[(row.first_key + j) * a.Dv + c];
      g.score[j] += d * v * dropout_of(a, row.number, j);
      g.scale[j] += std::abs(d * v) * dropout_of(a, row.number, j);
    }
    g.mean += weights[j] * g.score[j];
    g.mean_scale += weights[j] * g.scale[j];
  }
  if (!dlogsumexp.empty()) {
    g.mean -= dlogsumexp[row.number];
    g.mean_scale += std::abs(dlogsumexp[row.number]);
  }
  // 4ʹ–1ʹ. ds = weight·(dweight − mean).
  for (int64_t j = 0; j < a.Lk; ++j) {
    g.score[j] = weights[j] * (g.score[j] - g.mean);
    g.scale[j] = weights[j] * (g.scale[j] + g.mean_scale);
  }
  return g;
}

/// Gradients of Σ out·dout + Σ logsumexp·dlogsumexp; dout (B, H, Lq, Dv),
/// dlogsumexp (B, H, Lq) or empty, `result` from forward(a).
inline Gradients backward(const Attention& a, const Output& result,
                          const Values& dout, const Values& dlogsumexp = {}) {
  Gradients g{Values(a.query.size()),
              Values(a.key.size()),
              Values(a.value.size()),
              Values(a.query.size()),
              Values(a.key.size()),
              Values(a.value.size()),
              Values(result.weights.size()),
              Values(result.weights.size()),
              Values(a.B * a.H),
              Values(a.B * a.H),
              Values(a.H),
              Values(a.H)};
  for_each_row(a, [&](const Row& row) {
    const RowGradient ds =
        softmax_row_backward(a, row, result, dout, dlogsumexp);
    if (!a.sinks.empty() && result.logsumexp[row.number] != -kInfinity) {
      const double weight =
          std::exp(a.sinks[row.h] - result.logsumexp[row.number]);
      g.sinks[row.h] -= weight * ds.mean;
      g.sinks_scale[row.h] += weight * ds.mean_scale;
    }
    for (int64_t j = 0; j < a.Lk; ++j) {
      if (!row.sees(a, j)) continue;
      const int64_t pair = row.number * a.Lk + j;
      g.bias[pair] = ds.score[j];
      g.bias_scale[pair] = ds.scale[j];
      g.alibi_slopes[row.b * a.H + row.h] -= ds.score[j] * row.distance(j);
      g.alibi_slopes_scale[row.b * a.H + row.h] +=
          ds.scale[j] * row.distance(j);

      const double t =
          a.softcap ? std::tanh(raw_score(a, row, j).value / *a.softcap) : 0;
      const double draw = ds.score[j] * (1 - t * t) * scale_of(a);
      const double draw_scale =
          ds.scale[j] * (1 + t * t) * std::abs(scale_of(a));
      for (int64_t d = 0; d < a.D; ++d) {
        const int64_t q = row.number * a.D + d;
        const int64_t k = (row.first_key + j) * a.D + d;
        g.query[q] += draw * a.key[k];
        g.query_scale[q] += draw_scale * std::abs(a.key[k]);
        g.key[k] += draw * a.query[q];
        g.key_scale[k] += draw_scale * std::abs(a.query[q]);
      }
      const double weight = result.weights[pair] * dropout_of(a, row.number, j);
      for (int64_t c = 0; c < a.Dv; ++c) {
        const int64_t v = (row.first_key + j) * a.Dv + c;
        const double d = dout[row.number * a.Dv + c];
        g.value[v] += weight * d;
        g.value_scale[v] += weight * std::abs(d);
      }
    }
  });
  return g;
}

}  // namespace reference
