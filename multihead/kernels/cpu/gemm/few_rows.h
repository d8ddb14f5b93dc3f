// SPDX-License-Identifier: MIT
//
// The two GEMMs for up to four rows, as decoding has them. With rows in the
// lanes, most lanes would be empty. So keys (qk) or columns of values (pv) lie
// in the lanes, and the numbers of a row are broadcast. Keys are transposed
// 16×16 in registers, values are read as they lie. Each sum is the same chain
// as in micro_kernel.h, so the bits are the same.
//
// Pairs of bfloat16 have no such form: they are added in an order of their own,
// and a row must have the same bits alone as among others.
#pragma once

#include <string.h>

#include "multihead/kernels/cpu/gemm/micro_kernel.h"

namespace multihead::kernels {
namespace {

inline constexpr int kFewRows = 4;

/// The first `count` numbers at p, zeros after them.
template <class F>
SIMD_INLINE typename F::Vector load_first(const ScalarOf<F>* p, int64_t count) {
  if (count >= F::kLanes) return F::load(p);
  ScalarOf<F> part[F::kLanes] = {};
  memcpy(part, p, count * sizeof *p);
  return F::load(part);
}

template <class F, int kRows, bool kMaximum>
[[gnu::noinline]] void qk_few_rows(QkTile<ScalarOf<F>> t, int64_t keys) {
  using T = typename F::Scalar;
  constexpr int64_t kLanes = kTileLanes<F>;
  for (; keys > 0; keys -= F::kLanes) {
    const int64_t count = min(keys, F::kLanes);
    typename F::Vector sum[kRows], total[kRows];
    for (int r = 0; r < kRows; ++r) sum[r] = F::broadcast(0);
    for (int64_t x = 0; x < t.depth; x += F::kLanes) {
      if (x > 0 && x % kScoreChain == 0) {
        for (int r = 0; r < kRows; ++r) {
          total[r] = x == kScoreChain ? sum[r] : F::add(total[r], sum[r]);
          sum[r] = F::broadcast(0);
        }
      }
      const int64_t width = min(t.depth - x, F::kLanes);
      typename F::Vector square[F::kLanes];
      for (int64_t j = 0; j < F::kLanes; ++j) {
        square[j] =
            load_first<F>(t.key + min(j, count - 1) * t.key_stride + x, width);
      }
      F::transpose(square);
      for (int i = 0; i < width; ++i) {
        const T* query = t.query + (x + i) * kLanes;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          sum[r] = F::fma(square[i], F::broadcast(query[r]), sum[r]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      if (t.depth > kScoreChain) sum[r] = F::add(total[r], sum[r]);
      alignas(64) T scores[F::kLanes];
      F::store(scores, sum[r]);
      for (int64_t j = 0; j < count; ++j) {
        t.scores[j * kLanes + r] = scores[j];
        if (kMaximum && scores[j] > t.maximum[r]) t.maximum[r] = scores[j];
      }
    }
    t.key += F::kLanes * t.key_stride;
    t.scores += F::kLanes * kLanes;
  }
}

// Columns from e on, kVectors vectors of them.
template <class F, int kRows, int kVectors>
SIMD_INLINE void pv_few_columns(const PvTile<ScalarOf<F>>& t, int64_t e,
                                int64_t columns) {
  using T = typename F::Scalar;
  constexpr int64_t kLanes = kTileLanes<F>;
  alignas(64) T column[kVectors * F::kLanes] = {};
  const int64_t count = min(columns - e, kVectors * F::kLanes);
  typename F::Vector sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < count; ++i) {
      column[i] = t.context[(e + i) * kLanes + r];
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] =
          F::mul(F::broadcast(t.factor[r]), F::load(column + v * F::kLanes));
    }
  }
  for (int64_t x = 0; x < t.depth; ++x) {
    typename F::Vector value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      value[v] = load_first<F>(t.value + x * t.value_stride + e + v * F::kLanes,
                               count - v * F::kLanes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const auto weight = F::broadcast(t.weights[x * kLanes + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = F::fma(value[v], weight, sum[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      F::store(column + v * F::kLanes, sum[r][v]);
    }
    for (int64_t i = 0; i < count; ++i) {
      t.context[(e + i) * kLanes + r] = column[i];
    }
  }
}

template <class F, int kRows>
[[gnu::noinline]] void pv_few_rows(const PvTile<ScalarOf<F>>& t,
                                   int64_t columns) {
  int64_t e = 0;
  for (; e + 4 * F::kLanes <= columns; e += 4 * F::kLanes) {
    pv_few_columns<F, kRows, 4>(t, e, columns);
  }
  for (; e < columns; e += F::kLanes) {
    pv_few_columns<F, kRows, 1>(t, e, columns);
  }
}

}  // namespace
}  // namespace multihead::kernels
