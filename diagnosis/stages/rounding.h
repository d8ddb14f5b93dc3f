// SPDX-License-Identifier: MIT
//
// Where numbers are rounded to a narrower type on the way.
#pragma once

#include <ATen/core/Tensor.h>

#include "diagnosis/stages/fault.h"

namespace multihead::diagnosis {

enum class Narrow { kNever, kSoftmax, kEverywhere, kOutput };
enum class NarrowType { kFloat, kBFloat16, kHalf };

/// What is narrowed, and to what.
struct RoundingChoices {
  Narrow narrow = Narrow::kNever;
  NarrowType narrow_type = NarrowType::kFloat;

  bool operator==(const RoundingChoices&) const = default;
};

at::ScalarType type_of(NarrowType type);

/// x, rounded where the recipe narrows `where` or everything.
at::Tensor narrowed(const at::Tensor& x, const Recipe& recipe, Narrow where);

/// x, rounded where the recipe narrows everything.
at::Tensor rounded_everywhere(const at::Tensor& x, const Recipe& recipe);

extern const std::vector<Fault> kRoundingFaults;

}  // namespace multihead::diagnosis
