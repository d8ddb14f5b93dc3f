// SPDX-License-Identifier: MIT
//
// Which instruction set the kernels run with.
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "multihead/kernels/cpu/exports.h"
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

// Linux gives the tile registers to those who ask.
bool tiles_are_allowed() {
#if defined(MULTIHEAD_X86) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// The best that is worth using. Intel's CPUs run VDPBF16PS at a quarter of the
// rate of a multiply-add (measured on Granite Rapids), so that widening is
// twice as fast there.
Isa best_isa() {
#ifdef MULTIHEAD_X86
  if (cpu_has(Isa::kAmx)) return Isa::kAmx;
  if (cpu_has(Isa::kAvx512Bf16) && !__builtin_cpu_is("intel")) {
    return Isa::kAvx512Bf16;
  }
#endif
  if (cpu_has(Isa::kAvx512)) return Isa::kAvx512;
  return cpu_has(Isa::kAvx2) ? Isa::kAvx2 : Isa::kPortable;
}

struct Choice {
  Isa isa = Isa::kPortable;
  const char* error = nullptr;
};

Choice choose() {
  const char* wanted = getenv("MULTIHEAD_ISA");
  if (!wanted || !*wanted) return {best_isa(), nullptr};
  Choice choice;
  for (const Isa isa : kAllIsas) {
    if (strcmp(wanted, name_of(isa)) != 0) continue;
    choice.isa = isa;
    if (!cpu_has(isa)) {
      choice.error =
          "MULTIHEAD_ISA names an instruction set that this CPU lacks";
    }
    return choice;
  }
  choice.error =
      "MULTIHEAD_ISA must be portable, avx2, avx512, avx512_bf16 or amx";
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
    case Isa::kAmx:
      return "amx";
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
    case Isa::kAmx: {
      static const bool allowed = tiles_are_allowed();
      return avx512 && __builtin_cpu_supports("avx512bf16") &&
             __builtin_cpu_supports("amx-tile") &&
             __builtin_cpu_supports("amx-bf16") && allowed;
    }
    default:
      return true;
  }
#else
  return isa == Isa::kPortable;
#endif
}

// All stages of a target, so that what one of them finds of the scores holds
// for the next: of a score of 1e9 another order of sums is another score.
#define MULTIHEAD_KERNELS(target)                                     \
  {forward_##target(dtype),                                           \
   {backward_rows_##target(dtype), backward_##target(dtype),          \
    backward_queries_##target(dtype), backward_heads_##target(dtype), \
    bias_gradient_##target(dtype)},                                   \
   weights_##target(dtype),                                           \
   summary_##target(dtype)}

Kernels kernels_for(Isa isa, Dtype dtype) {
#ifdef MULTIHEAD_X86
  switch (isa) {
    case Isa::kAvx2:
      return MULTIHEAD_KERNELS(avx2);
    case Isa::kAvx512Bf16:
      if (dtype == Dtype::kBFloat16) return MULTIHEAD_KERNELS(avx512_bf16);
      return MULTIHEAD_KERNELS(avx512);
    case Isa::kAmx:
      if (dtype == Dtype::kBFloat16) return MULTIHEAD_KERNELS(amx);
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
