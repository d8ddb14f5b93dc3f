// SPDX-License-Identifier: MIT
//
// Attention as a list of choices, one for each thing that an implementation
// can get wrong. The defaults are attention; a fault changes one of them, two
// faults change two. run_recipe (variants.h) is the one place that reads them.
#pragma once

#include <array>
#include <cstdint>
#include <limits>

namespace multihead::diagnosis {

enum class Split {
  kByHead,            ///< (B, L, H·D) → (B, L, H, D) → (B, H, L, D)
  kNotTransposed,     ///< read as (B, H, L, D) at once
  kFeatureMajor,      ///< read as (B, L, D, H): head h has features h, h+H, …
  kHeadsAsPositions,  ///< left as (B, L, H, D): heads attend to heads
  kOneHead            ///< (B, 1, L, H·D)
};

enum class Merge { kByHead, kNotTransposed, kFeatureMajor, kMean, kSum };

/// Which key/value head query head h reads.
enum class Groups {
  kRepeated,            ///< h / (H / G): 0 0 1 1
  kTiled,               ///< h mod G: 0 1 0 1
  kFirst,               ///< 0
  kClamped,             ///< min(h, G − 1)
  kCountForSize,        ///< h / G
  kCountForSizeClamped  ///< min(h / G, G − 1)
};

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

/// The weights of a query whose keys are all blocked: kAsSeen are those of its
/// scores, from all of which the same number was taken.
enum class Blind { kZero, kNaN, kUniform, kAsSeen };

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

enum class Output { kLinear, kNone, kPerHead, kTwice };

enum class Returned {
  kWeights,
  kSum,
  kFirstHead,
  kLastHead,
  kScores,
  kUnmasked
};

/// Where numbers are rounded to a narrower type on the way.
enum class Narrow { kNever, kSoftmax, kEverywhere, kOutput };
enum class NarrowType { kFloat, kBFloat16, kHalf };

/// What no gradient passes through.
enum class Detached { kNothing, kQuery, kKey, kValue, kWeights, kOutput };

struct Recipe {
  // Projections. Order: query, key, value, output.
  std::array<bool, 4> transposed = {};
  std::array<bool, 4> without_bias = {};
  std::array<int, 3> matrices = {0, 1, 2};  ///< whose matrix projects each
  std::array<int, 3> inputs = {0, 1, 2};    ///< which input is projected
  std::array<bool, 3> unprojected = {};

  // Heads. roles: which projected tensor is taken for each.
  std::array<Split, 3> split = {};
  Groups groups = Groups::kRepeated;
  std::array<int, 3> roles = {0, 1, 2};
  bool keys_reshaped = false;    ///< (L, D) read as (D, L), not transposed
  bool batch_exchanged = false;  ///< attends over the batch

  // Scores and masks.
  Scale scale = Scale::kRootOfWidth;
  MaskUse mask = MaskUse::kBlocks;
  MaskUse padding = MaskUse::kBlocks;
  Causal causal = Causal::kTopLeft;
  double sentinel = -std::numeric_limits<double>::infinity();
  bool sentinel_added = false;  ///< to the score, not in its place

  // Weights and what follows.
  Normalise normalise = Normalise::kOverKeys;
  Dropout dropout = Dropout::kOnWeights;
  bool weights_averaged = false;
  bool weights_transposed = false;
  Merge merge = Merge::kByHead;
  Output output = Output::kLinear;
  bool input_added = false;
  Returned returned = Returned::kWeights;
  Narrow narrow = Narrow::kNever;
  NarrowType narrow_type = NarrowType::kFloat;
  Detached detached = Detached::kNothing;

  // What the code under test may choose, and nobody said.
  bool mask_keeps = false;
  bool padding_keeps = false;
  bool weights_in_out = false;
  bool fused_head_by_head = false;
  bool causal_by_itself = false;

  Blind blind = Blind::kZero;  ///< errors() tries each

  bool operator==(const Recipe&) const = default;
};

}  // namespace multihead::diagnosis
