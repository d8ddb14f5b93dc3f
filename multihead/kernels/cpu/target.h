// SPDX-License-Identifier: MIT
//
// What a source that is compiled once per instruction set exports: one function
// per kernel, its name ending in that of the target. The build defines
// MULTIHEAD_TARGET and the compiler's flags.
#pragma once

#include "multihead/kernels/cpu/exports.h"
#include "multihead/kernels/cpu/gemm/gemm.h"
#include "multihead/kernels/cpu/gemm/load_store.h"

#define MULTIHEAD_JOIN(a, b) a##_##b
#define MULTIHEAD_NAME(a, b) MULTIHEAD_JOIN(a, b)
#define MULTIHEAD_FOR_TARGET(name) MULTIHEAD_NAME(name, MULTIHEAD_TARGET)

namespace multihead::kernels {
namespace {

template <class K>
inline typename K::Type kernel() {
  return {&K::plan, &K::run};
}

/// The kernel K<M, S> for a dtype, with the products that the target has.
template <template <class, class> class K>
inline auto visit([[maybe_unused]] Dtype dtype) {
  // What two targets are for; they are asked for nothing else.
#if defined(__AMX_BF16__)
  return kernel<K<BFloat16Tiles, Stored<Dtype::kBFloat16>>>();
#elif defined(__AVX512BF16__)
  return kernel<K<BFloat16Dot, Stored<Dtype::kBFloat16>>>();
#else
  using Single = FusedMultiplyAdd<Float32>;
  using Double = FusedMultiplyAdd<Float64>;
  switch (dtype) {
    case Dtype::kFloat64:
      return kernel<K<Double, Stored<Dtype::kFloat64>>>();
    case Dtype::kBFloat16:
      return kernel<K<Single, Stored<Dtype::kBFloat16>>>();
    case Dtype::kFloat16:
      return kernel<K<Single, Stored<Dtype::kFloat16>>>();
    default:
      return kernel<K<Single, Stored<Dtype::kFloat32>>>();
  }
#endif
}

}  // namespace
}  // namespace multihead::kernels
