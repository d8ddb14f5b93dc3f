// SPDX-License-Identifier: MIT
//
// The functions of simd/math.h on arrays, compiled once per instruction set
// with the flags of the kernels. `count` is a multiple of 16.
#pragma once

#include <cstdint>

#define MULTIHEAD_VECTOR_FUNCTIONS(target)                       \
  void exp_##target(const float* x, float* y, int64_t count);    \
  void exp_##target(const double* x, double* y, int64_t count);  \
  void tanh_##target(const float* x, float* y, int64_t count);   \
  void tanh_##target(const double* x, double* y, int64_t count); \
  void log_##target(const float* x, float* y, int64_t count);    \
  void log_##target(const double* x, double* y, int64_t count)

namespace kernel_test {

MULTIHEAD_VECTOR_FUNCTIONS(portable);
#ifdef MULTIHEAD_X86
MULTIHEAD_VECTOR_FUNCTIONS(portable_fma);
MULTIHEAD_VECTOR_FUNCTIONS(avx2);
MULTIHEAD_VECTOR_FUNCTIONS(avx512);
#elif defined(MULTIHEAD_ARM)
MULTIHEAD_VECTOR_FUNCTIONS(neon);
#endif

}  // namespace kernel_test
