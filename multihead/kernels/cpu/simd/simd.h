// SPDX-License-Identifier: MIT
//
// The vector layer for the instruction set that this translation unit is
// compiled for. It lies in an unnamed namespace, like everything that is
// compiled more than once: of a function shared by name the linker could keep
// the AVX-512 version for all.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include "multihead/kernels/cpu/simd/avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "multihead/kernels/cpu/simd/avx2.h"
#elif defined(MULTIHEAD_NEON)  // each 64-bit ARM has it, so that no flag tells
#include "multihead/kernels/cpu/simd/neon.h"
#else
#include "multihead/kernels/cpu/simd/portable.h"
#endif

namespace multihead::kernels {
namespace {

/// float or double: what a lane, a multiplier or a stored tensor computes in.
template <class F>
using ScalarOf = typename F::Scalar;

}  // namespace
}  // namespace multihead::kernels
