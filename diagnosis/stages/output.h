// SPDX-License-Identifier: MIT
//
// The output projection, and what is returned: out, weights, gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/fault.h"

namespace multihead::diagnosis {

struct Stages;

enum class Output { kLinear, kNone, kPerHead, kTwice };

enum class Returned {
  kWeights,
  kSum,
  kFirstHead,
  kLastHead,
  kScores,
  kUnmasked
};

/// What no gradient passes through.
enum class Detached { kNothing, kQuery, kKey, kValue, kWeights, kOutput };

/// What is done to the merged heads, and what comes out beside them.
struct OutputChoices {
  Output output = Output::kLinear;
  bool input_added = false;
  Returned returned = Returned::kWeights;
  Detached detached = Detached::kNothing;

  bool operator==(const OutputChoices&) const = default;
};

/// x, cut off from its gradient where the recipe detaches `what`.
at::Tensor detached(const at::Tensor& x, const Recipe& recipe, Detached what);

/// stages: all but `out`, which is returned.
at::Tensor finish(const ObservedCall& call, const Recipe& recipe,
                  const Stages& stages);

/// Scores that a mask has blocked are −inf, or anything very small: all −inf.
at::Tensor with_infinity(const at::Tensor& scores, const Stages& stages);

/// Weights (B, H, Lq, Lk) in the shape of `like`: as they are, or their mean or
/// sum over the heads; undefined: they do not have that shape.
at::Tensor in_shape_of(const at::Tensor& weights, const at::Tensor& like,
                       bool sum = false);

/// The weights that code with this recipe returns, in the shape of
/// call.returned; undefined: they do not have that shape.
at::Tensor returned_weights(const ObservedCall& call, const Recipe& recipe,
                            const Stages& stages);

extern const std::vector<Fault> kOutputFaults;

}  // namespace multihead::diagnosis
