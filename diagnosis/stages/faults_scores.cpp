// SPDX-License-Identifier: MIT
//
// Faults of the scores: their scale, and the masks on them.
#include <limits>

#include "diagnosis/stages/faults_by_stage.h"

namespace multihead::diagnosis {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <double sentinel, bool added = false>
void with_sentinel(Recipe& r) {
  r.sentinel = sentinel;
  r.sentinel_added = added;
}

std::vector<Way> sentinel_ways() {
  return {
      {with_sentinel<0.0>, "It is 0."},
      {with_sentinel<1e-9>, "It is 1e-9, which is nearly 0; -1e9 was meant."},
      {with_sentinel<-1e-9>, "It is -1e-9, which is nearly 0; -1e9 was meant."},
      {with_sentinel<1e9>, "It is +1e9: only blocked keys are seen."},
      {with_sentinel<kInfinity>, "It is +inf, which makes NaN."},
      {with_sentinel<-1.0>, "It is -1."},
      {with_sentinel<-2.0>, "It is -2."},
      {with_sentinel<-5.0>, "It is -5."},
      {with_sentinel<-10.0>, "It is -10."},
      {with_sentinel<-20.0>, "It is -20."},
      {with_sentinel<1.0>, "It is 1."},
      {with_sentinel<-1e-9, true>, "-1e-9 is added; -1e9 was meant."},
      {with_sentinel<1e-9, true>, "1e-9 is added; -1e9 was meant."},
      {with_sentinel<1e9, true>, "+1e9 is added: only blocked keys are seen."},
      {with_sentinel<-1.0, true>, "-1 is added."},
      {with_sentinel<-2.0, true>, "-2 is added."},
      {with_sentinel<-5.0, true>, "-5 is added."},
      {with_sentinel<-10.0, true>, "-10 is added."},
      {with_sentinel<-20.0, true>, "-20 is added."},
  };
}

}  // namespace

namespace {

constexpr Stage kScoresStage = Stage::kScores;
constexpr std::string_view kScoresRemedy =
    "Divide q·k by the square root of the head width, sqrt(d) = sqrt({D}): a "
    "sum of d products of unit variance has the standard deviation sqrt(d), "
    "and the division brings it back to 1.";
const std::vector<Fault> kScores = {
    {"scale_missing",
     kScoresStage,
     "The scores are not scaled.",
     kScoresRemedy,
     {{[](Recipe& r) { r.scale = Scale::kNone; }}}},
    {"scale_not_root",
     kScoresStage,
     "The scores are divided by the head width {D}, not by its square root.",
     kScoresRemedy,
     {{[](Recipe& r) { r.scale = Scale::kWidth; }}}},
    {"scale_by_embed_dim",
     kScoresStage,
     "The scores are divided by sqrt(d_model) = sqrt({E}).",
     kScoresRemedy,
     {{[](Recipe& r) { r.scale = Scale::kRootOfEmbedding; }}}},
    {"scale_by_all_heads",
     kScoresStage,
     "The scores are divided by sqrt({H} · {D}), the root of the width of all "
     "heads together.",
     kScoresRemedy,
     {{[](Recipe& r) { r.scale = Scale::kRootOfAllHeads; }}}},
    {"scale_by_value_width",
     kScoresStage,
     "The scores are divided by the square root of the width of the values, "
     "not of that of queries and keys.",
     kScoresRemedy,
     {{[](Recipe& r) { r.scale = Scale::kRootOfValueWidth; }}}},
    {"scale_by_embed_dim_not_root",
     kScoresStage,
     "The scores are divided by d_model = {E}.",
     kScoresRemedy,
     {{[](Recipe& r) { r.scale = Scale::kEmbedding; }}}},
    {"scale_applied_twice",
     kScoresStage,
     "The scores are scaled twice: by 1/sqrt({D}), and again.",
     "Scale once: the query before the product, or the scores after it. "
     "F.scaled_dot_product_attention scales by itself.",
     {{[](Recipe& r) { r.scale = Scale::kTwice; }}}},
    {"scale_by_length",
     kScoresStage,
     "The scores are divided by the square root of a length, not of the head "
     "width.",
     kScoresRemedy,
     {{[](Recipe& r) { r.scale = Scale::kRootOfKeys; },
       "It is sqrt(Lk) = sqrt({Lk})."},
      {[](Recipe& r) { r.scale = Scale::kRootOfQueries; },
       "It is sqrt(Lq) = sqrt({Lq})."},
      {[](Recipe& r) { r.scale = Scale::kKeys; }, "It is Lk = {Lk}."}}},
    {"scale_by_heads",
     kScoresStage,
     "The scores are divided by the square root of the number of heads, "
     "sqrt({H}).",
     kScoresRemedy,
     {{[](Recipe& r) { r.scale = Scale::kRootOfHeads; }}}},
    {"scale_by_group_count",
     kScoresStage,
     "The number of groups enters the scale of the scores.",
     kScoresRemedy,
     {{[](Recipe& r) { r.scale = Scale::kRootOfGroups; },
       "They are divided by sqrt(G) = sqrt({G})."},
      {[](Recipe& r) { r.scale = Scale::kRootOfGroupWidth; },
       "They are divided by sqrt(E / G), not by sqrt(E / H) = sqrt({D})."}}},
    {"scale_wrong_power",
     kScoresStage,
     "The scores are divided by another power of the head width than its "
     "square "
     "root.",
     kScoresRemedy,
     {{[](Recipe& r) { r.scale = Scale::kFourthRoot; },
       "It is the fourth root; on queries and on keys, it would be right."},
      {[](Recipe& r) { r.scale = Scale::kWidthSquared; }, "It is {D}^2."}}},
    {"scale_multiplied",
     kScoresStage,
     "The scores are multiplied by sqrt({D}), not divided.",
     kScoresRemedy,
     {{[](Recipe& r) { r.scale = Scale::kMultiplied; }}}},
    {"scale_after_softmax",
     kScoresStage,
     "The weights are divided by sqrt({D}) after the softmax; the scores are "
     "not.",
     kScoresRemedy,
     {{[](Recipe& r) { r.scale = Scale::kAfterSoftmax; }}}},
    {"scale_of_another_number",
     kScoresStage,
     "The scores are scaled by another number than 1/sqrt({D}): a constant, "
     "perhaps, that fits other sizes.",
     kScoresRemedy,
     {{[](Recipe& r) { r.scale = Scale::kOther; }}}},
};

}  // namespace

std::span<const Fault> faults_of_scores() { return kScores; }

namespace {

constexpr Stage kMasksStage = Stage::kMaskedScores;
constexpr std::string_view kMasksFillRemedy =
    "Set the blocked scores to -inf before the softmax: "
    "scores.masked_fill(blocked, float(\"-inf\")).";
constexpr std::string_view kMasksPolarityRemedy =
    "Polarity differs by interface: nn.MultiheadAttention takes True = "
    "blocked, F.scaled_dot_product_attention True = may attend. Fill where a "
    "key is blocked.";
constexpr std::string_view kMasksAxisRemedy =
    "Give the mask its dimensions by hand before it meets the scores "
    "(B, H, Lq, Lk): padding (B, Lk) as mask[:, None, None, :], a mask per "
    "item (B, Lq, Lk) as mask[:, None].";
constexpr std::string_view kMasksCausalRemedy =
    "Query i sees the keys j <= i: block "
    "torch.ones(Lq, Lk, dtype=torch.bool).triu(1).";
const std::vector<Fault> kMasks = {
    {"mask_ignored",
     kMasksStage,
     "The mask is ignored.",
     "Use it: "
     "block its scores before the softmax.",
     {{[](Recipe& r) { r.mask = MaskUse::kIgnored; }}}},
    {"mask_inverted",
     kMasksStage,
     "The mask is inverted: what it blocks is seen, what it lets through is "
     "blocked.",
     kMasksPolarityRemedy,
     {{[](Recipe& r) { r.mask = MaskUse::kInverted; }}}},
    {"mask_added",
     kMasksStage,
     "The mask is added to the scores as 0 and 1: that shifts them a little "
     "and blocks nothing.",
     kMasksFillRemedy,
     {{[](Recipe& r) { r.mask = MaskUse::kAdded; }},
      {[](Recipe& r) { r.mask = MaskUse::kKeepAdded; },
       "1 is added where a key may be seen."},
      {[](Recipe& r) { r.padding = MaskUse::kAdded; },
       "It is the padding mask."}}},
    {"mask_multiplied",
     kMasksStage,
     "Blocked scores become 0 before the softmax, multiplied by the mask or "
     "filled with 0, and exp(0) = 1 is no small weight.",
     kMasksFillRemedy,
     {{[](Recipe& r) { r.mask = MaskUse::kMultiplied; }},
      {[](Recipe& r) { r.mask = MaskUse::kGivenMultiplied; },
       "The mask as it was given."},
      {[](Recipe& r) { r.padding = MaskUse::kMultiplied; },
       "It is the padding mask."}}},
    {"mask_after_softmax",
     kMasksStage,
     "The mask is applied after the softmax: blocked keys have taken their "
     "share of the sum, and the rows no longer sum to 1.",
     kMasksFillRemedy,
     {{[](Recipe& r) { r.mask = MaskUse::kAfterSoftmax; }},
      {[](Recipe& r) { r.padding = MaskUse::kAfterSoftmax; },
       "It is the padding mask."},
      {[](Recipe& r) { r.causal = Causal::kAfterSoftmax; },
       "It is the causal mask."}}},
    {"mask_sentinel_leaks", kMasksStage,
     "Blocked scores get a finite number that is not small enough, so "
     "blocked "
     "keys keep some weight.",
     "Fill with float(\"-inf\"), or torch.finfo(dtype).min where a row may "
     "be "
     "blocked altogether.",
     sentinel_ways()},
    {"mask_transposed",
     kMasksStage,
     "The mask is transposed: its rows are taken for keys.",
     "Rows of the mask are queries, columns are keys: (Lq, Lk).",
     {{[](Recipe& r) { r.mask = MaskUse::kTransposed; }}}},
    {"mask_batch_as_heads",
     kMasksStage,
     "A mask (B, Lq, Lk) is broadcast as (H, Lq, Lk): batch item b's mask "
     "goes to head b.",
     kMasksAxisRemedy,
     {{[](Recipe& r) { r.mask = MaskUse::kBatchAsHeads; }}}},
    {"mask_batch_as_queries",
     kMasksStage,
     "A padding mask (B, Lk) is broadcast as (Lq, Lk): batch item b's mask "
     "goes to query b.",
     kMasksAxisRemedy,
     {{[](Recipe& r) { r.padding = MaskUse::kBatchAsQueries; }}}},
    {"mask_head_order",
     kMasksStage,
     "The mask meets heads in the wrong order: (H·B, Lq, Lk) for "
     "(B·H, Lq, Lk).",
     "Heads are innermost: mask.view(B, H, Lq, Lk); to make it, "
     "mask.repeat_interleave(H, dim=0), not mask.repeat(H, 1, 1).",
     {{[](Recipe& r) { r.mask = MaskUse::kHeadMajor; }},
      {[](Recipe& r) { r.mask = MaskUse::kTiledOverHeads; },
       "(B, Lq, Lk) is repeated as a whole, item after item."},
      {[](Recipe& r) { r.mask = MaskUse::kRepeatedOverItems; },
       "(B, Lq, Lk) is repeated item by item where heads come first."}}},
    {"mask_of_first_item",
     kMasksStage,
     "The mask of the first batch item is used for all.",
     kMasksAxisRemedy,
     {{[](Recipe& r) { r.mask = MaskUse::kFirstItem; }},
      {[](Recipe& r) { r.padding = MaskUse::kFirstItem; },
       "It is the padding mask."}}},
    {"mask_of_first_head",
     kMasksStage,
     "The mask of the first head is used for all.",
     "A per-head mask is (B, H, Lq, Lk) and meets the scores of its own "
     "head.",
     {{[](Recipe& r) { r.mask = MaskUse::kFirstHead; }}}},
    {"padding_ignored",
     kMasksStage,
     "The padding mask is ignored.",
     "Block the padded keys for every query: scores.masked_fill("
     "padding[:, None, None, :], float(\"-inf\")).",
     {{[](Recipe& r) { r.padding = MaskUse::kIgnored; }}}},
    {"padding_inverted",
     kMasksStage,
     "The padding mask is inverted: only padding is seen.",
     kMasksPolarityRemedy,
     {{[](Recipe& r) { r.padding = MaskUse::kInverted; }}}},
    {"padding_on_queries",
     kMasksStage,
     "The padding mask is applied to the queries, not to the keys.",
     kMasksAxisRemedy,
     {{[](Recipe& r) { r.padding = MaskUse::kOnQueries; }},
      {[](Recipe& r) { r.mask = MaskUse::kOnQueries; }}}},
    {"causal_ignored",
     kMasksStage,
     "Causal attention was asked for and ignored.",
     kMasksCausalRemedy,
     {{[](Recipe& r) { r.causal = Causal::kIgnored; }}}},
    {"causal_inverted",
     kMasksStage,
     "The causal mask is inverted: queries see the future, not the past.",
     kMasksCausalRemedy,
     {{[](Recipe& r) { r.causal = Causal::kOnlyFuture; }},
      {[](Recipe& r) { r.causal = Causal::kPresentAndFuture; },
       "They see themselves, too."}}},
    {"causal_bottom_right",
     kMasksStage,
     "The causal mask is aligned at the bottom right: query i sees keys up "
     "to "
     "i + Lk - Lq.",
     "PyTorch's is_causal aligns at the top left: query i sees keys up to i. "
     "Bottom right is for caches, where the last query is the newest key.",
     {{[](Recipe& r) { r.causal = Causal::kBottomRight; }}}},
    {"causal_misses_diagonal",
     kMasksStage,
     "The causal mask blocks the diagonal: no query sees itself, and the "
     "first sees nothing.",
     "Block above the diagonal only: triu(diagonal=1).",
     {{[](Recipe& r) { r.causal = Causal::kMissesDiagonal; }}}},
    {"causal_one_too_far",
     kMasksStage,
     "The causal mask is one too far: each query sees the next key.",
     "Block from the diagonal above on: triu(diagonal=1), not 2; "
     "tril(diagonal=0), not 1.",
     {{[](Recipe& r) { r.causal = Causal::kOneTooFar; }}}},
};

}  // namespace

std::span<const Fault> faults_of_masks() { return kMasks; }

}  // namespace multihead::diagnosis
