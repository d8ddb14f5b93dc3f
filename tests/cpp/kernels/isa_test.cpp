// SPDX-License-Identifier: MIT
//
// Which instruction set runs, and that MULTIHEAD_ISA decides it.
#include <iterator>
#include <set>

#include "tests/cpp/kernels/run.h"

namespace kernel_test {
namespace {

using kernels::Isa;

TEST(Isa, EachHasKernelsOfItsOwn) {
  for (const Dtype dtype : kAllDtypes) {
    std::set<const void*> seen;
    for (const Isa isa : kernels::kAllIsas) {
      const auto& info = kernels::info_of(isa);
      if (info.multiplies_bfloat16 && dtype != Dtype::kBFloat16) continue;
      if (!kernels::cpu_has(isa)) continue;
      const kernels::Kernels of_isa = kernels::kernels_for(isa, dtype);
      const auto add = [&](auto* run) {
        EXPECT_TRUE(seen.insert(reinterpret_cast<const void*>(run)).second)
            << kernels::name_of(isa) << ' ' << name_of(dtype);
      };
      add(of_isa.forward.run);
      add(of_isa.weights.run);
      add(of_isa.summary.run);
    }
  }
}

/// What chosen_isa says in a process with MULTIHEAD_ISA=`wanted`.
void expect_choice(const char* wanted, const char* pattern) {
  // A process of its own for each choice, which is made once.
  EXPECT_EXIT(
      {
        setenv("MULTIHEAD_ISA", wanted, 1);
        const char* error = nullptr;
        const Isa isa = kernels::chosen_isa(&error);
        fprintf(stderr, "%s", error ? error : kernels::name_of(isa));
        _exit(0);
      },
      testing::ExitedWithCode(0), pattern)
      << wanted;
}

TEST(ChosenIsa, IsTheOneAskedFor) {
  for (const Isa isa : kernels::kAllIsas) {
    expect_choice(kernels::name_of(isa),
                  kernels::cpu_has(isa)
                      ? kernels::name_of(isa)
                      : "^MULTIHEAD_ISA names an instruction set that this CPU "
                        "lacks$");
  }
}

TEST(ChosenIsa, IsAnErrorIfThereIsNoSuchName) {
  std::string names;
  for (const Isa isa : kernels::kAllIsas) {
    const bool is_last = isa == std::end(kernels::kAllIsas)[-1];
    names += isa == Isa::kPortable ? "" : is_last ? " or " : ", ";
    names += kernels::name_of(isa);
  }
  for (const char* wanted : {"sse2", "AVX2", "avx2 ", "avx512_bf16x"}) {
    expect_choice(wanted, ("^MULTIHEAD_ISA must be " + names + "$").c_str());
  }
}

TEST(ChosenIsa, IsOneThatTheCpuHasByDefault) {
  std::string any;
  for (const Isa isa : kernels::kAllIsas) {
    if (kernels::cpu_has(isa)) any += std::string("|") + kernels::name_of(isa);
  }
  expect_choice("", ("^(" + any.substr(1) + ")$").c_str());
}

}  // namespace
}  // namespace kernel_test
