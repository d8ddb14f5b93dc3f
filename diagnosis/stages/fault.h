// SPDX-License-Identifier: MIT
//
// What a fault is: a change of the recipe, described in words. Each stage's own
// files hold its choices, what they do to the tensors, and its faults.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace multihead::diagnosis {

struct Recipe;

/// The steps of attention, in order.
enum class Stage {
  kProjections,
  kHeads,
  kScores,
  kMaskedScores,
  kWeights,
  kContext,
  kMerge,
  kOutput,
  kReturnedWeights,
  kGradients
};
std::string_view name_of(Stage stage);

/// One way to have a fault. In texts {B} {H} {G} {Lq} {Lk} {D} {E} stand for
/// the sizes of the call.
struct Way {
  void (*apply)(Recipe&);
  std::string_view detail = "";
};

struct Fault {
  std::string_view name;
  std::string_view sentence;  ///< what is wrong
  std::string_view remedy;    ///< what is right, and why
  std::vector<Way> ways;
  std::optional<Stage> stage = {};  ///< in a list of a stage's own: that stage
};

/// Thrown by a step of a recipe that these shapes do not allow.
struct Impossible {};

inline void require(bool condition) {
  if (!condition) throw Impossible();
}

}  // namespace multihead::diagnosis
