// SPDX-License-Identifier: MIT
//
// exp, tanh and log on vectors, in arithmetic that every instruction set
// repeats bit by bit.
#pragma once

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "multihead/kernels/cpu/simd/simd.h"

namespace multihead::kernels {
namespace {

/// e^x = 2^n·2^r with n = round(x·log2 e) and |r| ≤ ½; 2^r = 1 + r·P(r). The
/// polynomials P have the smallest relative error of r·P(r) as 2^r − 1, so that
/// 2^0 is exactly 1, rescaling by an unchanged m changes nothing, and small
/// arguments of tanh lose nothing.
template <class F>
struct ExpTerms;

template <>
struct ExpTerms<Float32> {
  static constexpr float kLog2e = 0x1.715476p+0f;
  static constexpr float kSmallest = -87;  ///< e^x below is 0
  /// x + kRound rounds x to a whole number n and leaves n + 127, what an
  /// exponent looks like, in the low bits.
  static constexpr float kRound = 0x1.8p23f + 127;
  /// For exp: 4.3e-7 of 2^r − 1, 1.8e-7 of 2^r.
  static constexpr float kFast[] = {0x1.5d87dep-10f, 0x1.3cbe58p-7f,
                                    0x1.c6b26ep-5f, 0x1.ebfa4ep-3f,
                                    0x1.62e42ep-1f};
  /// For tanh: 1.1e-8.
  static constexpr float kPrecise[] = {0x1.4308fap-13f, 0x1.5f07b4p-10f,
                                       0x1.3b2bap-7f,   0x1.c6af6ep-5f,
                                       0x1.ebfbdep-3f,  0x1.62e43p-1f};
};

template <>
struct ExpTerms<Float64> {
  static constexpr double kLog2e = 0x1.71547652b82fep+0;
  static constexpr double kSmallest = -708;
  static constexpr double kRound = 0x1.8p52 + 1023;
  /// 1.8e-17.
  static constexpr double kFast[] = {
      0x1.e8cab7c976947p-32, 0x1.e605d28b72567p-28, 0x1.b525a09339debp-24,
      0x1.62bfd4b4adf2bp-20, 0x1.ffcbfc1ea37c7p-17, 0x1.4309130958e77p-13,
      0x1.5d87fe78b211ap-10, 0x1.3b2ab6fba1e40p-7,  0x1.c6b08d704a08ep-5,
      0x1.ebfbdff82c598p-3,  0x1.62e42fefa39efp-1};
  static constexpr const auto& kPrecise = kFast;
};

/// 2^n and 2^r − 1 of e^x.
template <class F>
struct ExpParts {
  typename F::Vector power, rest;
};

template <class F, int kCount>
SIMD_INLINE ExpParts<F> exp_parts(typename F::Vector x,
                                  const ScalarOf<F> (&terms)[kCount]) {
  using E = ExpTerms<F>;
  const auto round = F::broadcast(E::kRound);
  const auto log2e = F::broadcast(E::kLog2e);
  const auto shifted = F::fma(x, log2e, round);
  const auto r = F::fms(x, log2e, F::sub(shifted, round));
  auto p = F::broadcast(terms[0]);
#pragma GCC unroll 16
  for (int i = 1; i < kCount; ++i) p = F::fma(p, r, F::broadcast(terms[i]));
  return {F::shift_to_exponent(shifted), F::mul(p, r)};
}

template <class F, int kCount>
SIMD_INLINE typename F::Vector exp_by(typename F::Vector x,
                                      const ScalarOf<F> (&terms)[kCount]) {
  const auto large = F::not_less(x, F::broadcast(ExpTerms<F>::kSmallest));
  const auto [power, rest] = exp_parts<F>(x, terms);
  return F::keep(large, F::fma(rest, power, power));
}

/// e^x for x ≤ about 80 (700): what a softmax needs. 0 below kSmallest, exactly
/// 1 at 0, NaN for NaN.
template <class F>
SIMD_INLINE typename F::Vector exp(typename F::Vector x) {
  return exp_by<F>(x, ExpTerms<F>::kFast);
}

/// tanh x = −u / (2 + u) for x ≥ 0, u = e^(−2x) − 1 = 2^n·(2^r − 1) + (2^n −
/// 1), which cancels nowhere.
template <class F>
SIMD_INLINE typename F::Vector tanh(typename F::Vector x) {
  const auto one = F::broadcast(1), zero = F::broadcast(0);
  const auto limit = F::broadcast(40);  // tanh is 1 long before
  const auto size = F::abs(x);
  const auto t =
      F::mul(F::select(F::less(limit, size), limit, size), F::broadcast(-2));
  const auto [power, rest] = exp_parts<F>(t, ExpTerms<F>::kPrecise);
  const auto u = F::fma(rest, power, F::sub(power, one));
  const auto y = F::div(F::sub(zero, u), F::add(F::broadcast(2), u));
  return F::select(F::less(x, zero), F::sub(zero, y), y);
}

/// 1 − tanh² x = 4u / (1 + u)², u = e^(−2|x|), which does not cancel.
template <class F>
SIMD_INLINE typename F::Vector tanh_slope(typename F::Vector x) {
  const auto u = exp<F>(F::mul(F::abs(x), F::broadcast(-2)));
  const auto root = F::add(F::broadcast(1), u);
  return F::div(F::mul(F::broadcast(4), u), F::mul(root, root));
}

/// Exponent and mantissa in [1, 2) of normal positive numbers.
inline void split_float(const float* x, float* exponent, float* mantissa,
                        int count) {
  for (int i = 0; i < count; ++i) {
    uint32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    exponent[i] = static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
    bits = (bits & 0x7FFFFF) | 0x3F800000;
    memcpy(mantissa + i, &bits, sizeof bits);
  }
}
inline void split_float(const double* x, double* exponent, double* mantissa,
                        int count) {
  for (int i = 0; i < count; ++i) {
    uint64_t bits;
    memcpy(&bits, x + i, sizeof bits);
    exponent[i] = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
    bits = (bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000;
    memcpy(mantissa + i, &bits, sizeof bits);
  }
}

/// ln x for normal positive x, by Newton's steps on exp: y += ln(1 + d),
/// d = x·e^(−y) − 1. −inf for 0, NaN for NaN.
template <class F>
inline typename F::Vector log(typename F::Vector x) {
  using T = typename F::Scalar;
  constexpr T kLn2 = T(0.69314718055994530942);
  alignas(64) T lanes[F::kLanes], exponent[F::kLanes], mantissa[F::kLanes];
  F::store(lanes, x);
  split_float(lanes, exponent, mantissa, F::kLanes);
  // log2 of the mantissa to 0.01: m·(2 − m/3) − 5/3.
  const auto m = F::load(mantissa);
  auto y = F::fma(m, F::fma(m, F::broadcast(T(-1.0 / 3)), F::broadcast(2)),
                  F::broadcast(T(-5.0 / 3)));
  y = F::mul(F::add(y, F::load(exponent)), F::broadcast(kLn2));
  for (int step = 0; step < (sizeof(T) == 4 ? 1 : 2); ++step) {
    // Small factors: e^(−y) itself may leave the range that exp serves.
    const auto half = F::mul(y, F::broadcast(T(-0.5)));
    const auto root = exp_by<F>(half, ExpTerms<F>::kPrecise);
    const auto d = F::fms(F::mul(x, root), root, F::broadcast(1));
    const auto series = F::fma(
        d,
        F::fma(d, F::fma(d, F::broadcast(T(-0.25)), F::broadcast(T(1.0 / 3))),
               F::broadcast(T(-0.5))),
        F::broadcast(1));
    y = F::fma(d, series, y);
  }
  const auto zero = F::broadcast(0);
  y = F::select(F::equal(x, zero), F::broadcast(T(-INFINITY)), y);
  return F::select(F::equal(x, x), y, x);
}

/// m where a row has seen a finite score, 0 where it has seen none: what may be
/// subtracted from −inf.
template <class F>
SIMD_INLINE typename F::Vector shift_of(typename F::Vector m) {
  const auto none = F::broadcast(ScalarOf<F>(-INFINITY));
  return F::select(F::equal(m, none), F::broadcast(0), m);
}

}  // namespace
}  // namespace multihead::kernels
