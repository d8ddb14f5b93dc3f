// SPDX-License-Identifier: MIT
//
// Which instruction set the kernels run with.
#include <stdlib.h>
#include <string.h>

#include "multihead/kernels/exports.h"
#include "multihead/kernels/kernels.h"

namespace multihead::kernels {
namespace {

// As far as the build has them: MULTIHEAD_X86 is defined on x86-64.
bool cpu_has_fma() {
#ifdef MULTIHEAD_X86
  return __builtin_cpu_supports("avx") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

// The best that is worth using. Intel's first three generations with
// avx512_bf16 run VDPBF16PS at a quarter of the rate of a multiply-add, so that
// widening is twice as fast; they are known by AMX, which AMD's lack.
Isa best_isa() {
#ifdef MULTIHEAD_X86
  if (cpu_has(Isa::kAvx512Bf16) && !__builtin_cpu_is("intel")) {
    return Isa::kAvx512Bf16;
  }
#endif
  if (cpu_has(Isa::kAvx512)) return Isa::kAvx512;
  return cpu_has(Isa::kAvx2) ? Isa::kAvx2 : Isa::kPortable;
}

struct Choice {
  Isa isa = best_isa();
  const char* error = nullptr;
};

Choice choose() {
  Choice choice;
  const char* wanted = getenv("MULTIHEAD_ISA");
  if (!wanted || !*wanted) return choice;
  for (const Isa isa : kAllIsas) {
    if (strcmp(wanted, name_of(isa)) != 0) continue;
    choice.isa = isa;
    if (!cpu_has(isa)) {
      choice.error =
          "MULTIHEAD_ISA names an instruction set that this CPU lacks";
    }
    return choice;
  }
  choice.error = "MULTIHEAD_ISA must be portable, avx2, avx512 or avx512_bf16";
  return choice;
}

}  // namespace

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
    default:
      return "portable";
  }
}

bool cpu_has(Isa isa) {
#ifdef MULTIHEAD_X86
  const bool avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  switch (isa) {
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && cpu_has_fma() &&
             __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx512Bf16:
      return avx512 && __builtin_cpu_supports("avx512bf16");
    default:
      return true;
  }
#else
  return isa == Isa::kPortable;
#endif
}

#define MULTIHEAD_KERNELS(target) \
  {forward_##target(dtype), weights_##target(dtype), summary_##target(dtype)}

Kernels kernels_for(Isa isa, Dtype dtype) {
#ifdef MULTIHEAD_X86
  switch (isa) {
    case Isa::kAvx2:
      return MULTIHEAD_KERNELS(avx2);
    case Isa::kAvx512Bf16:
      if (dtype == Dtype::kBFloat16) return MULTIHEAD_KERNELS(avx512_bf16);
      [[fallthrough]];
    case Isa::kAvx512:
      return MULTIHEAD_KERNELS(avx512);
    default:
      if (cpu_has_fma()) return MULTIHEAD_KERNELS(portable_fma);
  }
#endif
  return MULTIHEAD_KERNELS(portable);
}

Isa chosen_isa(const char** error) {
  static const Choice choice = choose();
  *error = choice.error;
  return choice.isa;
}

}  // namespace multihead::kernels
