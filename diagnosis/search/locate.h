// SPDX-License-Identifier: MIT
//
// Where runs leave attention.
#pragma once

#include <optional>
#include <span>

#include "diagnosis/dump/run.h"
#include "diagnosis/stages/catalogue.h"
#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

struct Difference {
  std::optional<Stage> stage;
  std::optional<Place> place;
};

/// The first of each that a run shows, outputs before what is returned beside
/// them. attention: conventions only; runs that tell most come first.
Difference locate(std::span<const Run> runs, const Recipe& attention);

}  // namespace multihead::diagnosis
