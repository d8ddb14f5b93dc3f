// SPDX-License-Identifier: MIT
//
// AVX2 with FMA and F16C: 8 float32 or 4 float64 lanes, 16 registers. The
// operations are those of portable.h, which documents them.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define SIMD_INLINE [[gnu::always_inline]] static inline

namespace multihead::kernels {
namespace {

struct Float32 {
  using Scalar = float;
  using Vector = __m256;
  using Integer = __m256i;
  using Mask = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;

  SIMD_INLINE Vector load(const float* p) { return _mm256_loadu_ps(p); }
  SIMD_INLINE void store(float* p, Vector a) { _mm256_storeu_ps(p, a); }
  SIMD_INLINE Vector broadcast(float x) { return _mm256_set1_ps(x); }
  SIMD_INLINE Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  SIMD_INLINE Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  SIMD_INLINE Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  SIMD_INLINE Vector div(Vector a, Vector b) { return _mm256_div_ps(a, b); }
  SIMD_INLINE Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
  SIMD_INLINE Vector abs(Vector a) {
    return _mm256_andnot_ps(broadcast(-0.0f), a);
  }
  SIMD_INLINE Vector fma(Vector a, Vector b, Vector c) {
    return _mm256_fmadd_ps(a, b, c);
  }
  SIMD_INLINE Vector fms(Vector a, Vector b, Vector c) {
    return _mm256_fmsub_ps(a, b, c);
  }

  SIMD_INLINE Mask less(Vector a, Vector b) {
    return _mm256_cmp_ps(a, b, _CMP_LT_OQ);
  }
  SIMD_INLINE Mask not_less(Vector a, Vector b) {
    return _mm256_cmp_ps(a, b, _CMP_NLT_UQ);
  }
  SIMD_INLINE Mask equal(Vector a, Vector b) {
    return _mm256_cmp_ps(a, b, _CMP_EQ_OQ);
  }
  SIMD_INLINE Mask is_negative_zero(Vector a) {
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(
        _mm256_castps_si256(a), _mm256_castps_si256(broadcast(-0.0f))));
  }
  SIMD_INLINE bool any(Mask m) { return _mm256_movemask_ps(m) != 0; }
  SIMD_INLINE Vector select(Mask m, Vector a, Vector b) {
    return _mm256_blendv_ps(b, a, m);
  }
  SIMD_INLINE Vector keep(Mask m, Vector a) { return _mm256_and_ps(m, a); }

  SIMD_INLINE Vector shift_to_exponent(Vector a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23));
  }

  SIMD_INLINE Integer integers(const int64_t* p) {
    alignas(32) uint32_t low[8];
    for (int i = 0; i < 8; ++i) low[i] = static_cast<uint32_t>(p[i]);
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(low));
  }
  SIMD_INLINE Integer integer(uint32_t x) {
    return _mm256_set1_epi32(static_cast<int>(x));
  }
  SIMD_INLINE Integer bit_xor(Integer a, Integer b) {
    return _mm256_xor_si256(a, b);
  }
  SIMD_INLINE void multiply_wide(Integer a, uint32_t b, Integer& high,
                                 Integer& low) {
    const Integer factor = _mm256_set1_epi64x(b);
    const Integer even = _mm256_mul_epu32(a, factor);
    const Integer odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  }
  SIMD_INLINE Mask low_half_not_less(Integer a, uint32_t b) {
    return not_less(_mm256_and_si256(a, _mm256_set1_epi32(0xFFFF)), b);
  }
  SIMD_INLINE Mask high_half_not_less(Integer a, uint32_t b) {
    return not_less(_mm256_srli_epi32(a, 16), b);
  }

  SIMD_INLINE Vector load_int8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  SIMD_INLINE Vector load_bfloat16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
        16));
  }
  SIMD_INLINE void store_bfloat16(uint16_t* p, Vector a) {
    const Integer bits = _mm256_castps_si256(a);
    const Integer odd =
        _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const Integer rounded = _mm256_add_epi32(
        bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const Integer quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const Mask nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    const Integer kept = _mm256_srli_epi32(
        _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan)), 16);
    const Integer packed =
        _mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_castsi256_si128(packed));
  }
  SIMD_INLINE Vector load_float16(const uint16_t* p) {
    return _mm256_cvtph_ps(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  SIMD_INLINE void store_float16(uint16_t* p, Vector a) {
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(p),
        _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  // 8×8: pairs, quadruples, halves.
  SIMD_INLINE void transpose(Vector (&r)[8]) {
    Vector t[8];
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
      r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    for (int j = 0; j < 4; ++j) {
      t[j] = _mm256_permute2f128_ps(r[j], r[j + 4], 0x20);
      t[j + 4] = _mm256_permute2f128_ps(r[j], r[j + 4], 0x31);
    }
    for (int j = 0; j < 8; ++j) r[j] = t[j];
  }

 private:
  SIMD_INLINE Mask not_less(Integer a, uint32_t b) {
    return _mm256_castsi256_ps(
        _mm256_cmpgt_epi32(a, _mm256_set1_epi32(static_cast<int>(b) - 1)));
  }
};

struct Float64 {
  using Scalar = double;
  using Vector = __m256d;
  using Integer = __m256i;
  using Mask = __m256d;
  static constexpr int kLanes = 4;
  static constexpr int kRegisters = 16;

  SIMD_INLINE Vector load(const double* p) { return _mm256_loadu_pd(p); }
  SIMD_INLINE void store(double* p, Vector a) { _mm256_storeu_pd(p, a); }
  SIMD_INLINE Vector broadcast(double x) { return _mm256_set1_pd(x); }
  SIMD_INLINE Vector add(Vector a, Vector b) { return _mm256_add_pd(a, b); }
  SIMD_INLINE Vector sub(Vector a, Vector b) { return _mm256_sub_pd(a, b); }
  SIMD_INLINE Vector mul(Vector a, Vector b) { return _mm256_mul_pd(a, b); }
  SIMD_INLINE Vector div(Vector a, Vector b) { return _mm256_div_pd(a, b); }
  SIMD_INLINE Vector max(Vector a, Vector b) { return _mm256_max_pd(a, b); }
  SIMD_INLINE Vector abs(Vector a) {
    return _mm256_andnot_pd(broadcast(-0.0), a);
  }
  SIMD_INLINE Vector fma(Vector a, Vector b, Vector c) {
    return _mm256_fmadd_pd(a, b, c);
  }
  SIMD_INLINE Vector fms(Vector a, Vector b, Vector c) {
    return _mm256_fmsub_pd(a, b, c);
  }

  SIMD_INLINE Mask less(Vector a, Vector b) {
    return _mm256_cmp_pd(a, b, _CMP_LT_OQ);
  }
  SIMD_INLINE Mask not_less(Vector a, Vector b) {
    return _mm256_cmp_pd(a, b, _CMP_NLT_UQ);
  }
  SIMD_INLINE Mask equal(Vector a, Vector b) {
    return _mm256_cmp_pd(a, b, _CMP_EQ_OQ);
  }
  SIMD_INLINE Mask is_negative_zero(Vector a) {
    return _mm256_castsi256_pd(_mm256_cmpeq_epi64(
        _mm256_castpd_si256(a), _mm256_castpd_si256(broadcast(-0.0))));
  }
  SIMD_INLINE bool any(Mask m) { return _mm256_movemask_pd(m) != 0; }
  SIMD_INLINE Vector select(Mask m, Vector a, Vector b) {
    return _mm256_blendv_pd(b, a, m);
  }
  SIMD_INLINE Vector keep(Mask m, Vector a) { return _mm256_and_pd(m, a); }

  SIMD_INLINE Vector shift_to_exponent(Vector a) {
    return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(a), 52));
  }

  SIMD_INLINE Integer integers(const int64_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  SIMD_INLINE Integer integer(uint32_t x) { return _mm256_set1_epi64x(x); }
  SIMD_INLINE Integer bit_xor(Integer a, Integer b) {
    return _mm256_xor_si256(a, b);
  }
  SIMD_INLINE void multiply_wide(Integer a, uint32_t b, Integer& high,
                                 Integer& low) {
    low = _mm256_mul_epu32(a, _mm256_set1_epi64x(b));
    high = _mm256_srli_epi64(low, 32);
  }
  SIMD_INLINE Mask low_half_not_less(Integer a, uint32_t b) {
    return not_less(a, b);
  }
  SIMD_INLINE Mask high_half_not_less(Integer a, uint32_t b) {
    return not_less(_mm256_srli_epi64(a, 16), b);
  }

  // 4×4: pairs, then halves.
  SIMD_INLINE void transpose(Vector (&r)[4]) {
    const Vector t0 = _mm256_unpacklo_pd(r[0], r[1]);
    const Vector t1 = _mm256_unpackhi_pd(r[0], r[1]);
    const Vector t2 = _mm256_unpacklo_pd(r[2], r[3]);
    const Vector t3 = _mm256_unpackhi_pd(r[2], r[3]);
    r[0] = _mm256_permute2f128_pd(t0, t2, 0x20);
    r[1] = _mm256_permute2f128_pd(t1, t3, 0x20);
    r[2] = _mm256_permute2f128_pd(t0, t2, 0x31);
    r[3] = _mm256_permute2f128_pd(t1, t3, 0x31);
  }

 private:
  SIMD_INLINE Mask not_less(Integer a, uint32_t b) {
    const Integer half = _mm256_and_si256(a, _mm256_set1_epi64x(0xFFFF));
    return _mm256_castsi256_pd(_mm256_cmpgt_epi64(
        half, _mm256_set1_epi64x(static_cast<int64_t>(b) - 1)));
  }
};

}  // namespace
}  // namespace multihead::kernels
