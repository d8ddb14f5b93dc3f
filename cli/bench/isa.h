// SPDX-License-Identifier: MIT
#pragma once

#include <string>

namespace cli {

/// What the targets of the cases were made for.
enum class TargetSet { kNone, kAvx2, kAvx512 };

/// What a benchmark has to know of an instruction set of our kernels.
struct IsaFacts {
  const char* name;     ///< as multihead::kernel_isa says it
  bool bfloat16_pairs;  ///< kernels are made of dot products of pairs
  TargetSet targets;
  /// What holds PyTorch to the same registers: values of ATEN_CPU_CAPABILITY,
  /// MKL_ENABLE_INSTRUCTIONS and ONEDNN_MAX_CPU_ISA; nullptr: nothing has to.
  const char* held[3];
};

/// An instruction set without facts has no targets, and PyTorch is not held.
const IsaFacts& facts_of(const std::string& isa);

/// The width of its registers.
int vector_bits(const std::string& isa);

}  // namespace cli
