// SPDX-License-Identifier: MIT
//
// Where a run leaves attention: the first stage that is not among what it
// computed.
#pragma once

#include <optional>
#include <vector>

#include "diagnosis/dump/run.h"
#include "diagnosis/stages/catalogue.h"
#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

/// From stages known by name, else from the trace, else from the weights that
/// were returned; nullopt where none of these is there. `reference`: attention
/// on the same inputs.
std::optional<Stage> first_difference(const Run& run, const Stages& reference,
                                      at::ScalarType precision);

/// A tensor of attention that the trace of a run shows.
struct Shown {
  Stage stage;
  at::Tensor Stages::* tensor;
  at::Tensor right;
  double allowed;

  bool differs_in(const Stages& others) const;
};
std::vector<Shown> shown_in_trace(const Run& run, const Stages& reference,
                                  at::ScalarType precision);

/// Whether some tensor of the trace holds the numbers of `wanted`, in any order
/// of dimensions.
bool in_trace(const Run& run, const at::Tensor& wanted, double allowed);

}  // namespace multihead::diagnosis
