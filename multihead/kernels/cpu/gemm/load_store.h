// SPDX-License-Identifier: MIT
//
// Between memory and the lanes: rows of queries are transposed on their way in
// and out, and 16-bit types widened to float32. Keys and values: pack.h.
#pragma once

#include <string.h>

#include "multihead/kernels/cpu/blocking/key_blocks.h"
#include "multihead/kernels/cpu/gemm/micro_kernel.h"

namespace multihead::kernels {
namespace {

/// How numbers of one dtype are read and written, and the bits of infinity.
template <Dtype kDtype>
struct Stored;

template <class Lanes, typename Number, typename Unsigned, Unsigned kInf>
struct StoredNumbers {
  using F = Lanes;
  using Scalar = typename F::Scalar;
  using Type = Number;
  using Bits = Unsigned;
  static constexpr Bits kInfinity = kInf;
  static constexpr int kPair = 1;  ///< numbers to a lane
};
template <>
struct Stored<Dtype::kFloat32>
    : StoredNumbers<Float32, float, uint32_t, 0x7F800000> {
  SIMD_INLINE F::Vector load(const Type* p) { return F::load(p); }
  SIMD_INLINE void store(Type* p, F::Vector a) { F::store(p, a); }
};
template <>
struct Stored<Dtype::kFloat64>
    : StoredNumbers<Float64, double, uint64_t, 0x7FF0000000000000> {
  SIMD_INLINE F::Vector load(const Type* p) { return F::load(p); }
  SIMD_INLINE void store(Type* p, F::Vector a) { F::store(p, a); }
};
template <>
struct Stored<Dtype::kBFloat16>
    : StoredNumbers<Float32, uint16_t, uint16_t, 0x7F80> {
  SIMD_INLINE F::Vector load(const Type* p) { return F::load_bfloat16(p); }
  SIMD_INLINE void store(Type* p, F::Vector a) { F::store_bfloat16(p, a); }
};
template <>
struct Stored<Dtype::kFloat16>
    : StoredNumbers<Float32, uint16_t, uint16_t, 0x7C00> {
  SIMD_INLINE F::Vector load(const Type* p) { return F::load_float16(p); }
  SIMD_INLINE void store(Type* p, F::Vector a) { F::store_float16(p, a); }
};

/// The first `count` numbers at p, zeros after them; no byte beyond is read.
template <class S>
SIMD_INLINE typename S::F::Vector load_some(const typename S::Type* p,
                                            int64_t count) {
  constexpr int kNumbers = S::F::kLanes * S::kPair;
  if (count >= kNumbers) return S::load(p);
  typename S::Type part[kNumbers] = {};
  memcpy(part, p, count * sizeof *p);
  return S::load(part);
}
template <class S>
SIMD_INLINE void store_some(typename S::Type* p, typename S::F::Vector a,
                            int64_t count) {
  if (count >= S::F::kLanes) return S::store(p, a);
  typename S::Type part[S::F::kLanes];
  S::store(part, a);
  memcpy(p, part, count * sizeof *p);
}

/// `count` numbers at `from`, widened.
template <class S>
inline void widen(const typename S::Type* from, int64_t count,
                  ScalarOf<S>* to) {
  using F = typename S::F;
  int64_t x = 0;
  for (; x + F::kLanes <= count; x += F::kLanes) {
    F::store(to + x, S::load(from + x));
  }
  if (x == count) return;
  ScalarOf<F> part[F::kLanes];
  F::store(part, load_some<S>(from + x, count - x));
  memcpy(to + x, part, (count - x) * sizeof *to);
}

/// Start of row `row` of (b, head).
template <typename T>
inline const T* row_of(const StridedRows& x, int64_t b, int64_t head,
                       int64_t row) {
  const auto* data = static_cast<const T*>(x.data) + head * x.head;
  if (x.block_table) {
    const int64_t page = x.block_table[b * x.table_stride + row / x.page];
    return data + page * x.batch + row % x.page * x.row;
  }
  return data + b * x.batch + (x.starts ? x.starts[b] + row : row) * x.row;
}
template <typename T>
inline T* row_of(const StridedOutRows& x, int64_t b, int64_t head,
                 int64_t row) {
  return static_cast<T*>(x.data) + b * x.batch + head * x.head +
         (x.starts ? x.starts[b] + row : row) * x.row;
}

/// Whether all `width` numbers of a row are finite.
template <class S>
inline bool is_finite(const typename S::Type* row, int64_t width) {
  using F = typename S::F;
  const auto zero = F::broadcast(0);
  auto sum = zero;
  for (int64_t x = 0; x < width; x += F::kLanes) {
    sum = F::fma(load_some<S>(row + x, width - x), zero, sum);  // 0·x: 0 or NaN
  }
  return !F::any(F::not_less(sum, F::broadcast(1)));
}

/// One vector of rows → columns (width, lanes), times `scale`; pairs of numbers
/// stay as they are. A null row is read as zeros.
template <class S>
inline void load_lanes(const typename S::Type* const* rows, int64_t width,
                       ScalarOf<S> scale, ScalarOf<S>* columns) {
  using F = typename S::F;
  const auto factor = F::broadcast(scale);
  constexpr int kNumbers = F::kLanes * S::kPair;
  for (int64_t x = 0; x < width; x += kNumbers) {
    const int64_t count = min(width - x, kNumbers);
    typename F::Vector square[F::kLanes];
    for (int i = 0; i < F::kLanes; ++i) {
      square[i] = rows[i] ? load_some<S>(rows[i] + x, count) : F::broadcast(0);
    }
    F::transpose(square);
    for (int i = 0; i * S::kPair < count; ++i) {
      F::store(columns + (x / S::kPair + i) * kTileLanes<F>,
               S::kPair == 1 ? F::mul(square[i], factor) : square[i]);
    }
  }
}

/// Columns (width, lanes) times `factor` per lane → one vector of rows. To a
/// null row nothing is written.
template <class S>
inline void store_lanes(const ScalarOf<S>* columns,
                        typename S::F::Vector factor, int64_t width,
                        typename S::Type* const* rows) {
  using F = typename S::F;
  for (int64_t x = 0; x < width; x += F::kLanes) {
    const int64_t count = min(width - x, F::kLanes);
    typename F::Vector square[F::kLanes];
    for (int i = 0; i < F::kLanes; ++i) {
      square[i] =
          i < count ? F::mul(F::load(columns + (x + i) * kTileLanes<F>), factor)
                    : F::broadcast(0);
    }
    F::transpose(square);
    for (int i = 0; i < F::kLanes; ++i) {
      if (rows[i]) store_some<S>(rows[i] + x, square[i], count);
    }
  }
}

}  // namespace
}  // namespace multihead::kernels
