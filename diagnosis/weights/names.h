// SPDX-License-Identifier: MIT
//
// What the name of a parameter says.
#pragma once

#include <string>

namespace multihead::diagnosis {

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

/// Reads "layers.0.attn.q_proj.weight", "W_q", "query/kernel:0",
/// "in_proj_bias".
ParsedName parse_name(const std::string& name);

/// The name with "*" for every number: one for all heads of a list.
std::string list_name(const std::string& name);

/// Whether that list is one of layers, by its name.
bool is_list_of_layers(const std::string& list_name);

/// Sorts "head.10" behind "head.9".
bool comes_before(const std::string& a, const std::string& b);

}  // namespace multihead::diagnosis
