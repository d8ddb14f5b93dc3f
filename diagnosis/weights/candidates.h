// SPDX-License-Identifier: MIT
//
// Parameters that may be weights of attention, each with what its name says or
// its place.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "diagnosis/weights/alignment.h"
#include "diagnosis/weights/layout.h"
#include "diagnosis/weights/names.h"

namespace multihead::diagnosis {

/// A parameter, or those of all heads, stacked.
struct Candidate {
  std::vector<std::string> names;
  at::Tensor tensor;
  ParsedName parsed;
  Orientation declared = Orientation::kUnknown;
  bool is_bias = false, by_place = false;

  std::string name() const;
  bool is_matrix() const { return !is_bias && tensor.dim() >= 2; }
};

using Candidates = std::vector<Candidate>;

/// What may be parameters, in the order of their names; numbers count as such.
Candidates candidates_of(
    const std::map<std::string, at::Tensor>& weights,
    const std::map<std::string, Orientation>& orientations);

/// Gives roles to matrices whose names say nothing but their order, which is
/// that in which people write them, and to their biases. Only if no other
/// matrix fits as well.
void assign_roles_by_place(Candidates& candidates, const LayerSizes& sizes);

/// Leaves those whose names only attention bears, if there are any.
void prefer_strong_names(Candidates& candidates);

/// Lists with a member for each of the heads become one candidate each.
Candidates stack_heads(const Candidates& candidates, int64_t heads);

/// How many heads, of all parts, a matrix of this role has.
int64_t heads_of(Role role, const LayerSizes& sizes);

/// "q_proj.weight (12, 10) and query.weight (12, 12)", with " and ".
std::string list_text(const Candidates& candidates, const char* glue);

}  // namespace multihead::diagnosis
