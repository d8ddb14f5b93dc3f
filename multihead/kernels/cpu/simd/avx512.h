// SPDX-License-Identifier: MIT
//
// AVX-512 (F, BW, DQ, VL): 16 float32 or 8 float64 lanes, 32 registers. The
// operations are those of portable.h, which documents them.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define SIMD_INLINE [[gnu::always_inline]] static inline

namespace multihead::kernels {
namespace {

struct Float32 {
  using Scalar = float;
  using Vector = __m512;
  using Integer = __m512i;
  using Mask = __mmask16;
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;

  SIMD_INLINE Vector load(const float* p) { return _mm512_loadu_ps(p); }
  SIMD_INLINE void store(float* p, Vector a) { _mm512_storeu_ps(p, a); }
  SIMD_INLINE Vector broadcast(float x) { return _mm512_set1_ps(x); }
  SIMD_INLINE Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  SIMD_INLINE Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
  SIMD_INLINE Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  SIMD_INLINE Vector div(Vector a, Vector b) { return _mm512_div_ps(a, b); }
  SIMD_INLINE Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
  SIMD_INLINE Vector abs(Vector a) { return _mm512_abs_ps(a); }
  SIMD_INLINE Vector fma(Vector a, Vector b, Vector c) {
    return _mm512_fmadd_ps(a, b, c);
  }
  SIMD_INLINE Vector fms(Vector a, Vector b, Vector c) {
    return _mm512_fmsub_ps(a, b, c);
  }

  SIMD_INLINE Mask less(Vector a, Vector b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
  }
  SIMD_INLINE Mask not_less(Vector a, Vector b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ);
  }
  SIMD_INLINE Mask equal(Vector a, Vector b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
  }
  SIMD_INLINE Mask is_negative_zero(Vector a) {
    return _mm512_fpclass_ps_mask(a, 0x04);
  }
  SIMD_INLINE bool any(Mask m) { return m != 0; }
  SIMD_INLINE Vector select(Mask m, Vector a, Vector b) {
    return _mm512_mask_mov_ps(b, m, a);
  }
  SIMD_INLINE Vector keep(Mask m, Vector a) {
    return _mm512_maskz_mov_ps(m, a);
  }

  SIMD_INLINE Vector shift_to_exponent(Vector a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23));
  }

  SIMD_INLINE Integer integers(const int64_t* p) {
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm512_cvtepi64_epi32(_mm512_loadu_si512(p))),
        _mm512_cvtepi64_epi32(_mm512_loadu_si512(p + 8)), 1);
  }
  SIMD_INLINE Integer integer(uint32_t x) {
    return _mm512_set1_epi32(static_cast<int>(x));
  }
  SIMD_INLINE Integer bit_xor(Integer a, Integer b) {
    return _mm512_xor_si512(a, b);
  }
  SIMD_INLINE void multiply_wide(Integer a, uint32_t b, Integer& high,
                                 Integer& low) {
    const Integer factor = _mm512_set1_epi64(b);
    const Integer even = _mm512_mul_epu32(a, factor);
    const Integer odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
    high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xAAAA, odd);
    low = _mm512_mask_mov_epi32(even, 0xAAAA, _mm512_slli_epi64(odd, 32));
  }
  SIMD_INLINE Mask low_half_not_less(Integer a, uint32_t b) {
    return _mm512_cmpge_epi32_mask(
        _mm512_and_si512(a, _mm512_set1_epi32(0xFFFF)), integer(b));
  }
  SIMD_INLINE Mask high_half_not_less(Integer a, uint32_t b) {
    return _mm512_cmpge_epi32_mask(_mm512_srli_epi32(a, 16), integer(b));
  }

  SIMD_INLINE Vector load_int8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  SIMD_INLINE Vector load_bfloat16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
        16));
  }
  SIMD_INLINE void store_bfloat16(uint16_t* p, Vector a) {
    const Integer bits = _mm512_castps_si512(a);
    const Integer odd =
        _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const Integer rounded = _mm512_add_epi32(
        bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const Integer quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const Mask nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const Integer kept = _mm512_mask_mov_epi32(rounded, nan, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
  }
  SIMD_INLINE Vector load_float16(const uint16_t* p) {
    return _mm512_cvtph_ps(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  SIMD_INLINE void store_float16(uint16_t* p, Vector a) {
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(p),
        _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  // 16×16 in four rounds of 16 shuffles: pairs, quadruples, then 128-bit
  // blocks twice.
  SIMD_INLINE void transpose(Vector (&r)[16]) {
    Vector t[16];
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xEE);
      r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    for (int i = 0; i < 16; i += 8) {
      for (int j = i; j < i + 4; ++j) {
        t[j] = _mm512_shuffle_f32x4(r[j], r[j + 4], 0x88);
        t[j + 4] = _mm512_shuffle_f32x4(r[j], r[j + 4], 0xDD);
      }
    }
    for (int j = 0; j < 8; ++j) {
      r[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
      r[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xDD);
    }
  }
};

struct Float64 {
  using Scalar = double;
  using Vector = __m512d;
  using Integer = __m512i;
  using Mask = __mmask8;
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 32;

  SIMD_INLINE Vector load(const double* p) { return _mm512_loadu_pd(p); }
  SIMD_INLINE void store(double* p, Vector a) { _mm512_storeu_pd(p, a); }
  SIMD_INLINE Vector broadcast(double x) { return _mm512_set1_pd(x); }
  SIMD_INLINE Vector add(Vector a, Vector b) { return _mm512_add_pd(a, b); }
  SIMD_INLINE Vector sub(Vector a, Vector b) { return _mm512_sub_pd(a, b); }
  SIMD_INLINE Vector mul(Vector a, Vector b) { return _mm512_mul_pd(a, b); }
  SIMD_INLINE Vector div(Vector a, Vector b) { return _mm512_div_pd(a, b); }
  SIMD_INLINE Vector max(Vector a, Vector b) { return _mm512_max_pd(a, b); }
  SIMD_INLINE Vector abs(Vector a) { return _mm512_abs_pd(a); }
  SIMD_INLINE Vector fma(Vector a, Vector b, Vector c) {
    return _mm512_fmadd_pd(a, b, c);
  }
  SIMD_INLINE Vector fms(Vector a, Vector b, Vector c) {
    return _mm512_fmsub_pd(a, b, c);
  }

  SIMD_INLINE Mask less(Vector a, Vector b) {
    return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ);
  }
  SIMD_INLINE Mask not_less(Vector a, Vector b) {
    return _mm512_cmp_pd_mask(a, b, _CMP_NLT_UQ);
  }
  SIMD_INLINE Mask equal(Vector a, Vector b) {
    return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ);
  }
  SIMD_INLINE Mask is_negative_zero(Vector a) {
    return _mm512_fpclass_pd_mask(a, 0x04);
  }
  SIMD_INLINE bool any(Mask m) { return m != 0; }
  SIMD_INLINE Vector select(Mask m, Vector a, Vector b) {
    return _mm512_mask_mov_pd(b, m, a);
  }
  SIMD_INLINE Vector keep(Mask m, Vector a) {
    return _mm512_maskz_mov_pd(m, a);
  }

  SIMD_INLINE Vector shift_to_exponent(Vector a) {
    return _mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(a), 52));
  }

  SIMD_INLINE Integer integers(const int64_t* p) {
    return _mm512_loadu_si512(p);
  }
  SIMD_INLINE Integer integer(uint32_t x) { return _mm512_set1_epi64(x); }
  SIMD_INLINE Integer bit_xor(Integer a, Integer b) {
    return _mm512_xor_si512(a, b);
  }
  SIMD_INLINE void multiply_wide(Integer a, uint32_t b, Integer& high,
                                 Integer& low) {
    low = _mm512_mul_epu32(a, _mm512_set1_epi64(b));
    high = _mm512_srli_epi64(low, 32);
  }
  SIMD_INLINE Mask low_half_not_less(Integer a, uint32_t b) {
    return _mm512_cmpge_epi64_mask(
        _mm512_and_si512(a, _mm512_set1_epi64(0xFFFF)), integer(b));
  }
  SIMD_INLINE Mask high_half_not_less(Integer a, uint32_t b) {
    return _mm512_cmpge_epi64_mask(
        _mm512_and_si512(_mm512_srli_epi64(a, 16), _mm512_set1_epi64(0xFFFF)),
        integer(b));
  }

  // 8×8: pairs, then 128-bit blocks twice.
  SIMD_INLINE void transpose(Vector (&r)[8]) {
    Vector t[8];
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm512_unpacklo_pd(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_pd(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      for (int j = i; j < i + 2; ++j) {
        r[j] = _mm512_shuffle_f64x2(t[j], t[j + 2], 0x88);
        r[j + 2] = _mm512_shuffle_f64x2(t[j], t[j + 2], 0xDD);
      }
    }
    for (int j = 0; j < 4; ++j) {
      t[j] = _mm512_shuffle_f64x2(r[j], r[j + 4], 0x88);
      t[j + 4] = _mm512_shuffle_f64x2(r[j], r[j + 4], 0xDD);
    }
    for (int j = 0; j < 8; ++j) r[j] = t[j];
  }
};

#ifdef __AVX512BF16__
// Pairs of bfloat16: a·b over both halves, added to float32 lanes. Denormals
// count as zero, so says the instruction.
struct BFloat16Pairs {
  SIMD_INLINE __m512 dot(__m512 a, __m512 b, __m512 c) {
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
  }
  // Two vectors rounded to nearest even, one after the other.
  SIMD_INLINE __m512i round(__m512 even, __m512 odd) {
    return (__m512i)_mm512_cvtne2ps_pbh(odd, even);
  }
  // The halves of such a vector as pairs.
  SIMD_INLINE __m512 interleave(__m512i halves) {
    alignas(64) static constexpr uint16_t kOrder[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_castsi512_ps(
        _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves));
  }
  // 32 numbers of two rows each as pairs: those of columns 0 to 15, and 16 to
  // 31.
  SIMD_INLINE void interleave(const uint16_t* even, const uint16_t* odd,
                              __m512& first, __m512& last) {
    alignas(64) static constexpr uint16_t kFirst[32] = {
        0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i order = _mm512_load_si512(kFirst);
    const __m512i next = _mm512_add_epi16(order, _mm512_set1_epi16(16));
    const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    first = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, order, b));
    last = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, next, b));
  }
  // The upper halves of two vectors as pairs: of numbers that are bfloat16.
  SIMD_INLINE __m512 upper_halves(__m512 even, __m512 odd) {
    alignas(64) static constexpr uint16_t kOrder[32] = {
        1,  33, 3,  35, 5,  37, 7,  39, 9,  41, 11, 43, 13, 45, 15, 47,
        17, 49, 19, 51, 21, 53, 23, 55, 25, 57, 27, 59, 29, 61, 31, 63};
    return _mm512_castsi512_ps(_mm512_permutex2var_epi16(
        _mm512_castps_si512(even), _mm512_load_si512(kOrder),
        _mm512_castps_si512(odd)));
  }
  // 16 numbers as the low halves of pairs.
  SIMD_INLINE __m512i low_halves(const uint16_t* p) {
    return _mm512_cvtepu16_epi32(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  SIMD_INLINE __m512 join(__m512i low, __m512i high) {
    return _mm512_castsi512_ps(
        _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  // Puts 0 in the place of numbers that are not finite; false if there are any.
  SIMD_INLINE bool take_finite(__m512& pairs) {
    const __m512i bits = _mm512_castps_si512(pairs);
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    const __mmask32 finite =
        _mm512_cmpneq_epi16_mask(_mm512_and_si512(bits, exponent), exponent);
    pairs = _mm512_castsi512_ps(_mm512_maskz_mov_epi16(finite, bits));
    return finite == 0xFFFFFFFF;
  }
};
#endif

}  // namespace
}  // namespace multihead::kernels
