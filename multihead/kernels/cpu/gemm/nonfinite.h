// SPDX-License-Identifier: MIT
//
// What panels of pairs leave out, numbers that are not finite, for those who
// see it: its products are not finite either, and may be added by themselves,
// in whatever order. Against a weight of −0 a number counts as 0.
#pragma once

#include "multihead/kernels/cpu/gemm/pack.h"

namespace multihead::kernels {
namespace {

/// Calls use(e, x) for the numbers x of a row that are not finite.
template <class S, class Use>
inline void for_each_nonfinite(const typename S::Type* row, int64_t width,
                               const Use& use) {
  using F = typename S::F;
  if (is_finite<S>(row, width)) return;
  for (int64_t e = 0; e < width; ++e) {
    typename F::Scalar x[F::kLanes];
    F::store(x, load_some<S>(row + e, 1));
    if (!(x[0] - x[0] == 0)) use(e, x[0]);
  }
}

/// Of a row of values, for so many vectors of rows: context (width, lanes) +=
/// row·weights, which are (lanes).
template <class S>
inline void add_nonfinite(const typename S::Type* row, int64_t width,
                          const typename S::F::Scalar* weights, int vectors,
                          typename S::F::Scalar* context) {
  using F = typename S::F;
  for_each_nonfinite<S>(row, width, [&](int64_t e, typename F::Scalar x) {
    for (int c = 0; c < vectors; ++c) {
      auto* sums = context + e * kTileLanes<F> + c * F::kLanes;
      const auto w = F::load(weights + c * F::kLanes);
      const auto factor =
          F::select(F::is_negative_zero(w), F::broadcast(0), F::broadcast(x));
      F::store(sums, F::fma(w, factor, F::load(sums)));
    }
  });
}

/// Of a row of queries, for `keys` keys, whose weights are kTileLanes apart:
/// sums (keys, stride) += weights·row.
template <class S>
inline void outer_nonfinite(const typename S::Type* row, int64_t width,
                            const typename S::F::Scalar* weights, int64_t keys,
                            int64_t stride, typename S::F::Scalar* sums) {
  for_each_nonfinite<S>(row, width, [&](int64_t e, typename S::F::Scalar x) {
    for (int64_t j = 0; j < keys; ++j) {
      const auto w = weights[j * kTileLanes<typename S::F>];
      if (w == 0 && signbit(w)) continue;
      sums[j * stride + e] += w * x;
    }
  });
}

}  // namespace
}  // namespace multihead::kernels
