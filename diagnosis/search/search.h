// SPDX-License-Identifier: MIT
//
// The fewest changes of attention that give what came out, in every run.
#pragma once

#include <span>
#include <vector>

#include "diagnosis/dump/run.h"
#include "diagnosis/stages/catalogue.h"
#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

struct Pick {
  const Fault* fault;
  const Way* way;
};

struct Explanation {
  std::vector<const Convention*> conventions;
  std::vector<Pick> faults;  ///< none: it is attention
  Recipe recipe;
  /// float32 for float64 runs that round to it on the way.
  bool in_float = false;
};

struct SearchResult {
  /// All explanations with the fewest faults, at most two, and among them the
  /// fewest conventions. Empty: nothing in the catalogue gives what came out.
  std::vector<Explanation> explanations = {};
  /// Where there is none: the conventions under which attention comes nearest.
  std::vector<const Convention*> nearest = {};
  bool cut_short = false;  ///< not all candidates were tried
  /// Some fit, but to so small an output that many would.
  bool by_chance = false;
};

/// Runs that tell most come first.
SearchResult search(std::span<const Run> runs);

}  // namespace multihead::diagnosis
