// SPDX-License-Identifier: MIT
//
// Dropout with the draws that a call made. Throws Impossible where it made none
// of that shape.
#pragma once

#include <ATen/core/Tensor.h>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/fault.h"

namespace multihead::diagnosis {

enum class Dropout {
  kOnWeights,
  kMissing,
  kLeftOn,
  kExchanged,  ///< on in evaluation, off in training
  kLeftOnOutput,
  kBeforeMask,
  kBeforeSoftmax,
  kNotRescaled,
  kOnContext,
  kOnMerged,
  kOnOutput,
  kOnOutputToo,
  kKeepsTheDropped
};

/// What is dropped, and when.
struct DropoutChoices {
  Dropout dropout = Dropout::kOnWeights;

  bool operator==(const DropoutChoices&) const = default;
};

/// Whether this call drops anything at all.
bool drops(const ObservedCall& call, const Recipe& recipe);

/// Scores (B, H, Lq, Lk), where the recipe drops them `where`.
at::Tensor drop_scores(const ObservedCall& call, const Recipe& recipe,
                       const at::Tensor& scores, Dropout where);

/// Weights (B, H, Lq, Lk), as they meet the values.
at::Tensor drop_weights(const ObservedCall& call, const Recipe& recipe,
                        const at::Tensor& weights);

/// What comes after the weights, where the recipe drops it `where`.
at::Tensor drop_later(const ObservedCall& call, const Recipe& recipe,
                      const at::Tensor& x, Dropout where);

extern const std::vector<Fault> kDropoutFaults;

}  // namespace multihead::diagnosis
