// SPDX-License-Identifier: MIT
//
// The products of tile.h and tile_outer.h for any number of vectors of rows,
// whatever multiplies.
#pragma once

#include "multihead/kernels/cpu/gemm/few_rows.h"
#include "multihead/kernels/cpu/gemm/outer_product.h"
#ifdef __AMX_BF16__
#include "multihead/kernels/cpu/gemm/amx.h"
#endif

namespace multihead::kernels {
namespace {

template <class M>
struct Product {
  using F = typename M::F;
  using T = typename F::Scalar;

  /// What must live while products are computed.
  struct Registers {
    Registers() {}
  };

  /// t.scores, and with kMaximum t.maximum, of `keys` keys and `rows` rows in
  /// so many vectors.
  template <bool kMaximum>
  static void score(const ScoreProduct<T>& t, int64_t keys, int vectors,
                    int64_t rows) {
    if (M::kPair == 1 && rows <= kFewRows) {
      rows == 1 ? score_few<F, 1, kMaximum>(t, keys)
                : score_few<F, kFewRows, kMaximum>(t, keys);
    } else if (vectors == 3) {
      score_keys<M, 3, tile_rows<F>(3), kMaximum>(t, keys);
    } else if (vectors == 2) {
      score_keys<M, 2, tile_rows<F>(2), kMaximum>(t, keys);
    } else {
      score_keys<M, 1, tile_rows<F>(1), kMaximum>(t, keys);
    }
  }

  /// t.context of `columns` columns. kCareful: values against a weight of −0
  /// count as 0, whatever they are; pairs are finite.
  template <bool kCareful>
  static void add_context(const ContextProduct<T>& t, int64_t columns,
                          int vectors, int64_t rows) {
    if constexpr (kCareful && !kHidesInPanels<M>) {
      // Rare: one vector at a time, whatever the tile.
      auto part = t;
      for (int c = 0; c < vectors; ++c) {
        context_columns<M, 1, 4, true>(part, columns);
        part.weights += F::kLanes;
        part.context += F::kLanes;
        part.factor += F::kLanes;
      }
    } else if (M::kPair == 1 && rows <= kFewRows) {
      rows == 1 ? context_few<F, 1>(t, columns)
                : context_few<F, kFewRows>(t, columns);
    } else if (vectors == 3) {
      context_columns<M, 3, tile_rows<F>(3), false>(t, columns);
    } else if (vectors == 2) {
      context_columns<M, 2, tile_rows<F>(2), false>(t, columns);
    } else {
      context_columns<M, 1, tile_rows<F>(1), false>(t, columns);
    }
  }

  /// t.sums of `keys` keys; kCareful as above.
  template <bool kCareful>
  static void collect(const CollectProduct<T>& t, int64_t keys) {
    kernels::collect<M, kCareful && !kHidesInPanels<M>>(t, keys);
  }
};

#ifdef __AMX_BF16__
template <>
struct Product<BFloat16Tiles> {
  using Registers = TileRegisters;

  template <bool kMaximum>
  static void score(const ScoreProduct<float>& t, int64_t keys, int vectors,
                    int) {
    BFloat16Tiles::score<kMaximum>(t, keys, vectors);
  }
  template <bool kCareful>
  static void add_context(const ContextProduct<float>& t, int64_t columns,
                          int vectors, int) {
    BFloat16Tiles::add_context(t, columns, vectors);
  }
  template <bool kCareful>
  static void collect(const CollectProduct<float>& t, int64_t keys) {
    BFloat16Tiles::collect(t, keys);
  }
};
#endif

}  // namespace
}  // namespace multihead::kernels
