// SPDX-License-Identifier: MIT
//
// The vector layer, and its documentation: about two dozen operations on
// vectors of one scalar type. This version is written in the compiler's vector
// extensions, 16 bytes wide, and runs on any CPU; avx2.h and avx512.h have the
// same structs in intrinsics. Each translation unit includes exactly one.
//
// Where the CPU has a fused multiply-add, every version rounds alike, operation
// by operation, so that kernels give the same bits with all of them.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

#include "multihead/kernels/kernels.h"

#define SIMD_INLINE [[gnu::always_inline]] static inline

namespace multihead::kernels {
namespace {

template <typename T, typename I, typename U>
struct Portable {
  using Scalar = T;
  typedef T Vector __attribute__((vector_size(16)));
  typedef U Integer __attribute__((vector_size(16)));
  typedef I Mask __attribute__((vector_size(16)));  // 0 or −1
  static constexpr int kLanes = 16 / sizeof(T);
  static constexpr int kRegisters = 16;

  // Memory may have any alignment.
  SIMD_INLINE Vector load(const T* p) {
    Vector a;
    memcpy(&a, p, sizeof a);
    return a;
  }
  SIMD_INLINE void store(T* p, Vector a) { memcpy(p, &a, sizeof a); }
  SIMD_INLINE Vector broadcast(T x) { return x - Vector{}; }

  SIMD_INLINE Vector add(Vector a, Vector b) { return a + b; }
  SIMD_INLINE Vector sub(Vector a, Vector b) { return a - b; }
  SIMD_INLINE Vector mul(Vector a, Vector b) { return a * b; }
  SIMD_INLINE Vector div(Vector a, Vector b) { return a / b; }
  // b where either is NaN, as the x86 instruction has it.
  SIMD_INLINE Vector max(Vector a, Vector b) { return a > b ? a : b; }
  SIMD_INLINE Vector abs(Vector a) {
    return (Vector)((Mask)a & ~(Mask)broadcast(T(-0.0)));
  }
  // a·b + c and a·b − c, rounded once where the CPU can.
  SIMD_INLINE Vector fma(Vector a, Vector b, Vector c) {
#if defined(__FMA__)
    if constexpr (sizeof(T) == 4) {
      return (Vector)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
    } else {
      return (Vector)_mm_fmadd_pd((__m128d)a, (__m128d)b, (__m128d)c);
    }
#elif defined(FP_FAST_FMAF) && defined(FP_FAST_FMA)
    Vector r;
    for (int i = 0; i < kLanes; ++i) {
      r[i] = sizeof(T) == 4 ? T(__builtin_fmaf(a[i], b[i], c[i]))
                            : T(__builtin_fma(a[i], b[i], c[i]));
    }
    return r;
#else
    return a * b + c;
#endif
  }
  SIMD_INLINE Vector fms(Vector a, Vector b, Vector c) { return fma(a, b, -c); }

  SIMD_INLINE Mask less(Vector a, Vector b) { return a < b; }
  // True where either is NaN.
  SIMD_INLINE Mask not_less(Vector a, Vector b) { return ~(a < b); }
  SIMD_INLINE Mask equal(Vector a, Vector b) { return a == b; }
  SIMD_INLINE Mask is_negative_zero(Vector a) {
    return (Mask)a == (Mask)broadcast(T(-0.0));
  }
  SIMD_INLINE bool any(Mask m) {
    I all = 0;
    for (int i = 0; i < kLanes; ++i) all |= m[i];
    return all != 0;
  }
  SIMD_INLINE Vector select(Mask m, Vector a, Vector b) {
    return (Vector)((m & (Mask)a) | (~m & (Mask)b));
  }
  // a where m, else 0.
  SIMD_INLINE Vector keep(Mask m, Vector a) { return (Vector)(m & (Mask)a); }

  // The low bits moved to where the exponent lies: 127 (1023) becomes 1.0.
  SIMD_INLINE Vector shift_to_exponent(Vector a) {
    return (Vector)((Integer)a << (sizeof(T) == 4 ? 23 : 52));
  }

  // Unsigned 32-bit numbers, one per lane, in lanes as wide as the scalars.
  // The low halves of kLanes int64.
  SIMD_INLINE Integer integers(const int64_t* p) {
    Integer a;
    for (int i = 0; i < kLanes; ++i) a[i] = static_cast<uint32_t>(p[i]);
    return a;
  }
  SIMD_INLINE Integer integer(uint32_t x) { return x - Integer{}; }
  SIMD_INLINE Integer bit_xor(Integer a, Integer b) { return a ^ b; }
  // Both halves of the 64-bit product; above 32 bits, lanes may hold rubbish.
  SIMD_INLINE void multiply_wide(Integer a, uint32_t b, Integer& high,
                                 Integer& low) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t product = uint64_t{static_cast<uint32_t>(a[i])} * b;
      high[i] = static_cast<U>(product >> 32);
      low[i] = static_cast<uint32_t>(product);
    }
  }
  // Whether 16 bits of each lane, as a number, are b or more.
  SIMD_INLINE Mask low_half_not_less(Integer a, uint32_t b) {
    return (Mask)(a & 0xFFFF) >= (Mask)integer(b);
  }
  SIMD_INLINE Mask high_half_not_less(Integer a, uint32_t b) {
    return (Mask)((a >> 16) & 0xFFFF) >= (Mask)integer(b);
  }

  // kLanes 16-bit numbers, widened, or rounded to the nearest, ties to even.
  SIMD_INLINE Vector load_int8(const uint8_t* p) {
    Vector a;
    for (int i = 0; i < kLanes; ++i) a[i] = static_cast<int8_t>(p[i]);
    return a;
  }
  SIMD_INLINE Vector load_bfloat16(const uint16_t* p) {
    Integer bits;
    for (int i = 0; i < kLanes; ++i) bits[i] = uint32_t{p[i]} << 16;
    return (Vector)bits;
  }
  SIMD_INLINE void store_bfloat16(uint16_t* p, Vector a) {
    const Integer bits = (Integer)a;
    for (int i = 0; i < kLanes; ++i) {
      const bool nan = a[i] != a[i];
      p[i] = static_cast<uint16_t>(
          (nan ? bits[i] | 0x400000
               : bits[i] + 0x7FFF + ((bits[i] >> 16) & 1)) >>
          16);
    }
  }
  SIMD_INLINE Vector load_float16(const uint16_t* p) {
    Vector a;
    for (int i = 0; i < kLanes; ++i) {
      Float16 half;
      memcpy(&half, p + i, sizeof half);
      a[i] = static_cast<T>(half);
    }
    return a;
  }
  SIMD_INLINE void store_float16(uint16_t* p, Vector a) {
    for (int i = 0; i < kLanes; ++i) {
      const auto half = static_cast<Float16>(a[i]);
      memcpy(p + i, &half, sizeof half);
    }
  }

  // r is a square of kLanes × kLanes.
  SIMD_INLINE void transpose(Vector (&r)[kLanes]) {
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < i; ++j) {
        const T x = r[i][j];
        r[i][j] = r[j][i];
        r[j][i] = x;
      }
    }
  }
};

using Float32 = Portable<float, int32_t, uint32_t>;
using Float64 = Portable<double, int64_t, uint64_t>;

}  // namespace
}  // namespace multihead::kernels
