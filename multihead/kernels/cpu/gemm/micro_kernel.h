// SPDX-License-Identifier: MIT
//
// The micro-kernels of the two GEMMs of attention. A tile of queries lies in
// the lanes, kVectors vectors of rows; one number of a key or a value is
// broadcast and used kVectors times:
//
//   qk:  S[key][row]    = Σ_d   K[key][d] · Q[d][row]          Sᵀ = K·Qᵀ
//   pv:  O[column][row] = Σ_key V[key][column] · P[key][row]   Oᵀ = Vᵀ·Pᵀ
//
//              row of the tile (lanes) →          A micro-kernel holds MR × NR
//            ┌────────┬────────┬────────┐         sums in registers: MR keys
//            (or
//      key ↓ │ vector │ vector │ vector │ MR      columns of V), NR vectors of
//            └────────┴────────┴────────┘         rows.
//
// So K and V are read as they lie in memory, maxima and sums run down the
// lanes, and nothing is ever added across lanes. A step of the inner loop loads
// MR + NR operands for MR·NR multiply-adds: with 32 registers 8×3 (24
// accumulators, 11 loads), with 16 registers 4×3 (12, 7).
//
// Each accumulator is one chain in ascending order, so its bits do not depend
// on the shape of the micro-kernel. A score is a sum of chains of kScoreChain:
// with one chain over D = 64 and more, rounding exceeds the budget of logsumexp
// once in 1e5 rows. The shorter chains cost 2 to 3 % at D = 64.
#pragma once

#include "multihead/kernels/cpu/blocking/key_blocks.h"

namespace multihead::kernels {
namespace {

/// The multiplier M of a kernel describes how a GEMM multiplies, and so how its
/// operands are stored. This one takes single numbers; bf16_dot.h and amx.h
/// take pairs of bfloat16.
template <class Lanes>
struct FusedMultiplyAdd {
  using F = Lanes;
  using Vector = typename F::Vector;
  using Scalar = typename F::Scalar;
  /// Numbers that share an element of an operand; they follow one another
  /// along the summed dimension.
  static constexpr int kPair = 1;
  /// Keys are computed in whole groups of so many.
  static constexpr int64_t kKeyGroup = 1;
  /// Whether scores are scaled after the product; else Q holds the scale.
  static constexpr bool kScalesScores = false;
  /// Whether packing drops what is not finite, to be added back (nonfinite.h);
  /// else zero_if_hidden keeps it from the rows that must not see it.
  static constexpr bool kPackDropsNonFinite = false;
  /// Whether P and dS are copied, rounded, before they are multiplied.
  static constexpr bool kPacksWeights = false;
  /// Whether a few rows have products of their own (row_products.h).
  static constexpr bool kHasRowProducts = true;
  /// Tiles whose rows are multiplied at once by outer_product.h. More would
  /// share the loads of dK and dV, but only packed weights can wait for them.
  static constexpr int kOuterTiles = 1;
  /// How rows of queries are read that are stored as S.
  template <class S>
  using QueryStorage = S;
  /// Elements of `numbers` numbers along the summed dimension, with padding.
  static constexpr int64_t depth(int64_t numbers) { return numbers; }
  /// Columns of values, with padding.
  static constexpr int64_t columns(int64_t width) { return width; }

  SIMD_INLINE Vector multiply_add(Vector a, Vector b, Vector c) {
    return F::fma(a, b, c);
  }
  /// a, or 0 where the weight is −0: the row must not see this key.
  SIMD_INLINE Vector zero_if_hidden(Vector a, Vector weight) {
    return F::select(F::is_negative_zero(weight), F::broadcast(0), a);
  }
  /// Weights (keys, lanes) as pv takes them.
  static const Scalar* pack_weights(const Scalar* weights, int64_t /*keys*/,
                                    int /*vectors*/, Scalar* /*packed*/) {
    return weights;
  }
};

/// A factor as the rows with these weights may see it.
template <class M, bool kMaskNonFinite>
SIMD_INLINE typename M::F::Vector zero_if_hidden(typename M::F::Vector factor,
                                                 [[maybe_unused]]
                                                 typename M::F::Vector weight) {
  if constexpr (kMaskNonFinite) {
    return M::zero_if_hidden(factor, weight);
  } else {
    return factor;
  }
}

/// MR for that many vectors: as many as the registers hold.
template <class F>
constexpr int micro_rows(int vectors) {
  if (F::kRegisters >= 32) return vectors == 3 ? 8 : vectors == 2 ? 12 : 16;
  return vectors == 3 ? 4 : vectors == 2 ? 6 : 8;
}
/// MR for what remains: 12 → 8 → 4 → 2 → 1.
constexpr int next_micro_rows(int micro_rows) {
  return micro_rows > 8 ? 8 : micro_rows > 4 ? 4 : micro_rows / 2;
}

/// S (keys, rows) = K (keys, depth) · Q (depth, rows), a GEMM of M = keys,
/// N = rows of the tile, K = depth; dP = V·dOᵀ is the same. Strides in
/// elements.
template <typename T>
struct QkTile {
  const T* key;  ///< (keys, depth)
  int64_t key_stride;
  const T* query;  ///< (depth, lanes), aligned
  int64_t depth;   ///< elements per key
  T* scores;       ///< (keys, lanes)
  T* maximum;      ///< (lanes), raised to the largest score
  T scale;         ///< where M::kScalesScores
};

/// Elements of a key in one chain; part of the result.
inline constexpr int64_t kScoreChain = 32;

/// The chain that begins at `from`, from 0.
template <class M, int kVectors, int kRows>
SIMD_INLINE void qk_chain(const QkTile<ScalarOf<M>>& t, int64_t from,
                          typename M::F::Vector (&sum)[kRows][kVectors]) {
  using F = typename M::F;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) sum[r][c] = F::broadcast(0);
  }
  const int64_t to = min(t.depth, from + kScoreChain);
  const auto* query = t.query + from * kTileLanes<F>;
#pragma GCC unroll 2
  for (int64_t x = from; x < to; ++x, query += kTileLanes<F>) {
    typename F::Vector q[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) q[c] = F::load(query + c * F::kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto k = F::broadcast(t.key[r * t.key_stride + x]);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) {
        sum[r][c] = M::multiply_add(k, q[c], sum[r][c]);
      }
    }
  }
}

template <class M, int kVectors, int kRows, bool kMaximum>
SIMD_INLINE void qk_micro_kernel(const QkTile<ScalarOf<M>>& t) {
  using F = typename M::F;
  typename F::Vector sum[kRows][kVectors];
  for (int64_t from = 0;; from += kScoreChain) {
    qk_chain<M, kVectors, kRows>(t, from, sum);
    const bool last = from + kScoreChain >= t.depth;
    if (from == 0 && last) break;
    // Chains before this one wait where the scores will be.
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) {
        auto* score = t.scores + r * kTileLanes<F> + c * F::kLanes;
        if (from > 0) sum[r][c] = F::add(F::load(score), sum[r][c]);
        if (!last) F::store(score, sum[r][c]);
      }
    }
    if (last) break;
  }
#pragma GCC unroll 4
  for (int c = 0; c < kVectors; ++c) {
    auto* maximum = t.maximum + c * F::kLanes;
    auto m = kMaximum ? F::load(maximum) : F::broadcast(0);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      if constexpr (M::kScalesScores) {
        sum[r][c] = F::mul(sum[r][c], F::broadcast(t.scale));
      }
      if constexpr (kMaximum) m = F::max(sum[r][c], m);
      F::store(t.scores + r * kTileLanes<F> + c * F::kLanes, sum[r][c]);
    }
    if constexpr (kMaximum) F::store(maximum, m);
  }
}

template <class M, int kVectors, int kRows, bool kMaximum>
[[gnu::noinline]] void qk_keys(QkTile<ScalarOf<M>> t, int64_t keys) {
  using F = typename M::F;
  for (; keys >= kRows; keys -= kRows) {
    qk_micro_kernel<M, kVectors, kRows, kMaximum>(t);
    t.key += kRows * t.key_stride;
    t.scores += kRows * kTileLanes<F>;
  }
  if constexpr (kRows > 1) {
    if (keys > 0)
      qk_keys<M, kVectors, next_micro_rows(kRows), kMaximum>(t, keys);
  }
}

/// O (columns, rows) = factor·O + Vᵀ (columns, keys) · P (keys, rows), a GEMM
/// of M = columns, N = rows of the tile, K = keys; dQ += dS·K is the same.
template <typename T>
struct PvTile {
  const T* value;  ///< (depth, columns)
  int64_t value_stride;
  const T* weights;  ///< (depth, lanes), aligned
  int64_t depth;     ///< elements per column
  T* context;        ///< (columns, lanes), scaled, then added to
  const T* factor;   ///< (lanes)
};

template <class M, int kVectors, int kRows, bool kMaskNonFinite>
SIMD_INLINE void pv_micro_kernel(const PvTile<ScalarOf<M>>& t) {
  using F = typename M::F;
  typename F::Vector sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int c = 0; c < kVectors; ++c) {
    const auto factor = F::load(t.factor + c * F::kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      sum[r][c] = F::mul(
          factor, F::load(t.context + r * kTileLanes<F> + c * F::kLanes));
    }
  }
  const auto* weights = t.weights;
  const auto* value = t.value;
#pragma GCC unroll 2
  for (int64_t x = 0; x < t.depth; ++x) {
    typename F::Vector p[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) p[c] = F::load(weights + c * F::kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto v = F::broadcast(value[r]);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) {
        sum[r][c] = M::multiply_add(zero_if_hidden<M, kMaskNonFinite>(v, p[c]),
                                    p[c], sum[r][c]);
      }
    }
    weights += kTileLanes<F>;
    value += t.value_stride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      F::store(t.context + r * kTileLanes<F> + c * F::kLanes, sum[r][c]);
    }
  }
}

template <class M, int kVectors, int kRows, bool kMaskNonFinite>
[[gnu::noinline]] void pv_columns(PvTile<ScalarOf<M>> t, int64_t columns) {
  using F = typename M::F;
  for (; columns >= kRows; columns -= kRows) {
    pv_micro_kernel<M, kVectors, kRows, kMaskNonFinite>(t);
    t.value += kRows;
    t.context += kRows * kTileLanes<F>;
  }
  if constexpr (kRows > 1) {
    if (columns > 0) {
      pv_columns<M, kVectors, next_micro_rows(kRows), kMaskNonFinite>(t,
                                                                      columns);
    }
  }
}

}  // namespace
}  // namespace multihead::kernels
