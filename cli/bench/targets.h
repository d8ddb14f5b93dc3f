// SPDX-License-Identifier: MIT
//
// What cases shall reach against PyTorch and the peak: a table for each family
// of processors, in targets.cpp. What compares ours with itself is the same
// everywhere and stands beside the case, in case.cpp.
#pragma once

#include <string>

#include "cli/bench/case.h"

namespace cli {

/// "amx", "avx512", "avx512-amd", "avx2", "other"
std::string name(Family family);

/// The family whose targets are meant where kernels of `isa` run
/// (multihead::kernel_isa) on a processor that Environment::cpu_id names.
Family family_of(const std::string& isa, const std::string& cpu_id);

/// Adds what the family demands of the case, by its name, to its target.
void add_targets(Family family, BenchCase& test);

}  // namespace cli
