// SPDX-License-Identifier: MIT
//
// From features to heads and back, in every way in which it is done wrong.
// Throws Impossible where shapes do not allow it.
#pragma once

#include <ATen/core/Tensor.h>

#include "diagnosis/dump/run.h"
#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

/// (B, L, heads·D) → (B, heads, L, D).
at::Tensor split_heads(const at::Tensor& x, int64_t heads, Split split);

/// (B, G, L, D) → (B, H, L, D): the key/value head of each query head.
at::Tensor expand_groups(const at::Tensor& x, const Sizes& sizes,
                         Groups groups);

/// (B, H, Lq, D) → (B, Lq, H·D).
at::Tensor merge_heads(const at::Tensor& context, const Recipe& recipe);

}  // namespace multihead::diagnosis
