// SPDX-License-Identifier: MIT
//
// The one list of instruction sets. To add one: a line of this list, its vector
// layer in simd/ (chosen in simd/simd.h), its target in CMakeLists.txt.
#pragma once

#include <string_view>

namespace multihead::kernels {

/// The instruction sets for which kernels are built, the best one last:
///   X(constant, target, vector bits, target of the other dtypes, CPU needs)
/// `target` is also the name in MULTIHEAD_ISA. Kernels that multiply bfloat16
/// in pairs leave the other dtypes to another target. The last column is an
/// expression of CPU("feature"), with the compiler's names of features, which
/// is asked on their processor only.
/// Those of another processor have names, but no kernels.
#define MULTIHEAD_ISAS(X)                     \
  X(kPortable, portable, 128, portable, true) \
  MULTIHEAD_ARM_ISAS(X)                       \
  MULTIHEAD_X86_ISAS(X)
#define MULTIHEAD_ARM_ISAS(X) X(kNeon, neon, 128, neon, true)
#define MULTIHEAD_X86_ISAS(X)                                                \
  X(kAvx2, avx2, 256, avx2, CPU("avx2") && CPU("fma") && CPU("f16c"))        \
  X(kAvx512, avx512, 512, avx512,                                            \
    CPU("avx512f") && CPU("avx512bw") && CPU("avx512dq") && CPU("avx512vl")) \
  X(kAvx512Bf16, avx512_bf16, 512, avx512,                                   \
    cpu_has(Isa::kAvx512) && CPU("avx512bf16"))                              \
  X(kAmx, amx, 512, avx512,                                                  \
    cpu_has(Isa::kAvx512Bf16) && CPU("amx-tile") && CPU("amx-bf16") &&       \
        tiles_are_allowed())

#define MULTIHEAD_CONSTANT(constant, ...) constant,
enum class Isa { MULTIHEAD_ISAS(MULTIHEAD_CONSTANT) };
#undef MULTIHEAD_CONSTANT
#define MULTIHEAD_CONSTANT(constant, ...) Isa::constant,
inline constexpr Isa kAllIsas[] = {MULTIHEAD_ISAS(MULTIHEAD_CONSTANT)};
#undef MULTIHEAD_CONSTANT

struct IsaInfo {
  Isa isa;
  const char* name;          ///< as in MULTIHEAD_ISA: "avx512_bf16"
  int vector_bits;           ///< of a register: 16 float32 are 512
  bool multiplies_bfloat16;  ///< in pairs; the others widen it to float32
};

#define MULTIHEAD_INFO(constant, target, bits, others, needs) \
  {Isa::constant, #target, bits, std::string_view(#target) != #others},
inline constexpr IsaInfo kIsas[] = {MULTIHEAD_ISAS(MULTIHEAD_INFO)};
#undef MULTIHEAD_INFO

constexpr const IsaInfo& info_of(Isa isa) {
  return kIsas[static_cast<int>(isa)];
}
constexpr const char* name_of(Isa isa) { return info_of(isa).name; }
bool cpu_has(Isa isa);

/// What MULTIHEAD_ISA asks for, else the best that the CPU has; read once. If
/// MULTIHEAD_ISA names nothing, or what this CPU lacks, `error` says so.
Isa chosen_isa(const char** error);

}  // namespace multihead::kernels
