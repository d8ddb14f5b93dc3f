// SPDX-License-Identifier: MIT
//
// What PyTorch itself returns for a call, in the call's own dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

/// out as ObservedCall::out, in the call's dtype, of PyTorch's paths with
/// weights and without. Empty where PyTorch has no such call, as without an
/// output matrix, or draws numbers of its own. `recipe`: conventions only.
std::vector<at::Tensor> pytorch_results(const ObservedCall& call,
                                        const Recipe& recipe);

}  // namespace multihead::diagnosis
