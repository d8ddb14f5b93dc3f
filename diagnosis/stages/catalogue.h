// SPDX-License-Identifier: MIT
//
// The catalogue of faults, and of what an implementation may choose without
// being wrong. Both are changes of the recipe, described in words; to add one
// is to add a few lines.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "diagnosis/dump/run.h"
#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

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
/// the sizes of the run.
struct Way {
  void (*apply)(Recipe&);
  std::string_view detail = "";
};

struct Fault {
  std::string_view name;
  Stage stage;
  std::string_view sentence;  ///< what is wrong
  std::string_view remedy;    ///< what is right, and why
  std::vector<Way> ways;
};

/// Ordered by stage, the likelier first: where observations cannot tell two
/// faults apart, the earlier one is named.
std::span<const Fault> all_faults();

/// A choice that is as good as the default, of which nobody said which it is.
struct Convention {
  std::string_view name;
  std::string_view sentence;  ///< what is assumed
  std::string_view remedy;    ///< how to state it
  bool (*concerns)(const Run&);
  void (*apply)(Recipe&);
};
std::span<const Convention> all_conventions();

}  // namespace multihead::diagnosis
