// SPDX-License-Identifier: MIT
//
// What the scores q·k are multiplied by.
#pragma once

#include <ATen/core/Tensor.h>

#include "diagnosis/dump/run.h"
#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

/// query, key: heads (B, H, Lq, D), (B, H, Lk, D). Throws Impossible.
double scale_of(const Run& run, const Recipe& recipe, const at::Tensor& query,
                const at::Tensor& key);

}  // namespace multihead::diagnosis
