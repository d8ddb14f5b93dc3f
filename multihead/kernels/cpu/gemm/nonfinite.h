// SPDX-License-Identifier: MIT
//
// NaN and infinity, for multipliers that drop them when they pack
// (kPackDropsNonFinite): they are added back one by one, for the rows that see
// them. The order of these additions does not matter, since the sum is not
// finite anyway. Against a weight of −0 a number counts as 0.
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
    ScalarOf<F> x[F::kLanes];
    F::store(x, load_some<S>(row + e, 1));
    if (!(x[0] - x[0] == 0)) use(e, x[0]);
  }
}

/// context (width, lanes) += row (width)·weights (lanes), for what is not
/// finite in a row of values.
template <class S>
inline void add_nonfinite(const typename S::Type* row, int64_t width,
                          const ScalarOf<S>* weights, int vectors,
                          ScalarOf<S>* context) {
  using F = typename S::F;
  for_each_nonfinite<S>(row, width, [&](int64_t e, ScalarOf<F> x) {
    for (int c = 0; c < vectors; ++c) {
      auto* sums = context + e * kTileLanes<F> + c * F::kLanes;
      const auto w = F::load(weights + c * F::kLanes);
      const auto factor =
          F::select(F::is_negative_zero(w), F::broadcast(0), F::broadcast(x));
      F::store(sums, F::fma(w, factor, F::load(sums)));
    }
  });
}

/// sums (keys, stride) += weights (keys)·row (width), for what is not finite in
/// a row of queries; the weights of two keys are kTileLanes apart.
template <class S>
inline void outer_nonfinite(const typename S::Type* row, int64_t width,
                            const ScalarOf<S>* weights, int64_t keys,
                            int64_t stride, ScalarOf<S>* sums) {
  for_each_nonfinite<S>(row, width, [&](int64_t e, ScalarOf<S> x) {
    for (int64_t j = 0; j < keys; ++j) {
      const auto w = weights[j * kTileLanes<typename S::F>];
      if (w == 0 && signbit(w)) continue;
      sums[j * stride + e] += w * x;
    }
  });
}

}  // namespace
}  // namespace multihead::kernels
