// SPDX-License-Identifier: MIT
//
// From scores to weights, and how the weights meet the values.
#pragma once

#include <ATen/core/Tensor.h>

#include "diagnosis/stages/fault.h"

namespace multihead::diagnosis {

enum class Normalise {
  kOverKeys,
  kOverQueries,
  kOverHeads,
  kOverBatch,
  kOverBatchAndHeads,
  kOverQueriesAndKeys,
  kOverHeadsAndKeys,
  kOverItem,  ///< heads, queries and keys
  kOverAll,
  kNothing,
  kExpOnly,
  kShiftedExpOnly,
  kTwice,
  kLog,
  kSigmoid,
  kSumOnly
};

/// What becomes of scores.
struct SoftmaxChoices {
  Normalise normalise = Normalise::kOverKeys;
  bool weights_averaged = false;
  bool weights_transposed = false;

  bool operator==(const SoftmaxChoices&) const = default;
};

/// scores (B, H, Lq, Lk), masked → weights.
at::Tensor normalise(const at::Tensor& scores, Normalise how);

extern const std::vector<Fault> kSoftmaxFaults;

}  // namespace multihead::diagnosis
