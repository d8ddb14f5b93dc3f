// SPDX-License-Identifier: MIT
//
// NEON of a 64-bit ARM: 4 float32 or 2 float64 lanes, 32 registers. The
// operations are those of portable.h, which documents them.
#pragma once

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define SIMD_INLINE [[gnu::always_inline]] static inline

namespace multihead::kernels {
namespace {

struct Float32 {
  using Scalar = float;
  using Vector = float32x4_t;
  using Integer = uint32x4_t;
  using Mask = uint32x4_t;
  static constexpr int kLanes = 4;
  static constexpr int kRegisters = 32;

  SIMD_INLINE Vector load(const float* p) { return vld1q_f32(p); }
  SIMD_INLINE void store(float* p, Vector a) { vst1q_f32(p, a); }
  SIMD_INLINE Vector broadcast(float x) { return vdupq_n_f32(x); }
  SIMD_INLINE Vector add(Vector a, Vector b) { return vaddq_f32(a, b); }
  SIMD_INLINE Vector sub(Vector a, Vector b) { return vsubq_f32(a, b); }
  SIMD_INLINE Vector mul(Vector a, Vector b) { return vmulq_f32(a, b); }
  SIMD_INLINE Vector div(Vector a, Vector b) { return vdivq_f32(a, b); }
  // Not FMAX, which gives NaN where either is.
  SIMD_INLINE Vector max(Vector a, Vector b) {
    return vbslq_f32(vcgtq_f32(a, b), a, b);
  }
  SIMD_INLINE Vector abs(Vector a) { return vabsq_f32(a); }
  SIMD_INLINE Vector fma(Vector a, Vector b, Vector c) {
    return vfmaq_f32(c, a, b);
  }
  SIMD_INLINE Vector fms(Vector a, Vector b, Vector c) {
    return vfmaq_f32(vnegq_f32(c), a, b);
  }

  SIMD_INLINE Mask less(Vector a, Vector b) { return vcltq_f32(a, b); }
  SIMD_INLINE Mask not_less(Vector a, Vector b) {
    return vmvnq_u32(vcltq_f32(a, b));
  }
  SIMD_INLINE Mask equal(Vector a, Vector b) { return vceqq_f32(a, b); }
  SIMD_INLINE Mask is_negative_zero(Vector a) {
    return vceqq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(0x80000000));
  }
  SIMD_INLINE bool any(Mask m) { return vmaxvq_u32(m) != 0; }
  SIMD_INLINE Vector select(Mask m, Vector a, Vector b) {
    return vbslq_f32(m, a, b);
  }
  SIMD_INLINE Vector keep(Mask m, Vector a) {
    return vreinterpretq_f32_u32(vandq_u32(m, vreinterpretq_u32_f32(a)));
  }

  SIMD_INLINE Vector shift_to_exponent(Vector a) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a), 23));
  }

  SIMD_INLINE Integer integers(const int64_t* p) {
    return vuzp1q_u32(vreinterpretq_u32_s64(vld1q_s64(p)),
                      vreinterpretq_u32_s64(vld1q_s64(p + 2)));
  }
  SIMD_INLINE Integer integer(uint32_t x) { return vdupq_n_u32(x); }
  SIMD_INLINE Integer bit_xor(Integer a, Integer b) { return veorq_u32(a, b); }
  SIMD_INLINE void multiply_wide(Integer a, uint32_t b, Integer& high,
                                 Integer& low) {
    const Integer first =
        vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a), vdup_n_u32(b)));
    const Integer last =
        vreinterpretq_u32_u64(vmull_high_u32(a, vdupq_n_u32(b)));
    high = vuzp2q_u32(first, last);
    low = vuzp1q_u32(first, last);
  }
  SIMD_INLINE Mask low_half_not_less(Integer a, uint32_t b) {
    return vcgeq_u32(vandq_u32(a, vdupq_n_u32(0xFFFF)), vdupq_n_u32(b));
  }
  SIMD_INLINE Mask high_half_not_less(Integer a, uint32_t b) {
    return vcgeq_u32(vshrq_n_u32(a, 16), vdupq_n_u32(b));
  }

  SIMD_INLINE Vector load_int8(const uint8_t* p) {
    int32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
  }
  SIMD_INLINE Vector load_bfloat16(const uint16_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
  }
  SIMD_INLINE void store_bfloat16(uint16_t* p, Vector a) {
    const Integer bits = vreinterpretq_u32_f32(a);
    const Integer odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const Integer rounded =
        vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    const Integer quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    const Mask number = vceqq_f32(a, a);
    vst1_u16(p, vshrn_n_u32(vbslq_u32(number, rounded, quiet), 16));
  }
  SIMD_INLINE Vector load_float16(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
  }
  SIMD_INLINE void store_float16(uint16_t* p, Vector a) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a)));
  }

  // 4×4: pairs, then halves.
  SIMD_INLINE void transpose(Vector (&r)[4]) {
    const Vector t[4] = {vtrn1q_f32(r[0], r[1]), vtrn2q_f32(r[0], r[1]),
                         vtrn1q_f32(r[2], r[3]), vtrn2q_f32(r[2], r[3])};
    for (int i = 0; i < 2; ++i) {
      const float64x2_t a = vreinterpretq_f64_f32(t[i]);
      const float64x2_t b = vreinterpretq_f64_f32(t[i + 2]);
      r[i] = vreinterpretq_f32_f64(vtrn1q_f64(a, b));
      r[i + 2] = vreinterpretq_f32_f64(vtrn2q_f64(a, b));
    }
  }
};

struct Float64 {
  using Scalar = double;
  using Vector = float64x2_t;
  using Integer = uint64x2_t;
  using Mask = uint64x2_t;
  static constexpr int kLanes = 2;
  static constexpr int kRegisters = 32;

  SIMD_INLINE Vector load(const double* p) { return vld1q_f64(p); }
  SIMD_INLINE void store(double* p, Vector a) { vst1q_f64(p, a); }
  SIMD_INLINE Vector broadcast(double x) { return vdupq_n_f64(x); }
  SIMD_INLINE Vector add(Vector a, Vector b) { return vaddq_f64(a, b); }
  SIMD_INLINE Vector sub(Vector a, Vector b) { return vsubq_f64(a, b); }
  SIMD_INLINE Vector mul(Vector a, Vector b) { return vmulq_f64(a, b); }
  SIMD_INLINE Vector div(Vector a, Vector b) { return vdivq_f64(a, b); }
  SIMD_INLINE Vector max(Vector a, Vector b) {
    return vbslq_f64(vcgtq_f64(a, b), a, b);
  }
  SIMD_INLINE Vector abs(Vector a) { return vabsq_f64(a); }
  SIMD_INLINE Vector fma(Vector a, Vector b, Vector c) {
    return vfmaq_f64(c, a, b);
  }
  SIMD_INLINE Vector fms(Vector a, Vector b, Vector c) {
    return vfmaq_f64(vnegq_f64(c), a, b);
  }

  SIMD_INLINE Mask less(Vector a, Vector b) { return vcltq_f64(a, b); }
  SIMD_INLINE Mask not_less(Vector a, Vector b) {
    return vreinterpretq_u64_u32(
        vmvnq_u32(vreinterpretq_u32_u64(vcltq_f64(a, b))));
  }
  SIMD_INLINE Mask equal(Vector a, Vector b) { return vceqq_f64(a, b); }
  SIMD_INLINE Mask is_negative_zero(Vector a) {
    return vceqq_u64(vreinterpretq_u64_f64(a), vdupq_n_u64(uint64_t{1} << 63));
  }
  SIMD_INLINE bool any(Mask m) {
    return vmaxvq_u32(vreinterpretq_u32_u64(m)) != 0;
  }
  SIMD_INLINE Vector select(Mask m, Vector a, Vector b) {
    return vbslq_f64(m, a, b);
  }
  SIMD_INLINE Vector keep(Mask m, Vector a) {
    return vreinterpretq_f64_u64(vandq_u64(m, vreinterpretq_u64_f64(a)));
  }

  SIMD_INLINE Vector shift_to_exponent(Vector a) {
    return vreinterpretq_f64_u64(vshlq_n_u64(vreinterpretq_u64_f64(a), 52));
  }

  SIMD_INLINE Integer integers(const int64_t* p) {
    return vreinterpretq_u64_s64(vld1q_s64(p));
  }
  SIMD_INLINE Integer integer(uint32_t x) { return vdupq_n_u64(x); }
  SIMD_INLINE Integer bit_xor(Integer a, Integer b) { return veorq_u64(a, b); }
  SIMD_INLINE void multiply_wide(Integer a, uint32_t b, Integer& high,
                                 Integer& low) {
    low = vmull_u32(vmovn_u64(a), vdup_n_u32(b));
    high = vshrq_n_u64(low, 32);
  }
  SIMD_INLINE Mask low_half_not_less(Integer a, uint32_t b) {
    return vcgeq_u64(vandq_u64(a, vdupq_n_u64(0xFFFF)), vdupq_n_u64(b));
  }
  SIMD_INLINE Mask high_half_not_less(Integer a, uint32_t b) {
    return low_half_not_less(vshrq_n_u64(a, 16), b);
  }

  SIMD_INLINE void transpose(Vector (&r)[2]) {
    const Vector first = vtrn1q_f64(r[0], r[1]);
    r[1] = vtrn2q_f64(r[0], r[1]);
    r[0] = first;
  }
};

}  // namespace
}  // namespace multihead::kernels
