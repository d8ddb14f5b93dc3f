// SPDX-License-Identifier: MIT
//
// What the sources that are compiled once per instruction set export.
#pragma once

#include "multihead/kernels/kernels.h"

#define MULTIHEAD_EXPORTS(target)                    \
  Kernel<Forward> forward_##target(Dtype);           \
  Kernel<Backward> backward_rows_##target(Dtype);    \
  Kernel<Backward> backward_##target(Dtype);         \
  Kernel<Backward> backward_queries_##target(Dtype); \
  Kernel<Backward> backward_heads_##target(Dtype);   \
  Kernel<Backward> bias_gradient_##target(Dtype);    \
  Kernel<Weights> weights_##target(Dtype);           \
  Kernel<Summary> summary_##target(Dtype)

namespace multihead::kernels {

MULTIHEAD_EXPORTS(portable);
#ifdef MULTIHEAD_X86
MULTIHEAD_EXPORTS(portable_fma);
MULTIHEAD_EXPORTS(avx2);
MULTIHEAD_EXPORTS(avx512);
MULTIHEAD_EXPORTS(avx512_bf16);
MULTIHEAD_EXPORTS(amx);
#endif

}  // namespace multihead::kernels

#undef MULTIHEAD_EXPORTS
