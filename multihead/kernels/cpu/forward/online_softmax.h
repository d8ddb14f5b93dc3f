// SPDX-License-Identifier: MIT
//
// Online softmax (Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018): for each row the largest score m so far, l = Σ exp(s − m)
// and O = Σ exp(s − m)·v, not yet divided by l. When m rises to m', l and O are
// scaled by exp(m − m').
#pragma once

#include "multihead/kernels/cpu/blocking/arena.h"
#include "multihead/kernels/cpu/gemm/micro_kernel.h"
#include "multihead/kernels/cpu/simd/math.h"

namespace multihead::kernels {
namespace {

/// The first `lanes` of each array count.
template <class F>
struct OnlineSoftmax {
  using T = typename F::Scalar;
  static constexpr int64_t kLanes = kTileLanes<F>;

  OnlineSoftmax() = default;
  OnlineSoftmax(int64_t columns, Arena& arena)
      : maximum(arena.take<T>(kLanes)),
        sum(arena.take<T>(kLanes)),
        context(arena.take<T>(columns * kLanes)) {}

  T* maximum = nullptr;  ///< (lanes), m
  T* sum = nullptr;      ///< (lanes), l
  T* context = nullptr;  ///< (columns, lanes), O

  /// No keys yet.
  void reset(int64_t lanes, int64_t columns) {
    for (int64_t r = 0; r < lanes; r += F::kLanes) {
      F::store(maximum + r, F::broadcast(T(-INFINITY)));
      F::store(sum + r, F::broadcast(0));
      for (int64_t e = 0; e < columns; ++e) {
        F::store(context + e * kLanes + r, F::broadcast(0));
      }
    }
  }

  /// Adds the weights of a block, which were summed apart: one chain over all
  /// keys would drift.
  void add(const T* weights, int64_t lanes) {
    for (int64_t r = 0; r < lanes; r += F::kLanes) {
      F::store(sum + r, F::add(F::load(sum + r), F::load(weights + r)));
    }
  }

  /// Adds the state of other keys, as split-KV does. Merging with no keys
  /// changes no bit.
  void merge(const OnlineSoftmax& part, int64_t lanes, int64_t columns) {
    for (int64_t r = 0; r < lanes; r += F::kLanes) {
      const auto a = F::load(maximum + r), b = F::load(part.maximum + r);
      const auto m = F::max(b, a);
      const auto shift = shift_of<F>(m);
      const auto of_this = exp<F>(F::sub(a, shift));
      const auto of_part = exp<F>(F::sub(b, shift));
      F::store(maximum + r, m);
      F::store(sum + r, F::fma(F::load(part.sum + r), of_part,
                               F::mul(F::load(sum + r), of_this)));
      for (int64_t e = 0; e < columns; ++e) {
        T* o = context + e * kLanes + r;
        F::store(o, F::fma(F::load(part.context + e * kLanes + r), of_part,
                           F::mul(F::load(o), of_this)));
      }
    }
  }
};

}  // namespace
}  // namespace multihead::kernels
