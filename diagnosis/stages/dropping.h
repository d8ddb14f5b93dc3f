// SPDX-License-Identifier: MIT
//
// Dropout by recipe, with the draws that a run made. Throws Impossible where it
// made none of that shape.
#pragma once

#include <ATen/core/Tensor.h>

#include "diagnosis/dump/run.h"
#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

/// Whether this run drops anything at all.
bool drops(const Run& run, const Recipe& recipe);

/// Scores (B, H, Lq, Lk), where the recipe drops them `where`.
at::Tensor drop_scores(const Run& run, const Recipe& recipe,
                       const at::Tensor& scores, Dropout where);

/// Weights (B, H, Lq, Lk), as they meet the values.
at::Tensor drop_weights(const Run& run, const Recipe& recipe,
                        const at::Tensor& weights);

/// What comes after the weights, where the recipe drops it `where`.
at::Tensor drop_later(const Run& run, const Recipe& recipe, const at::Tensor& x,
                      Dropout where);

}  // namespace multihead::diagnosis
