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
struct Gemm {
  using F = typename M::F;
  using T = typename F::Scalar;

  /// What must live while products are computed.
  struct Registers {
    Registers() {}
  };

  /// t.scores, and with kMaximum t.maximum, of `keys` keys and `rows` rows in
  /// so many vectors.
  template <bool kMaximum>
  static void qk(const QkTile<T>& t, int64_t keys, int vectors, int64_t rows) {
    if (M::kPair == 1 && rows <= kFewRows) {
      rows == 1 ? qk_few_rows<F, 1, kMaximum>(t, keys)
                : qk_few_rows<F, kFewRows, kMaximum>(t, keys);
    } else if (vectors == 3) {
      qk_keys<M, 3, micro_rows<F>(3), kMaximum>(t, keys);
    } else if (vectors == 2) {
      qk_keys<M, 2, micro_rows<F>(2), kMaximum>(t, keys);
    } else {
      qk_keys<M, 1, micro_rows<F>(1), kMaximum>(t, keys);
    }
  }

  /// t.context of `columns` columns. kMaskNonFinite: values against a weight of
  /// −0 count as 0, whatever they are; pairs are finite.
  template <bool kMaskNonFinite>
  static void pv(const PvTile<T>& t, int64_t columns, int vectors,
                 int64_t rows) {
    if constexpr (kMaskNonFinite && !kPackDropsNonFinite<M>) {
      // Rare: one vector at a time, whatever the tile.
      auto part = t;
      for (int c = 0; c < vectors; ++c) {
        pv_columns<M, 1, 4, true>(part, columns);
        part.weights += F::kLanes;
        part.context += F::kLanes;
        part.factor += F::kLanes;
      }
    } else if (M::kPair == 1 && rows <= kFewRows) {
      rows == 1 ? pv_few_rows<F, 1>(t, columns)
                : pv_few_rows<F, kFewRows>(t, columns);
    } else if (vectors == 3) {
      pv_columns<M, 3, micro_rows<F>(3), false>(t, columns);
    } else if (vectors == 2) {
      pv_columns<M, 2, micro_rows<F>(2), false>(t, columns);
    } else {
      pv_columns<M, 1, micro_rows<F>(1), false>(t, columns);
    }
  }

  /// t.sums of `keys` keys; kMaskNonFinite as above.
  template <bool kMaskNonFinite>
  static void outer(const OuterTile<T>& t, int64_t keys) {
    outer_product<M, kMaskNonFinite && !kPackDropsNonFinite<M>>(t, keys);
  }
};

#ifdef __AMX_BF16__
template <>
struct Gemm<BFloat16Tiles> {
  using Registers = TileRegisters;

  template <bool kMaximum>
  static void qk(const QkTile<float>& t, int64_t keys, int vectors, int) {
    BFloat16Tiles::qk<kMaximum>(t, keys, vectors);
  }
  template <bool kMaskNonFinite>
  static void pv(const PvTile<float>& t, int64_t columns, int vectors, int) {
    BFloat16Tiles::pv(t, columns, vectors);
  }
  template <bool kMaskNonFinite>
  static void outer(const OuterTile<float>& t, int64_t keys) {
    BFloat16Tiles::outer(t, keys);
  }
};
#endif

}  // namespace
}  // namespace multihead::kernels
