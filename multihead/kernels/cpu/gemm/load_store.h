// SPDX-License-Identifier: MIT
//
// Between memory and the kernels' own layouts: rows of queries into lanes and
// back, keys and values into dense panels, 16-bit types into float32.
#pragma once

#include <string.h>

#include "multihead/kernels/cpu/blocking/key_blocks.h"
#include "multihead/kernels/cpu/gemm/micro_kernel.h"

namespace multihead::kernels {
namespace {

/// How numbers of one dtype are read and written, one or a pair to a lane, and
/// the bits of their infinity.
template <Dtype kDtype>
struct Stored;

template <>
struct Stored<Dtype::kFloat32> {
  using Type = float;
  using Bits = uint32_t;
  static constexpr Bits kInfinity = 0x7F800000;
  using F = Float32;
  static constexpr int kPair = 1;
  MULTIHEAD_INLINE F::Vector load(const Type* p) { return F::load(p); }
  MULTIHEAD_INLINE void store(Type* p, F::Vector a) { F::store(p, a); }
};
template <>
struct Stored<Dtype::kFloat64> {
  using Type = double;
  using Bits = uint64_t;
  static constexpr Bits kInfinity = 0x7FF0000000000000;
  using F = Float64;
  static constexpr int kPair = 1;
  MULTIHEAD_INLINE F::Vector load(const Type* p) { return F::load(p); }
  MULTIHEAD_INLINE void store(Type* p, F::Vector a) { F::store(p, a); }
};
template <>
struct Stored<Dtype::kBFloat16> {
  using Type = uint16_t;
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7F80;
  using F = Float32;
  static constexpr int kPair = 1;
  MULTIHEAD_INLINE F::Vector load(const Type* p) { return F::load_bfloat16(p); }
  MULTIHEAD_INLINE void store(Type* p, F::Vector a) { F::store_bfloat16(p, a); }
};
template <>
struct Stored<Dtype::kFloat16> {
  using Type = uint16_t;
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7C00;
  using F = Float32;
  static constexpr int kPair = 1;
  MULTIHEAD_INLINE F::Vector load(const Type* p) { return F::load_float16(p); }
  MULTIHEAD_INLINE void store(Type* p, F::Vector a) { F::store_float16(p, a); }
};

#ifdef __AVX512BF16__
/// bfloat16 in pairs along the row, as BFloat16Dot wants queries: lanes that,
/// read as float32, mean nothing.
struct StoredPairs {
  using Type = uint16_t;
  using F = Float32;
  static constexpr int kPair = 2;
  MULTIHEAD_INLINE F::Vector load(const Type* p) {
    return _mm512_castsi512_ps(_mm512_loadu_si512(p));
  }
};
#endif

/// The first `count` numbers at p, zeros after them; no byte beyond is read.
template <class S>
MULTIHEAD_INLINE typename S::F::Vector load_some(const typename S::Type* p,
                                                 int64_t count) {
  constexpr int kNumbers = S::F::kLanes * S::kPair;
  if (count >= kNumbers) return S::load(p);
  typename S::Type part[kNumbers] = {};
  memcpy(part, p, count * sizeof *p);
  return S::load(part);
}
template <class S>
MULTIHEAD_INLINE void store_some(typename S::Type* p, typename S::F::Vector a,
                                 int64_t count) {
  if (count >= S::F::kLanes) return S::store(p, a);
  typename S::Type part[S::F::kLanes];
  S::store(part, a);
  memcpy(p, part, count * sizeof *p);
}

/// `count` numbers at `from`, widened.
template <class S>
inline void widen(const typename S::Type* from, int64_t count,
                  typename S::F::Scalar* to) {
  using F = typename S::F;
  int64_t x = 0;
  for (; x + F::kLanes <= count; x += F::kLanes) {
    F::store(to + x, S::load(from + x));
  }
  if (x == count) return;
  typename F::Scalar part[F::kLanes];
  F::store(part, load_some<S>(from + x, count - x));
  memcpy(to + x, part, (count - x) * sizeof *to);
}

/// Start of row `row` of (b, head).
template <typename T>
inline const T* row_of(const StridedRows& x, int64_t b, int64_t head,
                       int64_t row) {
  return static_cast<const T*>(x.data) + b * x.batch + head * x.head +
         row * x.row;
}
template <typename T>
inline T* row_of(const StridedOutRows& x, int64_t b, int64_t head,
                 int64_t row) {
  return static_cast<T*>(x.data) + b * x.batch + head * x.head + row * x.row;
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

/// One vector of rows → columns (width, lanes), times `scale`; pairs are left
/// as they are. Null rows are 0.
template <class S>
inline void load_lanes(const typename S::Type* const* rows, int64_t width,
                       typename S::F::Scalar scale,
                       typename S::F::Scalar* columns) {
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

/// Columns (width, lanes) times `factor` per lane → one vector of rows. Null
/// rows are left out.
template <class S>
inline void store_lanes(const typename S::F::Scalar* columns,
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
