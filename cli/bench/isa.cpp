// SPDX-License-Identifier: MIT
#include "cli/bench/isa.h"

#include "multihead/kernels/kernels.h"

namespace cli {

const IsaFacts& facts_of(const std::string& isa) {
  static constexpr IsaFacts kFacts[] = {
      {"portable", false, TargetSet::kNone, {"default", "SSE4_2", "SSE41"}},
      {"avx2", false, TargetSet::kAvx2, {"avx2", "AVX2", "AVX2"}},
      {"avx512",
       false,
       TargetSet::kAvx512,
       {"avx512", "AVX512_E3", "AVX512_CORE_BF16"}},
      {"avx512_bf16",
       true,
       TargetSet::kAvx512,
       {"avx512", "AVX512_E3", "AVX512_CORE_BF16"}},
      {"amx", false, TargetSet::kAvx512, {}},
  };
  static constexpr IsaFacts kUnknown = {"", false, TargetSet::kNone, {}};
  for (const IsaFacts& facts : kFacts)
    if (isa == facts.name) return facts;
  return kUnknown;
}

int vector_bits(const std::string& isa) {
  for (const auto& info : multihead::kernels::kIsas)
    if (isa == info.name) return info.vector_bits;
  return 128;
}

}  // namespace cli
