// SPDX-License-Identifier: MIT
//
// What the scores q·k are multiplied by.
#pragma once

#include <ATen/core/Tensor.h>

#include "multihead/diagnosis/recipe.h"
#include "multihead/diagnosis/run.h"

namespace multihead::diagnosis {

/// query, key: heads (B, H, Lq, D), (B, H, Lk, D). Throws Impossible.
double scale_of(const Run& run, const Recipe& recipe, const at::Tensor& query,
                const at::Tensor& key);

}  // namespace multihead::diagnosis
