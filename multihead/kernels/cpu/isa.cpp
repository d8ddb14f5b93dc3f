// SPDX-License-Identifier: MIT
//
// Which instruction set the kernels run with.
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <iterator>
#include <string>

#include "multihead/kernels/cpu/dispatch.h"

// The build has kernels of this processor's instruction sets: MULTIHEAD_X86 is
// defined on x86-64, MULTIHEAD_ARM on a 64-bit ARM.
#if defined(MULTIHEAD_X86)
#define CPU(feature) (__builtin_cpu_supports(feature) != 0)
#define MULTIHEAD_BUILT_ISAS MULTIHEAD_X86_ISAS
#elif defined(MULTIHEAD_ARM)
#define MULTIHEAD_BUILT_ISAS MULTIHEAD_ARM_ISAS
#else
#define MULTIHEAD_BUILT_ISAS(X)
#endif

namespace multihead::kernels {
namespace {

// Linux gives the tile registers to those who ask.
[[maybe_unused]] bool tiles_are_allowed() {
#if defined(MULTIHEAD_X86) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool allowed =
      syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
#else
  return false;
#endif
}

// Intel's CPUs run VDPBF16PS at a quarter of the rate of a multiply-add
// (measured on Granite Rapids), so that widening is twice as fast there.
bool is_slow([[maybe_unused]] Isa isa) {
#ifdef MULTIHEAD_X86
  return isa == Isa::kAvx512Bf16 && __builtin_cpu_is("intel");
#else
  return false;
#endif
}

Isa best_isa() {
  Isa best = Isa::kPortable;
  for (const IsaInfo& info : kIsas) {
    if (cpu_has(info.isa) && !is_slow(info.isa)) best = info.isa;
  }
  return best;
}

struct Choice {
  Isa isa = Isa::kPortable;
  std::string error = {};
};

Choice choose() {
  const char* wanted = getenv("MULTIHEAD_ISA");
  if (!wanted || !*wanted) return {best_isa()};
  std::string names;
  for (const IsaInfo& info : kIsas) {
    if (strcmp(wanted, info.name) == 0) {
      if (cpu_has(info.isa)) return {info.isa};
      return {info.isa,
              "MULTIHEAD_ISA names an instruction set that this CPU lacks"};
    }
    const bool last = info.isa == std::end(kIsas)[-1].isa;
    names += (names.empty() ? ""
              : last        ? " or "
                            : ", ") +
             std::string(info.name);
  }
  return {Isa::kPortable, "MULTIHEAD_ISA must be " + names};
}

}  // namespace

bool cpu_has(Isa isa) {
  switch (isa) {
#define MULTIHEAD_CPU_HAS(constant, target, bits, others, needs) \
  case Isa::constant:                                            \
    return needs;
    MULTIHEAD_BUILT_ISAS(MULTIHEAD_CPU_HAS)
    default:
      return isa == Isa::kPortable;
  }
}

Kernels kernels_for(Isa isa, Dtype dtype) {
#ifdef MULTIHEAD_X86
  // Compiled a second time for CPUs with FMA, so that its bits agree too.
  if (isa == Isa::kPortable && CPU("avx") && CPU("fma")) {
    return kernels_portable_fma(dtype);
  }
#endif
  switch (isa) {
#define MULTIHEAD_KERNELS(constant, target, bits, others, needs) \
  case Isa::constant:                                            \
    return dtype == Dtype::kBFloat16 ? kernels_##target(dtype)   \
                                     : kernels_##others(dtype);
    // NOLINTNEXTLINE(bugprone-branch-clone): some have one set for all dtypes
    MULTIHEAD_BUILT_ISAS(MULTIHEAD_KERNELS)
    default:
      return kernels_portable(dtype);
  }
}

Isa chosen_isa(const char** error) {
  static const Choice choice = choose();
  *error = choice.error.empty() ? nullptr : choice.error.c_str();
  return choice.isa;
}

}  // namespace multihead::kernels
