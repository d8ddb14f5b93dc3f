// SPDX-License-Identifier: MIT
//
// From the inputs to queries, keys and values: whose matrix projects what.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/fault.h"

namespace multihead::diagnosis {

/// Order: query, key, value, output.
struct ProjectionChoices {
  std::array<bool, 4> transposed = {};
  std::array<bool, 4> without_bias = {};
  std::array<int, 3> matrices = {0, 1, 2};  ///< whose matrix projects each
  std::array<int, 3> inputs = {0, 1, 2};    ///< which input is projected
  std::array<bool, 3> unprojected = {};
  bool batch_exchanged = false;  ///< attends over the batch

  // What the code under test may choose, and nobody said.
  bool weights_in_out = false;
  bool fused_head_by_head = false;

  bool operator==(const ProjectionChoices&) const = default;
};

/// (out, in) of the matrix of this index, and its bias, as the recipe has them.
AlignedWeights::Matrix matrix_by(const ObservedCall& call, const Recipe& recipe,
                                 int index);

/// input (…, in) → (…, out) by the matrix of this index; as it is without one.
at::Tensor project(const ObservedCall& call, const Recipe& recipe,
                   const at::Tensor& input, int index);

/// Queries, keys and values: (B, L, heads·D), without weights heads.
std::array<at::Tensor, 3> project_inputs(const ObservedCall& call,
                                         const Recipe& recipe);

extern const std::vector<Fault> kProjectionFaults;

}  // namespace multihead::diagnosis
