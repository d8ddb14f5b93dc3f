// SPDX-License-Identifier: MIT
//
// The three GEMMs of attention for a multiplier M and a tile of any size: which
// micro-kernel runs. AMX has its own (amx.h).
#pragma once

#include "multihead/kernels/cpu/gemm/few_rows.h"
#include "multihead/kernels/cpu/gemm/outer_product.h"

namespace multihead::kernels {
namespace {

template <class M>
struct Gemm {
  using F = typename M::F;
  using T = typename F::Scalar;

  /// What must live while GEMMs run.
  struct Registers {
    Registers() {}
  };

  /// Scores of `keys` keys and the first `rows` rows of `vectors` vectors; with
  /// kMaximum t.maximum too.
  template <bool kMaximum>
  static void qk(const QkTile<T>& t, int64_t keys, int vectors, int64_t rows) {
    if (!M::kPacksWeights && rows <= kFewRows) {
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

  /// `columns` columns of t.context. kMaskNonFinite: a value against a weight
  /// of −0 counts as 0, whatever it is.
  template <bool kMaskNonFinite>
  static void pv(const PvTile<T>& t, int64_t columns, int vectors,
                 int64_t rows) {
    if constexpr (kMaskNonFinite && !M::kPackDropsNonFinite) {
      // Rare: one vector at a time, whatever the tile.
      auto part = t;
      for (int c = 0; c < vectors; ++c) {
        pv_columns<M, 1, 4, true>(part, columns);
        part.weights += F::kLanes;
        part.context += F::kLanes;
        part.factor += F::kLanes;
      }
    } else if (!M::kPacksWeights && rows <= kFewRows) {
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

  /// t.sums of `keys` keys. kMaskNonFinite: as above, for rows.
  template <bool kMaskNonFinite>
  static void outer(const OuterTile<T>& t, int64_t keys) {
    outer_product<M, kMaskNonFinite && !M::kPackDropsNonFinite>(t, keys);
  }
};

}  // namespace
}  // namespace multihead::kernels
