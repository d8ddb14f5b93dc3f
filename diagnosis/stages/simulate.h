// SPDX-License-Identifier: MIT
//
// Attention by recipe: the exact path's steps, each with every way in which
// people get it wrong.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <vector>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

/// What attention computes on its way, float64.
struct Stages {
  std::array<at::Tensor, 3> projected;  ///< (B, L, heads·D)
  std::array<at::Tensor, 3> heads;      ///< (B, H or G, L, D)
  at::Tensor scores;                    ///< (B, H, Lq, Lk), scaled
  at::Tensor masked_scores;
  at::Tensor weights;  ///< before dropout
  at::Tensor dropped;  ///< weights after dropout; the same without any
  at::Tensor context;  ///< (B, H, Lq, D)
  at::Tensor merged;   ///< (B, Lq, H·D)
  at::Tensor out;      ///< as ObservedCall::out
  /// bool (B, H, Lq): queries whose keys are all blocked; undefined: none.
  at::Tensor fully_masked;
  /// What a division by sums near 0 makes of earlier rounding.
  double magnification = 1;
  bool blocks = false;  ///< some score is blocked
  /// Tensors that only code with this very fault would compute.
  std::vector<at::Tensor> distinguishing;
};

/// nullopt: with these shapes the recipe cannot be followed, as where a matrix
/// that is not square should be transposed.
std::optional<Stages> simulate(const ObservedCall& call, const Recipe& recipe);

}  // namespace multihead::diagnosis
