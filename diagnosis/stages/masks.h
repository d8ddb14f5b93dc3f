// SPDX-License-Identifier: MIT
//
// What masks do to the scores: every mask of a call, used as the recipe says.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/fault.h"

namespace multihead::diagnosis {

enum class MaskUse {
  kBlocks,
  kIgnored,
  kInverted,
  kAdded,       ///< the numbers that were given, to the scores
  kKeepAdded,   ///< 1 where a key may be seen
  kMultiplied,  ///< scores · keep
  kGivenMultiplied,
  kAfterSoftmax,  ///< weights · keep, no new sum
  kTransposed,
  kBatchAsHeads,       ///< (B, Lq, Lk) broadcast as (H, Lq, Lk)
  kBatchAsQueries,     ///< (B, Lk) broadcast as (Lq, Lk)
  kHeadMajor,          ///< (B·H, …) read as (H·B, …)
  kTiledOverHeads,     ///< (B, …) repeated as a whole to (B·H, …)
  kRepeatedOverItems,  ///< (B, …) repeated one by one to (H·B, …)
  kFirstItem,
  kFirstHead,
  kOnQueries  ///< a padding mask over the rows
};

enum class Causal {
  kTopLeft,
  kIgnored,
  kOnlyFuture,
  kPresentAndFuture,
  kBottomRight,
  kMissesDiagonal,
  kOneTooFar,
  kAfterSoftmax
};

/// The weights of a query whose keys are all blocked. Example: the scores of
/// its three keys are 1, 2 and 0.
enum class FullyMasked {
  kZero,     ///< 0, 0, 0
  kNaN,      ///< softmax of −inf, −inf, −inf: NaN
  kUniform,  ///< each score replaced by −1e9: 1/3, 1/3, 1/3
  kAsSeen    ///< −1e9 added to each score: softmax(1, 2, 0), as if unmasked
};

/// `mask` is of scores, `padding` of keys.
struct MaskChoices {
  MaskUse mask = MaskUse::kBlocks;
  MaskUse padding = MaskUse::kBlocks;
  Causal causal = Causal::kTopLeft;
  double sentinel = -std::numeric_limits<double>::infinity();
  bool sentinel_added = false;  ///< to the score, not in its place

  // What the code under test may choose, and nobody said.
  bool mask_keeps = false;
  bool padding_keeps = false;
  bool causal_by_itself = false;
  FullyMasked fully_masked = FullyMasked::kZero;  ///< errors() tries all

  bool operator==(const MaskChoices&) const = default;
};

struct Masked {
  at::Tensor scores = {};  ///< (B, H, Lq, Lk)
  at::Tensor fully_masked =
      {};               ///< bool (B, H, Lq): no key left; undefined: none
  bool blocks = false;  ///< some score is blocked
  at::Tensor keep_after = {};  ///< 0 or 1, for the weights; undefined: nothing
};

/// scores (B, H, Lq, Lk). nullopt: these shapes do not allow it.
std::optional<Masked> mask_scores(const ObservedCall& call,
                                  const Recipe& recipe,
                                  const at::Tensor& scores);

extern const std::vector<Fault> kMaskFaults;

}  // namespace multihead::diagnosis
