// SPDX-License-Identifier: MIT
//
// Parameters that may be weights of attention: what their names, their shapes
// and their places say.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "diagnosis/weights/alignment.h"

namespace multihead::diagnosis {

// ---- Names -----------------------------------------------------------------

/// kFused: query, key and value in one; kKeyValue: the latter two.
enum class Role { kNone, kQuery, kKey, kValue, kOutput, kFused, kKeyValue };

/// "query", "key and value", ...
const char* role_text(Role role);

/// kKernel: a weight, (in, out) by custom. kBuffer: computed, not learned.
enum class Says { kNothing, kWeight, kKernel, kBias, kBuffer };

struct ParsedName {
  Role role = Role::kNone;
  bool is_weak = false;  // a name that other layers bear as well, as "fc"
  Says says = Says::kNothing;
  std::string stem;  // what a weight and its bias have in common
};

// ---- Shapes ----------------------------------------------------------------

/// A projection from width to heads · head_dim, or back.
struct Extents {
  int64_t heads, head_dim, width;
  bool is_output = false;
};

/// What is known of an orientation without the shape. is_certain: the shape
/// must agree; else it only settles what the shape leaves open.
struct Hint {
  Orientation orientation = Orientation::kUnknown;
  bool is_certain = false;
};

struct OrientedMatrix {
  at::Tensor weight;  // (out, in), or as stored
  Orientation orientation;
};

/// weight: (out, in), (in, out), or per head (H, E, D), (H, D, E), (E, H, D).
/// Nothing if it is none of these.
std::optional<OrientedMatrix> orient(const at::Tensor& weight,
                                     const Extents& extents, const Hint& hint);

/// fused: (heads · head_dim, ...), of all parts. Returns these in the order of
/// `parts`, "qkv" mostly, without the queries where queries_per_group is 0.
/// Empty: with these groups there is no such order.
std::vector<at::Tensor> cut(const at::Tensor& fused, int64_t queries_per_group,
                            int64_t groups, FusedOrder order,
                            std::string_view parts);

// ---- Candidates ------------------------------------------------------------

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
