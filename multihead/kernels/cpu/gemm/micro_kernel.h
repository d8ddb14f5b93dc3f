// SPDX-License-Identifier: MIT
//
// The two register-blocked products. Rows of queries lie in the lanes: a tile
// of kVectors vectors of rows meets keys, or columns of values, one number of
// which is broadcast and used kVectors times.
//
//   scores:  s[key][row]    = Σ_d   k[key][d] · q[d][row]          Sᵀ = K·Qᵀ
//   context: o[column][row] = Σ_key v[key][column] · p[key][row]   Oᵀ = Vᵀ·Pᵀ
//
// So K and V are read as they lie in memory, maxima and sums run down the
// lanes, and nothing is ever added across lanes. Per step of the inner loop a
// tile of R×C multiply-adds loads R + C vectors' worth: with 32 registers
// 8×3 (24 accumulators, 11 loads), with 16 registers 4×3 (12, 7).
//
// Each accumulator is one chain in ascending order, so its bits do not depend
// on the shape of the tile. A score is a sum of chains of kScoreChain: in one
// chain of 64 and more, rounding exceeds the budget of logsumexp once in 1e5
// rows. It costs 2 to 3 % at D = 64.
#pragma once

#include "multihead/kernels/cpu/blocking/key_blocks.h"
#include "multihead/kernels/cpu/simd/simd.h"

namespace multihead::kernels {
namespace {

/// How products multiply and add. kPair numbers that follow one another along
/// the summed dimension share an element; keys are computed in groups of
/// kKeyGroup.
template <class Lanes>
struct FusedMultiplyAdd {
  using F = Lanes;
  using Vector = typename F::Vector;
  static constexpr int kPair = 1;
  static constexpr int64_t kKeyGroup = 1;
  /// Elements of a row of keys; columns of values, with padding.
  static constexpr int64_t depth(int64_t width) { return width; }
  static constexpr int64_t columns(int64_t width) { return width; }

  MULTIHEAD_INLINE Vector multiply_add(Vector a, Vector b, Vector c) {
    return F::fma(a, b, c);
  }
  /// a, 0 where the weight is −0: a value hidden from lanes not to see it.
  MULTIHEAD_INLINE Vector zero_if_hidden(Vector a, Vector weight) {
    return F::select(F::is_negative_zero(weight), F::broadcast(0), a);
  }
};

#ifdef __AVX512BF16__
/// Pairs of bfloat16 in the place of each float32.
struct BFloat16Multiplier {
  using F = Float32;
  using Vector = F::Vector;
  static constexpr int kPair = 2;
  /// Weights of two keys as one element.
  MULTIHEAD_INLINE Vector interleave(Vector even, Vector odd) {
    return BFloat16Pairs::interleave(BFloat16Pairs::round(even, odd));
  }
};

/// Twice the multiply-adds per instruction where the CPU runs it at full rate.
struct BFloat16Dot : BFloat16Multiplier {
  static constexpr int64_t kKeyGroup = 2;
  static constexpr int64_t depth(int64_t width) { return (width + 1) / 2; }
  static constexpr int64_t columns(int64_t width) { return width; }

  MULTIHEAD_INLINE Vector multiply_add(Vector a, Vector b, Vector c) {
    return BFloat16Pairs::dot(a, b, c);
  }
};
#endif

/// Products of single numbers hide a value from the lanes that do not see it;
/// those of pairs take numbers that are not finite out of the panel (panel.h),
/// and whoever calls adds them by themselves (left_out.h).
template <class M>
inline constexpr bool kPackDropsNonFinite = M::kPair == 2;

/// A factor as the lanes with these weights may see it.
template <class M, bool kMaskNonFinite>
MULTIHEAD_INLINE typename M::F::Vector zero_if_hidden(
    typename M::F::Vector factor,
    [[maybe_unused]] typename M::F::Vector weight) {
  if constexpr (kMaskNonFinite) {
    return M::zero_if_hidden(factor, weight);
  } else {
    return factor;
  }
}

/// Distance between rows of a tile's scratch, however many vectors it uses: a
/// constant, because address arithmetic between the products costs 5 %.
template <class F>
inline constexpr int64_t kTileLanes = kMaxVectors * F::kLanes;

/// R for a tile of that many vectors: as many as the registers hold.
template <class F>
constexpr int micro_rows(int vectors) {
  if (F::kRegisters >= 32) return vectors == 3 ? 8 : vectors == 2 ? 12 : 16;
  return vectors == 3 ? 4 : vectors == 2 ? 6 : 8;
}
/// R for what remains: 12 → 8 → 4 → 2 → 1.
constexpr int next_micro_rows(int micro_rows) {
  return micro_rows > 8 ? 8 : micro_rows > 4 ? 4 : micro_rows / 2;
}

/// Keys against the rows of a tile. Strides in elements.
template <typename T>
struct QkTile {
  const T* key;  ///< (keys, depth)
  int64_t key_stride;
  const T* query;  ///< (depth, lanes), aligned
  int64_t depth;   ///< elements per key
  T* scores;       ///< (keys, lanes)
  T* maximum;      ///< (lanes), raised to the largest score
  T scale;         ///< of the sums of pairs; queries hold it otherwise
};

/// Elements of a key in one chain; part of the result.
inline constexpr int64_t kScoreChain = 32;

/// The chain that begins at `from`, from 0.
template <class M, int kVectors, int kRows>
MULTIHEAD_INLINE void qk_chain(const QkTile<typename M::F::Scalar>& t,
                               int64_t from,
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
MULTIHEAD_INLINE void qk_micro_kernel(const QkTile<typename M::F::Scalar>& t) {
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
      if constexpr (M::kPair == 2) {
        sum[r][c] = F::mul(sum[r][c], F::broadcast(t.scale));
      }
      if constexpr (kMaximum) m = F::max(sum[r][c], m);
      F::store(t.scores + r * kTileLanes<F> + c * F::kLanes, sum[r][c]);
    }
    if constexpr (kMaximum) F::store(maximum, m);
  }
}

template <class M, int kVectors, int kRows, bool kMaximum>
[[gnu::noinline]] void qk_keys(QkTile<typename M::F::Scalar> t, int64_t keys) {
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

/// Weights of the rows of a tile against values.
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
MULTIHEAD_INLINE void pv_micro_kernel(const PvTile<typename M::F::Scalar>& t) {
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
[[gnu::noinline]] void pv_columns(PvTile<typename M::F::Scalar> t,
                                  int64_t columns) {
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
