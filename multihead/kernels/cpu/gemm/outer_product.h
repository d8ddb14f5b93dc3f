// SPDX-License-Identifier: MIT
//
// The third GEMM, of the backward pass: what rows of queries add to the
// gradients of keys. The width of a head lies in the lanes.
//
//   outer:  G[key][e] += Σ_row P[key][row] · X[row][e]           G += Pᵀ·X
//
// with (G, P, X) = (dV, P, dO) or (dK, dS, Q). The sum runs over the rows,
// which lie in the lanes of the other two GEMMs; so P is read as numbers to
// broadcast and X as vectors along its rows, both as they lie. Each sum is one
// chain over the rows in ascending order.
#pragma once

#include "multihead/kernels/cpu/gemm/micro_kernel.h"

namespace multihead::kernels {
namespace {

/// Elements from the weights of one key to those of the next.
template <class M>
inline constexpr int64_t kOuterStride =
    M::kOuterTiles * kTileLanes<typename M::F> / M::kPair;

/// G (keys, width) += Pᵀ (keys, rows) · X (rows, width), a GEMM of M = keys,
/// N = width in whole vectors (zeros pad a row), K = rows.
template <typename T>
struct OuterTile {
  const T* weights;  ///< (keys, kOuterStride)
  const T* rows;     ///< (count, width), dense
  int64_t count;     ///< elements per key
  int64_t width;
  T* sums;  ///< (keys, width), dense, added to
};

/// Keys at once for so many vectors: as many as the registers hold.
template <class F>
constexpr int outer_key_rows(int vectors) {
  if (F::kRegisters >= 32) return vectors == 4 ? 6 : vectors == 3 ? 8 : 12;
  return vectors == 2 ? 6 : 8;
}
template <class F>
inline constexpr int kOuterVectors = F::kRegisters >= 32 ? 4 : 2;

/// kMaskNonFinite: a row against a weight of −0 counts as 0, whatever it holds.
template <class M, int kVectors, int kKeys, bool kMaskNonFinite>
SIMD_INLINE void outer_micro_kernel(const OuterTile<ScalarOf<M>>& t) {
  using F = typename M::F;
  typename F::Vector sum[kKeys][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kKeys; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      sum[r][c] = F::load(t.sums + r * t.width + c * F::kLanes);
    }
  }
  const auto* rows = t.rows;
#pragma GCC unroll 2
  for (int64_t x = 0; x < t.count; ++x, rows += t.width) {
    typename F::Vector row[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) row[c] = F::load(rows + c * F::kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kKeys; ++r) {
      const auto p = F::broadcast(t.weights[r * kOuterStride<M> + x]);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) {
        sum[r][c] = M::multiply_add(
            zero_if_hidden<M, kMaskNonFinite>(row[c], p), p, sum[r][c]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kKeys; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      F::store(t.sums + r * t.width + c * F::kLanes, sum[r][c]);
    }
  }
}

template <class M, int kVectors, int kKeys, bool kMaskNonFinite>
[[gnu::noinline]] void outer_keys(OuterTile<ScalarOf<M>> t, int64_t keys) {
  for (; keys >= kKeys; keys -= kKeys) {
    outer_micro_kernel<M, kVectors, kKeys, kMaskNonFinite>(t);
    t.weights += kKeys * kOuterStride<M>;
    t.sums += kKeys * t.width;
  }
  if constexpr (kKeys > 1) {
    if (keys > 0) {
      outer_keys<M, kVectors, next_micro_rows(kKeys), kMaskNonFinite>(t, keys);
    }
  }
}

/// All keys, all columns.
template <class M, bool kMaskNonFinite>
inline void outer_product(OuterTile<ScalarOf<M>> t, int64_t keys) {
  using F = typename M::F;
  int64_t vectors = t.width / F::kLanes;
  const auto step = [&]<int kVectors>() {
    constexpr int kKeys = kMaskNonFinite ? 4 : outer_key_rows<F>(kVectors);
    outer_keys<M, kVectors, kKeys, kMaskNonFinite>(t, keys);
    t.rows += kVectors * F::kLanes;
    t.sums += kVectors * F::kLanes;
    vectors -= kVectors;
  };
  constexpr int kMost = kMaskNonFinite ? 1 : kOuterVectors<F>;
  while (vectors >= kMost) step.template operator()<kMost>();
  if constexpr (kMost > 2) {
    if (vectors == 3) step.template operator()<3>();
    if (vectors == 2) step.template operator()<2>();
  }
  if constexpr (kMost > 1) {
    if (vectors == 1) step.template operator()<1>();
  }
}

}  // namespace
}  // namespace multihead::kernels
