// SPDX-License-Identifier: MIT
//
// What the scores q·k are multiplied by.
#pragma once

#include <ATen/core/Tensor.h>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/fault.h"

namespace multihead::diagnosis {

enum class Scale {
  kRootOfWidth,
  kNone,
  kRootOfEmbedding,
  kRootOfAllHeads,  ///< H · D, where that is not E
  kEmbedding,
  kWidth,
  kTwice,
  kRootOfKeys,
  kKeys,
  kRootOfQueries,
  kRootOfHeads,
  kRootOfGroups,
  kRootOfGroupWidth,  ///< E / G
  kRootOfOneHead,     ///< of the head width, where heads are not split
  kRootOfValueWidth,  ///< where heads of values have their own
  kFourthRoot,
  kWidthSquared,
  kMultiplied,
  kAfterSoftmax,
  kOther  ///< the number that a trace shows
};

/// A number, or where it is applied.
struct ScaleChoices {
  Scale scale = Scale::kRootOfWidth;

  bool operator==(const ScaleChoices&) const = default;
};

/// query, key: heads (B, H, Lq, D), (B, H, Lk, D). Throws Impossible.
double scale_of(const ObservedCall& call, const Recipe& recipe,
                const at::Tensor& query, const at::Tensor& key);

extern const std::vector<Fault> kScaleFaults;

}  // namespace multihead::diagnosis
