// SPDX-License-Identifier: MIT
//
// Masks on scores by recipe: every mask of a run, each used as the recipe says.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "diagnosis/dump/run.h"
#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

struct Masked {
  at::Tensor scores = {};  ///< (B, H, Lq, Lk)
  at::Tensor blind = {};   ///< bool (B, H, Lq): no key left; undefined: none
  bool blocks = false;     ///< some score is blocked
  at::Tensor keep_after = {};  ///< 0 or 1, for the weights; undefined: nothing
};

/// scores (B, H, Lq, Lk). nullopt: these shapes do not allow it.
std::optional<Masked> mask_scores(const Run& run, const Recipe& recipe,
                                  const at::Tensor& scores);

}  // namespace multihead::diagnosis
