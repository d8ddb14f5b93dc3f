// SPDX-License-Identifier: MIT
//
// The third product, which the backward pass adds to the two of tile.h: what
// keys collect from rows of queries, the width of a head in the lanes.
//
//   collect:  g[key][e] += Σ_row p[key][row] · x[row][e]           G += Pᵀ·X
//
// Here the sum runs over what lies in the lanes of the other two products, so
// P is read as numbers to broadcast and X as vectors along the rows, both as
// they lie. Each sum is one chain over the rows in ascending order.
#pragma once

#include "multihead/kernels/cpu/gemm/micro_kernel.h"

namespace multihead::kernels {
namespace {

/// Tiles whose rows are collected together. Of pairs the weights are copied
/// anyway, so that several tiles may share the way of the sums through the
/// cache (gradient_pairs.h); of single numbers they are read where they were
/// computed.
template <class M>
inline constexpr int64_t kCollectTiles = M::kPair == 1 ? 1 : 4;
/// Elements from the weights of one key to those of the next.
template <class M>
inline constexpr int64_t kCollectStride =
    kCollectTiles<M> * kTileLanes<typename M::F> / M::kPair;

/// Rows of queries, collected by keys. `width` is that of whole vectors; what
/// pads a row is 0.
template <typename T>
struct CollectProduct {
  const T* weights;  ///< (keys, kCollectStride)
  const T* rows;     ///< (count, width), dense
  int64_t count;     ///< elements per key
  int64_t width;
  T* sums;  ///< (keys, width), dense, added to
};

/// Keys at once for so many vectors: as many as the registers hold.
template <class F>
constexpr int collect_keys(int vectors) {
  if (F::kRegisters >= 32) return vectors == 4 ? 6 : vectors == 3 ? 8 : 12;
  return vectors == 2 ? 6 : 8;
}
template <class F>
inline constexpr int kCollectVectors = F::kRegisters >= 32 ? 4 : 2;

/// kCareful: a row against a weight of −0 counts as 0, whatever it holds.
template <class M, int kVectors, int kKeys, bool kCareful>
MULTIHEAD_INLINE void collect_tile(
    const CollectProduct<typename M::F::Scalar>& t) {
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
      const auto p = F::broadcast(t.weights[r * kCollectStride<M> + x]);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) {
        sum[r][c] = M::multiply_add(seen<M, kCareful>(row[c], p), p, sum[r][c]);
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

template <class M, int kVectors, int kKeys, bool kCareful>
[[gnu::noinline]] void collect_keys_of(CollectProduct<typename M::F::Scalar> t,
                                       int64_t keys) {
  for (; keys >= kKeys; keys -= kKeys) {
    collect_tile<M, kVectors, kKeys, kCareful>(t);
    t.weights += kKeys * kCollectStride<M>;
    t.sums += kKeys * t.width;
  }
  if constexpr (kKeys > 1) {
    if (keys > 0) {
      collect_keys_of<M, kVectors, next_tile_rows(kKeys), kCareful>(t, keys);
    }
  }
}

/// All keys, all columns.
template <class M, bool kCareful>
inline void collect(CollectProduct<typename M::F::Scalar> t, int64_t keys) {
  using F = typename M::F;
  int64_t vectors = t.width / F::kLanes;
  const auto step = [&]<int kVectors>() {
    constexpr int kKeys = kCareful ? 4 : collect_keys<F>(kVectors);
    collect_keys_of<M, kVectors, kKeys, kCareful>(t, keys);
    t.rows += kVectors * F::kLanes;
    t.sums += kVectors * F::kLanes;
    vectors -= kVectors;
  };
  constexpr int kMost = kCareful ? 1 : kCollectVectors<F>;
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
