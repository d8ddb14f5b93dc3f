// SPDX-License-Identifier: MIT
//
// What the sources that are compiled once per target export: one function per
// kernel, its name ending in that of the target. The build defines
// MULTIHEAD_TARGET and the compiler's flags.
#pragma once

#include "multihead/kernels/kernels.h"

#define MULTIHEAD_EXPORTS(target)                                      \
  Kernel<ForwardArgs> forward_##target(Dtype);                         \
  Kernel<ForwardArgs> merge_##target(Dtype);                           \
  Kernel<BackwardRun> backward_prepare_##target(Dtype);                \
  Kernel<BackwardRun> backward_##target(Dtype);                        \
  Kernel<BackwardRun> backward_queries_##target(Dtype);                \
  Kernel<BackwardRun> backward_heads_##target(Dtype);                  \
  Kernel<BackwardRun> backward_bias_##target(Dtype);                   \
  Kernel<WeightsArgs> weights_##target(Dtype);                         \
  Kernel<SummaryArgs> summary_##target(Dtype);                         \
  /* All of one target, so that what one stage finds of the            \
     scores holds for the next: of a score of 1e9 another              \
     order of sums is another score. */                                \
  inline Kernels kernels_##target(Dtype d) {                           \
    return {forward_##target(d),                                       \
            merge_##target(d),                                         \
            {backward_prepare_##target(d), backward_##target(d),       \
             backward_queries_##target(d), backward_heads_##target(d), \
             backward_bias_##target(d)},                               \
            weights_##target(d),                                       \
            summary_##target(d)};                                      \
  }

namespace multihead::kernels {

#define MULTIHEAD_EXPORTS_OF(constant, target, ...) MULTIHEAD_EXPORTS(target)
MULTIHEAD_ISAS(MULTIHEAD_EXPORTS_OF)
MULTIHEAD_EXPORTS(portable_fma)
#undef MULTIHEAD_EXPORTS_OF
#undef MULTIHEAD_EXPORTS

}  // namespace multihead::kernels

#ifdef MULTIHEAD_TARGET
#if defined(__AMX_BF16__)
#include "multihead/kernels/cpu/gemm/amx.h"
#define MULTIHEAD_BFLOAT16_MULTIPLIER BFloat16Tiles
#elif defined(__AVX512BF16__)
#include "multihead/kernels/cpu/gemm/bf16_dot.h"
#define MULTIHEAD_BFLOAT16_MULTIPLIER BFloat16Dot
#endif
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

/// The kernel K<M, S> for a dtype, with the multiplier that the target has.
template <template <class, class> class K>
inline auto visit([[maybe_unused]] Dtype dtype) {
#ifdef MULTIHEAD_BFLOAT16_MULTIPLIER
  // What this target is for; kernels_for asks it for nothing else.
  return kernel<K<MULTIHEAD_BFLOAT16_MULTIPLIER, Stored<Dtype::kBFloat16>>>();
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
#endif
