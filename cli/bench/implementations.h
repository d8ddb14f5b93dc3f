// SPDX-License-Identifier: MIT
//
// Implementation computes attention, and whole layers, and how. What a user
// would make once, a mask tensor or a module, is made together with the form.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "cli/bench/case.h"

namespace cli {

/// What one call returns, in the order of its reference; more is not judged.
using Outputs = std::vector<at::Tensor>;

using AttentionForm = std::function<at::Tensor(const AttentionInputs&)>;
using LayerForm = std::function<Outputs(const LayerInputs&)>;

/// Ours first, then PyTorch's function, then attention by hand if asked for.
/// Inputs may be others later, of the same sizes and rules; dropout_p is
/// theirs.
std::vector<std::pair<Implementation, AttentionForm>> attention_forms(
    const AttentionInputs& inputs, bool by_hand);

/// Each returns (output, weights); weights only if they are needed, and where a
/// form always has them. Forms hold the parameters of these inputs.
std::vector<std::pair<Implementation, LayerForm>> layer_forms(
    const LayerInputs& inputs);

/// Throws unless multihead::Backend::kAuto takes the kernels for that call.
void expect_fused(const AttentionInputs& inputs);
void expect_fused(const LayerInputs& inputs);

}  // namespace cli
