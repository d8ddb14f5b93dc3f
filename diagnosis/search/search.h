// SPDX-License-Identifier: MIT
//
// The fewest changes of attention that give what came out, in every call.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "diagnosis/dump/observed_call.h"
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
  /// float32 for float64 calls that round to it on the way.
  bool in_float = false;
};

struct SearchResult {
  /// All explanations with the fewest faults, at most two, and among them the
  /// fewest conventions: the likeliest first, one for each set of names. Empty:
  /// nothing in the catalogue gives what came out.
  std::vector<Explanation> explanations = {};
  /// Where there is none: the conventions under which attention comes nearest.
  std::vector<const Convention*> nearest = {};
  bool cut_short = false;  ///< not all candidates were tried
  /// Some fit, but to so small an output that many would.
  bool by_chance = false;
};

/// The faults of an explanation, sorted by name.
std::vector<std::string> names_of(const Explanation& explanation);

/// Whether a call costs many times what the cheapest does. Such calls come
/// last: what smaller ones show is looked for there.
bool is_large(const ObservedCall& call, std::span<const ObservedCall> among);

/// Calls that tell most come first.
SearchResult search(std::span<const ObservedCall> calls);

}  // namespace multihead::diagnosis
