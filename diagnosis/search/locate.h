// SPDX-License-Identifier: MIT
//
// Where calls leave attention: the first stage that is not among what they
// computed, and the first number that differs.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/catalogue.h"
#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

/// A tensor of attention that the trace of a call shows.
struct Shown {
  Stage stage;
  at::Tensor Stages::* tensor;
  at::Tensor right;
  double allowed;

  bool differs_in(const Stages& others) const;
};
std::vector<Shown> shown_in_trace(const ObservedCall& call,
                                  const Stages& reference,
                                  at::ScalarType precision);

/// Whether some tensor of the trace holds the numbers of `wanted`, in any order
/// of dimensions.
bool in_trace(const ObservedCall& call, const at::Tensor& wanted,
              double allowed);

struct Difference {
  std::optional<Stage> stage;
  std::optional<Place> place;
};

/// The first of each that a call shows, outputs before what is returned beside
/// them. attention: conventions only; calls that tell most come first.
Difference locate(std::span<const ObservedCall> calls, const Recipe& attention);

}  // namespace multihead::diagnosis
