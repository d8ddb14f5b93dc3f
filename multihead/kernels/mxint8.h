// SPDX-License-Identifier: MIT
//
// MXINT8, numbers of one byte ("OCP Microscaling Formats (MX) Specification",
// 1.0, 2023): 32 numbers that follow one another share a scale, a power of two.
// A row of keys or values is its bytes, then its scales,
//
//   n_0 … n_(width−1)  e_0 … e_(⌈width/32⌉−1)      x_i = n_i·2^(e_(i/32) − 133)
//
// one after the other, so that one stream from memory brings both: 33 bytes for
// 32 numbers. Since n has seven bits and a sign, x is exact in bfloat16 and
// float32, and in float16 where the numbers that were rounded came from it. So
// a kernel that reads such rows has the bits of one that reads them restored.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace multihead::kernels {

inline constexpr int64_t kMXGroup = 32;
/// The smallest scale that is used, 2^-18: multiples of 2^-24 remain, as in
/// float16.
inline constexpr int kMXSmallest = 127 - 18;
/// The scale of 32 numbers that are not all finite: all become NaN.
inline constexpr int kMXNaN = 255;

/// Bytes of a row of `width` numbers.
template <class Int>
constexpr Int mxint8_bytes(const Int& width) {
  return width + (width + (kMXGroup - 1)) / kMXGroup;
}

/// 2^(e − 133), NaN for kMXNaN; scales below kMXSmallest count as that.
constexpr float mxint8_step(uint8_t e) {
  if (e == kMXNaN) return std::bit_cast<float>(0x7FC00000U);
  const int exponent = (e > kMXSmallest ? e : kMXSmallest) - 6;
  return std::bit_cast<float>(static_cast<uint32_t>(exponent) << 23);
}

/// Rounds to nearest even; no number is off by more than 2^-7 of the largest of
/// its 32, or 2^-25.
inline void round_to_mxint8(const float* x, int64_t width, uint8_t* row) {
  for (int64_t begin = 0; begin < width; begin += kMXGroup) {
    const int64_t end = begin + kMXGroup < width ? begin + kMXGroup : width;
    uint32_t largest = 0;  // of magnitudes, whose bits are in the same order
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFF;
      largest = bits > largest ? bits : largest;
    }
    const int exponent = static_cast<int>(largest >> 23);
    const int e = exponent > kMXSmallest ? exponent : kMXSmallest;
    row[width + begin / kMXGroup] = static_cast<uint8_t>(e);
    // 2^(133 − e); x is not finite where e is kMXNaN.
    const float inverse = std::bit_cast<float>(
        static_cast<uint32_t>(260 - (e < 255 ? e : 254)) << 23);
    for (int64_t i = begin; i < end; ++i) {
      const float n = x[i] * inverse;
      const float most = n < 127.0F ? n : 127.0F;  // 127 for NaN
      const float rounded = std::nearbyint(most > -127.0F ? most : -127.0F);
      row[i] = static_cast<uint8_t>(static_cast<int8_t>(rounded));
    }
  }
}

/// The numbers of a row.
inline void restore_mxint8(const uint8_t* row, int64_t width, float* x) {
  for (int64_t i = 0; i < width; ++i) {
    x[i] = static_cast<float>(static_cast<int8_t>(row[i])) *
           mxint8_step(row[width + i / kMXGroup]);
  }
}

}  // namespace multihead::kernels
