// SPDX-License-Identifier: MIT
//
// Attention as a list of choices, one for each thing that an implementation
// can get wrong. The defaults are attention; a fault changes one of them, two
// faults change two. simulate() follows them. What an implementation may choose
// without being wrong is a convention.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "diagnosis/dump/observed_call.h"

namespace multihead::diagnosis {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

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

/// Thrown by a step of a recipe that these shapes do not allow.
struct Impossible {};

inline void require(bool condition) {
  if (!condition) throw Impossible();
}

// ---- Choices ---------------------------------------------------------------
//
// A choice is an enum or a function. What attention does is the recipe's
// default; the other functions stand beside the faults that set them. Functions
// are told apart by their addresses, which a linker that folds equal code
// (--icf=all) would break.

/// (B, L, heads·D) → (B, heads, L, D).
using Split = at::Tensor (*)(const at::Tensor& x, int64_t heads);
at::Tensor split_by_head(const at::Tensor& x, int64_t heads);

/// Which key/value head query head h reads.
using Groups = int64_t (*)(int64_t h, const Sizes& n);
int64_t repeat_groups(int64_t h, const Sizes& n);

/// (B, H, Lq, D) → (B, Lq, H·D).
using Merge = at::Tensor (*)(const at::Tensor& context);
at::Tensor merge_by_head(const at::Tensor& context);

/// What the scores q·k are multiplied by. Throws Impossible.
struct Scaling {
  const ObservedCall& call;
  const at::Tensor &query, &key;  ///< heads (B, H, Lq, D), (B, H, Lk, D)
  const Sizes& n = call.sizes;
};
using Scale = double (*)(const Scaling&);
double scale_by_width(const Scaling&);
double scale_twice(const Scaling&);
double scale_weights(const Scaling&);  ///< after the softmax, scores not at all
/// Heads are not split, but scores are divided by the root of a head's width.
double scale_by_split_width(const Scaling&);

enum class MaskEffect {
  kBlocks,
  kIgnored,
  kInverted,
  kAdded,       ///< the numbers that were given, to the scores
  kKeepAdded,   ///< 1 where a key may be seen
  kMultiplied,  ///< scores · keep
  kGivenMultiplied,
  kAfterSoftmax  ///< weights · keep, no new sum
};

/// How a mask is laid out, and what it then does to the scores.
struct MaskUse {
  at::Tensor (*layout)(const GivenMask&, const Sizes&) = nullptr;  // as it is
  MaskEffect effect = MaskEffect::kBlocks;

  bool operator==(const MaskUse&) const = default;
};

/// bool (Lq, Lk), true = blocked, undefined = none. distance: j − i of query i
/// and key j; ahead: Lk − Lq.
using Causal = at::Tensor (*)(const at::Tensor& distance, int64_t ahead);
at::Tensor causal_top_left(const at::Tensor& distance, int64_t ahead);

/// The weights of a query whose keys are all blocked. Example: the scores of
/// its three keys are 1, 2 and 0.
enum class FullyMasked {
  kZero,     ///< 0, 0, 0
  kNaN,      ///< softmax of −inf, −inf, −inf: NaN
  kUniform,  ///< each score replaced by −1e9: 1/3, 1/3, 1/3
  kAsSeen    ///< −1e9 added to each score: softmax(1, 2, 0), as if unmasked
};

/// Scores (B, H, Lq, Lk), masked → weights.
using Normalise = at::Tensor (*)(const at::Tensor& scores);
at::Tensor softmax_over_keys(const at::Tensor& scores);
at::Tensor divide_by_sum(const at::Tensor& scores);

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

/// Where numbers are rounded to a narrower type on the way.
enum class Narrow { kNever, kSoftmax, kEverywhere, kOutput };

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

struct Recipe {
  // Projections, in the order query, key, value, output.
  std::array<bool, 4> transposed = {};
  std::array<bool, 4> without_bias = {};
  std::array<int, 3> matrices = {0, 1, 2};  ///< whose matrix projects each
  std::array<int, 3> inputs = {0, 1, 2};    ///< which input is projected
  std::array<bool, 3> unprojected = {};
  bool batch_exchanged = false;  ///< attends over the batch

  // Heads.
  std::array<Split, 3> split = {split_by_head, split_by_head, split_by_head};
  Groups groups = repeat_groups;
  std::array<int, 3> roles = {0, 1, 2};  ///< which projected tensor is each
  bool keys_reshaped = false;  ///< (L, D) read as (D, L), not transposed
  Merge merge = merge_by_head;

  // Scores. `mask` is of scores, `padding` of keys.
  Scale scale = scale_by_width;
  MaskUse mask = {};
  MaskUse padding = {};
  Causal causal = causal_top_left;
  double sentinel = -kInfinity;
  bool sentinel_added = false;  ///< to the score, not in its place

  // Weights.
  Normalise normalise = softmax_over_keys;
  bool weights_averaged = false;
  bool weights_transposed = false;
  Dropout dropout = Dropout::kOnWeights;
  Narrow narrow = Narrow::kNever;
  at::ScalarType narrow_type = at::kFloat;

  // What comes out.
  Output output = Output::kLinear;
  bool input_added = false;
  Returned returned = Returned::kWeights;
  Detached detached = Detached::kNothing;

  // What the code under test may choose, and nobody said.
  bool weights_in_out = false;
  bool fused_head_by_head = false;
  bool mask_keeps = false;
  bool padding_keeps = false;
  bool causal_by_itself = false;
  FullyMasked fully_masked = FullyMasked::kZero;  ///< errors() tries all

  bool operator==(const Recipe&) const = default;
};

// ---- The catalogue ---------------------------------------------------------

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

/// Ordered by stage, the likelier first: where observations cannot tell two
/// faults apart, the earlier one is named.
std::span<const Fault> all_faults();

/// A choice that is as good as the default, where nobody said which one it is.
/// Some decide: what makes it is right only if that is what was meant.
struct Convention {
  std::string_view name;
  std::string_view sentence;  ///< what is assumed
  std::string_view remedy;    ///< how to state it
  bool (*concerns)(const ObservedCall&);
  void (*apply)(Recipe&);
  std::string_view condition = "";  ///< of one that decides: "right if ..."
};
std::span<const Convention> all_conventions();

}  // namespace multihead::diagnosis
