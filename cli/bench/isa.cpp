// SPDX-License-Identifier: MIT
#include "cli/bench/isa.h"

namespace cli {

const IsaFacts& facts_of(const std::string& isa) {
  static constexpr IsaFacts kFacts[] = {
      {"portable",
       128,
       false,
       TargetSet::kNone,
       {"default", "SSE4_2", "SSE41"}},
      {"avx2", 256, false, TargetSet::kAvx2, {"avx2", "AVX2", "AVX2"}},
      {"avx512",
       512,
       false,
       TargetSet::kAvx512,
       {"avx512", "AVX512_E3", "AVX512_CORE_BF16"}},
      {"avx512_bf16",
       512,
       true,
       TargetSet::kAvx512,
       {"avx512", "AVX512_E3", "AVX512_CORE_BF16"}},
      {"amx", 512, false, TargetSet::kAvx512, {}},
  };
  for (const IsaFacts& facts : kFacts)
    if (isa == facts.name) return facts;
  return kFacts[0];
}

}  // namespace cli
