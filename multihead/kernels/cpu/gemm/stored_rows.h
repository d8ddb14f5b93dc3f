// SPDX-License-Identifier: MIT
//
// Keys and values that are stored narrower than queries (Storage). Decoding
// widens them as it reads them (row_products.h); the tiles of a longer call
// read a split that was restored to what queries are stored as.
#pragma once

#include "multihead/kernels/cpu/gemm/load_store.h"
#include "multihead/kernels/mxint8.h"

namespace multihead::kernels {
namespace {

// Inlined by force: g++ leaves out what is called this often.
#define SIMD_LAMBDA __attribute__((always_inline))

/// mxint8_step of each scale.
struct MXSteps {
  float of[256];
};
constexpr MXSteps kMXSteps = [] {
  MXSteps steps{};
  for (int e = 0; e < 256; ++e) steps.of[e] = mxint8_step(e);
  return steps;
}();

/// Rows of MXINT8 numbers; widened by RowReader.
struct StoredMXInt8 {
  using F = Float32;
  using Scalar = float;
  using Type = uint8_t;
  static constexpr int kPair = 1;
};

/// Vectors of the numbers of a row of `width` that is stored as S, from number
/// x on, a multiple of a vector's.
template <class S>
struct RowReader {
  using Type = typename S::Type;
  static constexpr int kPair = S::kPair;
  SIMD_INLINE typename S::F::Vector load(const Type* row, int64_t x,
                                         int64_t /*width*/) {
    return S::load(row + x);
  }
  /// With zeros after the last; no byte beyond is read.
  SIMD_INLINE typename S::F::Vector load_last(const Type* row, int64_t x,
                                              int64_t width) {
    return load_some<S>(row + x, width - x);
  }
};

template <>
struct RowReader<StoredMXInt8> {
  using F = Float32;
  static constexpr int kPair = 1;
  SIMD_INLINE F::Vector load(const uint8_t* row, int64_t x, int64_t width) {
    return F::mul(F::load_int8(row + x), step_of(row, x, width));
  }
  SIMD_INLINE F::Vector load_last(const uint8_t* row, int64_t x,
                                  int64_t width) {
    if (width - x >= F::kLanes) return load(row, x, width);
    if (width <= x) return F::broadcast(0);
    uint8_t part[F::kLanes] = {};
    memcpy(part, row + x, width - x);
    return F::mul(F::load_int8(part), step_of(row, x, width));
  }

  SIMD_INLINE F::Vector step_of(const uint8_t* row, int64_t x, int64_t width) {
    return F::broadcast(kMXSteps.of[row[width + x / kMXGroup]]);
  }
};

#ifdef __AVX512F__
/// The numbers of 16 rows of MXINT8, a row to a lane. Bytes are transposed by
/// fours, with an eighth of the shuffles that numbers would take, and widened
/// afterwards.
class MXInt8Columns {
 public:
  MXInt8Columns(const uint8_t* rows, int64_t stride, int64_t width)
      : rows_(rows), stride_(stride), width_(width) {}

  /// Goes to the next 32 numbers, at first to numbers 0 to 31. False where
  /// fewer are left.
  [[gnu::always_inline]] bool next_group() {
    const int64_t g = group_++;
    if ((g + 1) * kMXGroup > width_) return false;
    if (g % 4 == 0) {  // four scales of each row at once, that end in the row
      first_ = min(g, width_ / kMXGroup + (width_ % kMXGroup != 0) - 4);
      alignas(64) int32_t of_rows[16];
      const uint8_t* from = rows_ + width_ + first_;
      for (int i = 0; i < 16; ++i, from += stride_)
        memcpy(of_rows + i, from, 4);
      scales_ = _mm512_load_si512(of_rows);
    }
    // 2^-24 of mxint8_step, since numbers are widened 2^24 times too large.
    const __m512i e = _mm512_and_si512(
        _mm512_srl_epi32(scales_, _mm_cvtsi64_si128(8 * (g - first_))),
        _mm512_set1_epi32(255));
    const __m512i exponent =
        _mm512_sub_epi32(_mm512_max_epi32(e, _mm512_set1_epi32(kMXSmallest)),
                         _mm512_set1_epi32(30));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(e, _mm512_set1_epi32(kMXNaN));
    step_ = _mm512_castsi512_ps(_mm512_mask_mov_epi32(
        _mm512_slli_epi32(exponent, 23), nan, _mm512_set1_epi32(0x7FC00000)));
    return true;
  }

  /// Numbers x to x + 15, four to a vector.
  [[gnu::always_inline]] void read(int64_t x, __m512i (&bytes)[4]) const {
    // Four pointers to four rows each: x86 adds one or two strides by itself.
    const uint8_t* const p0 = rows_ + x;
    const uint8_t *const p4 = p0 + 4 * stride_, *const p8 = p4 + 4 * stride_;
    const uint8_t* const p12 = p8 + 4 * stride_;
    const auto load = [](const uint8_t* p) SIMD_LAMBDA {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    };
    __m512 t[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // rows i, i + 4, i + 8 and i + 12
      const int64_t at = i * stride_;
      __m512i v = _mm512_castsi128_si512(load(p0 + at));
      v = _mm512_mask_broadcast_i32x4(v, 0x00F0, load(p4 + at));
      v = _mm512_mask_broadcast_i32x4(v, 0x0F00, load(p8 + at));
      v = _mm512_mask_broadcast_i32x4(v, 0xF000, load(p12 + at));
      t[i] = _mm512_castsi512_ps(v);
    }
    const __m512i a = _mm512_castps_si512(_mm512_unpacklo_ps(t[0], t[1]));
    const __m512i b = _mm512_castps_si512(_mm512_unpackhi_ps(t[0], t[1]));
    const __m512i c = _mm512_castps_si512(_mm512_unpacklo_ps(t[2], t[3]));
    const __m512i d = _mm512_castps_si512(_mm512_unpackhi_ps(t[2], t[3]));
    bytes[0] = _mm512_unpacklo_epi64(a, c);
    bytes[1] = _mm512_unpackhi_epi64(a, c);
    bytes[2] = _mm512_unpacklo_epi64(b, d);
    bytes[3] = _mm512_unpackhi_epi64(b, d);
  }

  /// The four numbers of a vector.
  [[gnu::always_inline]] void widen(__m512i bytes, __m512 (&numbers)[4]) const {
    const __m512i top = _mm512_set1_epi32(static_cast<int>(0xFF000000));
    const __m512i at_top[4] = {
        _mm512_slli_epi32(bytes, 24),
        _mm512_and_si512(_mm512_slli_epi32(bytes, 16), top),
        _mm512_and_si512(_mm512_slli_epi32(bytes, 8), top),
        _mm512_and_si512(bytes, top)};
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      numbers[n] = _mm512_mul_ps(_mm512_cvtepi32_ps(at_top[n]), step_);
    }
  }

 private:
  const uint8_t* rows_;
  int64_t stride_, width_;
  int64_t group_ = 0, first_ = 0;  ///< of the scales that are held
  __m512i scales_ = _mm512_setzero_si512();
  __m512 step_ = _mm512_setzero_ps();
};
#endif

/// The numbers of a row, as S stores them.
template <class S, class Stored>
inline void restore(const typename Stored::Type* row, int64_t width,
                    typename S::Type* to) {
  using F = typename S::F;
  for (int64_t x = 0; x < width; x += F::kLanes) {
    store_some<S>(to + x, RowReader<Stored>::load_last(row, x, width),
                  width - x);
  }
}

/// The rows of a split of keys or values: where they lie, or restored.
template <class S>
class SplitRows {
 public:
  using Type = typename S::Type;

  /// Numbers of `room`.
  static int64_t room_size(const AttentionArgs& a, int64_t width) {
    return a.storage == Storage::kAsQuery ? 0 : kKeySplit * width;
  }

  void read(const AttentionArgs& a, const StridedRows& x, int64_t b, int64_t g,
            Interval keys, int64_t width, Type* room) {
    if (a.storage == Storage::kAsQuery) {
      rows = x;
      batch = b;
      head = g;
      return;
    }
    start_ = -keys.begin;
    rows = {.data = room, .row = width, .starts = &start_};
    if constexpr (sizeof(ScalarOf<S>) == sizeof(float)) {
      for (int64_t j = keys.begin; j < keys.end; ++j) {
        Type* to = room + (j - keys.begin) * width;
        if (a.storage == Storage::kMXInt8) {
          restore<S, StoredMXInt8>(row_of<uint8_t>(x, b, g, j), width, to);
        } else {
          restore<S, Stored<Dtype::kBFloat16>>(row_of<uint16_t>(x, b, g, j),
                                               width, to);
        }
      }
    }
  }

  SplitRows() = default;
  SplitRows(const SplitRows&) = delete;  // rows point into it
  SplitRows& operator=(const SplitRows&) = delete;
  ~SplitRows() = default;

  StridedRows rows;
  int64_t batch = 0, head = 0;  ///< by which `rows` are to be read

 private:
  int64_t start_ = 0;
};

}  // namespace
}  // namespace multihead::kernels
