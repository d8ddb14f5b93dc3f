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
at::Tensor split_by_feature(const at::Tensor& x, int64_t heads);  ///< D·H
/// As (B, heads, L, D) at once, which mixes positions with features.
at::Tensor split_as_viewed(const at::Tensor& x, int64_t heads);

/// Which key/value head query head h reads.
using Groups = int64_t (*)(int64_t h, const Sizes& n);
int64_t repeat_groups(int64_t h, const Sizes& n);

/// (B, H, Lq, D) → (B, Lq, H·D).
using Merge = at::Tensor (*)(const at::Tensor& context);
at::Tensor merge_by_head(const at::Tensor& context);
at::Tensor merge_by_feature(const at::Tensor& context);  ///< D·H

/// Heads (B, H, Lq, D), (B, H, D, Lk) → (B, H, Lq, Lk), not scaled.
using Product = at::Tensor (*)(const at::Tensor& query, const at::Tensor& keys);
at::Tensor queries_times_keys(const at::Tensor& query, const at::Tensor& keys);

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
double scale_weights_by_embed_dim(const Scaling&);  ///< likewise, by sqrt(E)
double scale_weights_by_all_heads(const Scaling&);  ///< by sqrt(H·D), if not E
/// Heads are not split, but scores are divided by the root of a head's width.
double scale_by_split_width(const Scaling&);

enum class MaskEffect {
  kBlocks,
  kIgnored,
  kThrownAway,  ///< ignored, though the masked scores are computed
  kGivesWay,    ///< ignored where the call has the other mask, too
  kInverted,
  kAdded,       ///< the numbers that were given, to the scores
  kKeepAdded,   ///< 1 where a key may be seen
  kMultiplied,  ///< scores · keep
  kGivenMultiplied,
  kTakenForCausal,  ///< whatever it holds, no query sees a later key
  kSeenPairs,       ///< of queries and keys, both of which may be seen
  kBlockedPairs,    ///< of queries and keys, neither of which may be seen
  kAfterSoftmax     ///< weights · keep, no new sum
};

/// How a mask is laid out, and what it then does to the scores.
struct MaskUse {
  at::Tensor (*layout)(const GivenMask&, const Sizes&) = nullptr;  // as it is
  MaskEffect effect = MaskEffect::kBlocks;

  bool operator==(const MaskUse&) const = default;
};

/// Whether each mask of a call blocks by itself, as it should; or all have to,
/// by fault or, as of a prefix that all queries see, on purpose.
enum class MasksJoined { kEach, kLoosely, kOpens };

/// bool (Lq, Lk), true = blocked, undefined = none. distance: j − i of query i
/// and key j; ahead: Lk − Lq.
using Causal = at::Tensor (*)(const at::Tensor& distance, int64_t ahead);
at::Tensor causal_top_left(const at::Tensor& distance, int64_t ahead);

/// bool (Lq, Lk), true = blocked, of a call that asks for a window: query i
/// sees the keys from i − left to i + right, no limit where one is negative.
using Window = at::Tensor (*)(const at::Tensor& distance, int64_t left,
                              int64_t right);
at::Tensor window_as_given(const at::Tensor& distance, int64_t left,
                           int64_t right);

/// The weights of a query whose keys are all blocked. Example: the scores of
/// its three keys are 1, 2 and 0.
enum class FullyMasked {
  kZero,   ///< 0, 0, 0
  kNaN,    ///< softmax of −inf, −inf, −inf: NaN
  kFinite  ///< as Sentinels say
};

/// How a number as −1e9 blocks keys, which shows where all keys are blocked.
struct Sentinels {
  enum How {
    kInfinity,  ///< scores become −inf
    kFilled,    ///< scores become the number: 1/3, 1/3, 1/3
    kAdded      ///< the number is added: softmax(1, 2, 0), as if unmasked
  };
  How mask = kFilled;
  How causal = kFilled;
  bool united = false;       ///< both are one mask, which blocks as `mask` says
  bool causal_last = false;  ///< the triangle blocks after the mask
  double number = -1e9;

  bool operator==(const Sentinels&) const = default;
};

/// Scores (B, H, Lq, Lk), masked → weights.
using Normalise = at::Tensor (*)(const at::Tensor& scores);
at::Tensor softmax_over_keys(const at::Tensor& scores);
at::Tensor divide_by_sum(const at::Tensor& scores);

/// The same, by code that goes through the keys in blocks of so many.
using Blockwise = at::Tensor (*)(const at::Tensor& scores, int64_t block);

enum class Dropout {
  kOnWeights,
  kMissing,
  kLeftOn,
  kExchanged,  ///< on in evaluation, off in training
  kLeftOnOutput,
  kLeftOnBoth,
  kBeforeMask,
  kBeforeSoftmax,
  kNotRescaled,
  kOnContext,
  kOnMerged,
  kKeepsTheDropped
};

/// Weights (B, H, Lq, Lk), values (B, H, Lk, D) → what the heads return,
/// (B, H, Lq, D). Throws Impossible.
using Mix = at::Tensor (*)(const at::Tensor& weights, const at::Tensor& value);
at::Tensor weighted_sum(const at::Tensor& weights, const at::Tensor& value);

/// When the weights are averaged over the heads.
enum class Averaged { kNever, kBeforeDropout, kAfterDropout };

/// Where numbers are rounded to a narrower type on the way.
enum class Narrow { kNever, kSoftmax, kEverywhere, kOutput };

enum class Output { kLinear, kNone, kPerHead, kTwice, kDiagonal };

enum class Returned {
  kWeights,
  kSum,
  kFirstHead,
  kLastHead,
  kScores,
  kUnmasked
};

/// What no gradient passes through.
enum class Detached {
  kNothing,
  kQuery,
  kKey,
  kValue,
  kKeyAndValue,
  kWeights,
  kMaskedWeights,  ///< of calls with a mask
  kOutput
};

/// How one tensor (B, L, 3·H·D) of queries, keys and values is read as heads
/// (B, H, L, D) of each.
using FusedView = std::array<at::Tensor, 3> (*)(const at::Tensor& fused,
                                                const Sizes& n);

// ---- Conventions -----------------------------------------------------------

/// What becomes of dropout beside that of the weights.
/// kInstead: of no weights. kMergedToo: not of the output, but of what is
/// projected to it. kWithContext: of no weights, but of what the heads return.
enum class OutputDropout { kNone, kToo, kMergedToo, kInstead, kWithContext };

/// kByHand: (x − mean) / (std + eps) with the std of a sample, as a well-known
/// tutorial has it. k…FromOne: a norm whose gain is 1 + weight.
enum class NormKind {
  kNone,
  kLayer,
  kLayerFromOne,
  kByHand,
  kRms,
  kRmsFromOne,
  kUnit,
  kGroup
};

enum class NormPlace { kInput, kHeads, kContext, kOutput };

/// kWithItself: the query input, and with it keys and values where it is they,
/// as in x = norm(x); context = x if context is None.
enum class NormedInputs { kAll, kQuery, kWithItself };

/// The query input, before or after the input of keys and values: of these,
/// too, as in class attention (Touvron et al. 2021) and the resampler of
/// Flamingo.
enum class QueriesAmongKeys { kNone, kBefore, kAfter };

/// The input, beside what comes out. kAfterNorm: the norm of the output is
/// taken before it is added. kValues: the projected values are added.
/// kThenRelu: the ReLU of the sum comes out, as of AutoInt (Song et al. 2019).
/// kSetBlock: the projected queries Q, to what the heads return, and O = Q +
/// context becomes O + relu(O·W_o), as in the Set Transformer (Lee et al.
/// 2019).
enum class Residual {
  kNone,
  kInput,
  kNormedInput,
  kAfterNorm,
  kValues,
  kThenRelu,
  kSetBlock
};

/// On what an activation follows its projection.
enum class Activated { kNone, kInputs, kInputsAndOutput, kQueryAndKey };
using Activation = at::Tensor (*)(const at::Tensor& x);

/// Rotary positions: pairs of features (i, i + D/2), or (2i, 2i + 1).
/// kPairsOfAll: of all heads, before they are cut. kShown: as the trace has it.
/// kMixed: likewise, each feature of a pair by an angle of its own. kByHead: by
/// the number of the head, as the trace has it.
enum class Rotary {
  kNone,
  kHalves,
  kPairs,
  kPairsOfAll,
  kShown,
  kMixed,
  kByHead
};

/// What a window of size w means: the w keys up to the query's own, the w
/// before it as well, w on both sides of it, those nearer than w on both, or
/// half of them on each. kElsewhere: nothing here, where a cache is what holds
/// w keys, or masks that are given hold the window.
enum class WindowReading {
  kOwnLast,
  kOwnToo,
  kBothSides,
  kNearer,
  kHalves,
  kHalvesOrEarlier,  ///< halves, or where it is causal the last ones
  kElsewhere
};

/// A learned number s by which scores are scaled; kRoot: by 1/sqrt(D), too.
/// kOne: they are not scaled.
enum class LearnedScale {
  kNone,
  kTimes,
  kOver,
  kTimesRoot,
  kOverRoot,
  kExp,
  kOne
};

/// One more score in each row, whose weight goes to no value: a learned number
/// of each head (Xiao et al. 2023), or 0, as of softmax plus one.
enum class Sink { kNone, kLearned, kZero };

/// Whether the weight of a sink is left out, as it should be, or is in the
/// place of the first key's, or of the last one's.
enum class SinkWeight { kLeftOut, kFirst, kLast };

/// What is added to the scores: a straight line of the distance, falling as
/// that of ALiBi (Press et al. 2022) or rising; one of the key's position, also
/// ahead of the query, in favour of late keys or of early ones; or what the
/// trace shows.
enum class PositionBias {
  kNone,
  kFalling,
  kRising,
  kLateKeys,
  kEarlyKeys,
  kShown
};
constexpr bool is_of_distance(PositionBias kind) {
  return kind == PositionBias::kFalling || kind == PositionBias::kRising;
}

/// Which projections are one matrix.
enum class Shared { kNothing, kQueryKey, kKeyValue, kQueryValue, kAll };

/// Which of a call's mixes meets a number of each head, if one does; turned:
/// its matrix is transposed.
struct MixedHeads {
  int which = -1;
  bool turned = false;

  bool operator==(const MixedHeads&) const = default;
};

/// What implementations choose without being wrong.
struct Habits {
  // How what was given is read.
  bool weights_in_out = false;
  bool output_weight_otherwise = false;  ///< W_o is stored the other way
  FusedOrder fused = FusedOrder::kPartByPart;
  bool mask_keeps = false;
  bool padding_keeps = false;
  bool padding_of_pairs = false;  ///< of queries, too: what is padded sees none
  bool causal_by_itself = false;
  bool causal_unless_masked = false;  ///< with no mask but of keys
  MasksJoined joined = MasksJoined::kEach;
  bool heads_before_items = false;  ///< folded weights are (H·B, Lq, Lk)
  WindowReading window_reading = WindowReading::kOwnLast;
  bool own_key_seen = false;     ///< whatever a mask says
  bool own_key_blocked = false;  ///< of queries that are as many as keys
  bool within_blocks = false;    ///< of positions, as many as own_block
  FullyMasked fully_masked = FullyMasked::kZero;  ///< errors() tries all
  Sentinels sentinels;                            ///< of kFinite

  // What stands beside attention in the same module.
  OutputDropout output_dropout = OutputDropout::kNone;
  NormKind input_norm = NormKind::kNone;
  NormedInputs normed_inputs = NormedInputs::kAll;
  QueriesAmongKeys queries_among_keys = QueriesAmongKeys::kNone;
  NormKind head_norm = NormKind::kNone;  ///< of queries and keys
  bool norm_is_wide = false;     ///< that norm, of all heads before the split
  bool norm_after_turn = false;  ///< that norm, where heads are turned
  NormKind context_norm = NormKind::kNone;  ///< of each head
  NormKind merged_norm = NormKind::kNone;   ///< of all heads, side by side
  NormKind output_norm = NormKind::kNone;
  Residual residual = Residual::kNone;
  bool output_gain = false;  ///< a learned factor, or one for each feature
  Activated activated = Activated::kNone;
  Activation activation = nullptr;
  Rotary rotary = Rotary::kNone;
  LearnedScale learned_scale = LearnedScale::kNone;
  bool softcapped = false;  ///< scores c·tanh(s / c), c as the trace has it
  MixedHeads mixed_scores, mixed_weights;
  PositionBias position_bias = PositionBias::kNone;
  Sink sink = Sink::kNone;
  SinkWeight sink_weight = SinkWeight::kLeftOut;
  bool rounded = false;              ///< the output, to some digits
  bool shared_matrices = false;      ///< of all heads; only said
  Shared shared = Shared::kNothing;  ///< of projections; likewise

  bool operator==(const Habits&) const = default;
};

/// Where the number of blocked scores comes from: `sentinel` has it, it is -c
/// of a soft cap c, or the trace shows it.
enum class SentinelFrom { kRecipe, kCap, kTrace };

struct Recipe : Habits {
  // Projections, in the order query, key, value, output.
  std::array<bool, 4> transposed = {};
  std::array<bool, 4> without_bias = {};
  std::array<int, 3> matrices = {0, 1, 2};  ///< whose matrix projects each
  std::array<int, 3> inputs = {0, 1, 2};    ///< which input is projected
  std::array<bool, 3> unprojected = {};
  bool batch_exchanged = false;  ///< attends over the batch

  // Heads.
  std::array<Split, 3> split = {split_by_head, split_by_head, split_by_head};
  FusedView fused_view = nullptr;  ///< instead of `split`
  std::array<Groups, 2> groups = {repeat_groups, repeat_groups};  ///< k and v
  std::array<int, 3> roles = {0, 1, 2};  ///< which projected tensor is each
  bool keys_reshaped = false;  ///< (L, D) read as (D, L), not transposed
  // Where rotary: which of queries, keys and values; by angles that do not
  // belong together.
  std::array<bool, 3> turned = {true, true, false};
  bool turned_apart = false;
  Merge merge = merge_by_head;
  bool exchanges_groups =
      false;  ///< with the heads of each, as they are merged

  // Scores. `mask` is of scores, `padding` of keys.
  Product product = queries_times_keys;
  bool floored = false;  ///< the scaled scores, to whole numbers
  Scale scale = scale_by_width;
  MaskUse mask = {};
  MaskUse padding = {};
  Causal causal = causal_top_left;
  Window window = window_as_given;
  double sentinel = -kInfinity;
  bool sentinel_added = false;    ///< to the score, not in its place
  bool sentinel_of_mask = false;  ///< what is causal is blocked as it should be
  SentinelFrom sentinel_from = SentinelFrom::kRecipe;

  // Weights.
  Normalise normalise = softmax_over_keys;
  Blockwise blockwise = nullptr;  ///< instead of `normalise`
  Averaged averaged = Averaged::kNever;
  bool weights_transposed = false;
  Mix mix = weighted_sum;
  bool returned_transposed = false;  ///< where they are: so are those returned
  Dropout dropout = Dropout::kOnWeights;
  Narrow narrow = Narrow::kNever;
  at::ScalarType narrow_type = at::kFloat;

  // What comes out.
  Output output = Output::kLinear;
  int input_added = -1;  ///< query, key or value, to the output; -1: none
  Returned returned = Returned::kWeights;
  Detached detached = Detached::kNothing;
  std::array<bool, 4> frozen = {};  ///< matrices that no gradient reaches

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

/// Whether heads that met can have it. What divides by the sum of the weights
/// may come after them.
bool is_of_core(const Fault& fault);

/// Ordered by stage, the likelier first: where observations cannot tell two
/// faults apart, the earlier one is named.
std::span<const Fault> all_faults();

/// Whether a convention may be what a call shows. kAlone: tried for code that
/// is right but for conventions. kShown: the call leaves no doubt.
enum class Concern { kNo, kAlone, kMaybe, kShown };

/// The first tensor that a convention changes, where a trace shows it.
enum class Sign {
  kNone,
  kInputs,
  kKeys,
  kProjected,
  kHeads,
  kScores,
  kBias,
  kWeights,
  kContext,
  kSum,
  kNorm
};

/// A choice that is as good as the default, where nobody said which one it is.
/// Some decide: what makes it is right only if that is what was meant.
struct Convention {
  std::string_view name;
  std::string_view sentence;  ///< what is assumed
  std::string_view remedy;    ///< how to state it
  Concern (*concern)(const ObservedCall&);
  void (*apply)(Recipe&);
  Sign sign = Sign::kNone;
  std::string_view condition = "";  ///< of one that decides: "right if ..."

  bool concerns(const ObservedCall& call) const {
    return concern(call) != Concern::kNo;
  }
  /// A part of what the code does, not only of how it is read.
  bool is_structure() const {
    return sign != Sign::kNone && sign != Sign::kProjected;
  }
};
std::span<const Convention> all_conventions();

}  // namespace multihead::diagnosis
