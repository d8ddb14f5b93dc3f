// SPDX-License-Identifier: MIT
//
// Faults of the scores: their scale, and the masks on them.
#include <limits>

#include "multihead/diagnosis/faults_by_stage.h"

namespace multihead::diagnosis {
namespace {

Way sentinel_way(void (*apply)(Recipe&), std::string_view detail) {
  return {apply, detail};
}

// Ways for the general mask and for the padding mask.
std::vector<Way> either(void (*mask)(Recipe&), void (*padding)(Recipe&)) {
  return {{mask}, {padding, "It is the padding mask."}};
}

}  // namespace

std::vector<Fault> faults_of_scores() {
  constexpr Stage stage = Stage::kScores;
  constexpr std::string_view remedy =
      "Divide q·k by the square root of the head width, sqrt(d) = sqrt({D}): a "
      "sum of d products of unit variance has the standard deviation sqrt(d), "
      "and the division brings it back to 1.";
  return {
      {"scale_missing",
       stage,
       "The scores are not scaled.",
       remedy,
       {{[](Recipe& r) { r.scale = Scale::kNone; }}}},
      {"scale_by_embed_dim",
       stage,
       "The scores are divided by sqrt(d_model) = sqrt({E}).",
       remedy,
       {{[](Recipe& r) { r.scale = Scale::kRootOfEmbedding; }}}},
      {"scale_by_embed_dim_not_root",
       stage,
       "The scores are divided by d_model = {E}.",
       remedy,
       {{[](Recipe& r) { r.scale = Scale::kEmbedding; }}}},
      {"scale_not_root",
       stage,
       "The scores are divided by the head width {D}, not by its square root.",
       remedy,
       {{[](Recipe& r) { r.scale = Scale::kWidth; }}}},
      {"scale_applied_twice",
       stage,
       "The scores are scaled twice: by 1/sqrt({D}), and again.",
       "Scale once: the query before the product, or the scores after it. "
       "F.scaled_dot_product_attention scales by itself.",
       {{[](Recipe& r) { r.scale = Scale::kTwice; }}}},
      {"scale_by_length",
       stage,
       "The scores are divided by the square root of a length, not of the head "
       "width.",
       remedy,
       {{[](Recipe& r) { r.scale = Scale::kRootOfKeys; },
         "It is sqrt(Lk) = sqrt({Lk})."},
        {[](Recipe& r) { r.scale = Scale::kRootOfQueries; },
         "It is sqrt(Lq) = sqrt({Lq})."},
        {[](Recipe& r) { r.scale = Scale::kKeys; }, "It is Lk = {Lk}."}}},
      {"scale_by_heads",
       stage,
       "The scores are divided by the square root of the number of heads, "
       "sqrt({H}).",
       remedy,
       {{[](Recipe& r) { r.scale = Scale::kRootOfHeads; }}}},
      {"scale_by_group_count",
       stage,
       "The scores are divided by the square root of the number of groups, "
       "sqrt({G}).",
       remedy,
       {{[](Recipe& r) { r.scale = Scale::kRootOfGroups; }}}},
      {"scale_multiplied",
       stage,
       "The scores are multiplied by sqrt({D}), not divided.",
       remedy,
       {{[](Recipe& r) { r.scale = Scale::kMultiplied; }}}},
      {"scale_after_softmax",
       stage,
       "The weights are divided by sqrt({D}) after the softmax; the scores are "
       "not.",
       remedy,
       {{[](Recipe& r) { r.scale = Scale::kAfterSoftmax; }}}},
  };
}

std::vector<Fault> faults_of_masks() {
  constexpr Stage stage = Stage::kMaskedScores;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  static_assert(infinity > 0);
  constexpr std::string_view fill_remedy =
      "Set the blocked scores to -inf before the softmax: "
      "scores.masked_fill(blocked, float(\"-inf\")).";
  constexpr std::string_view polarity_remedy =
      "Polarity differs by interface: nn.MultiheadAttention takes True = "
      "blocked, F.scaled_dot_product_attention True = may attend. Fill where a "
      "key is blocked.";
  constexpr std::string_view axis_remedy =
      "Give the mask its dimensions by hand before it meets the scores "
      "(B, H, Lq, Lk): padding (B, Lk) as mask[:, None, None, :], a mask per "
      "item (B, Lq, Lk) as mask[:, None].";
  constexpr std::string_view causal_remedy =
      "Query i sees the keys j <= i: block "
      "torch.ones(Lq, Lk, dtype=torch.bool).triu(1).";
  return {
      {"mask_ignored",
       stage,
       "The mask is ignored.",
       "Use it: "
       "block its scores before the softmax.",
       {{[](Recipe& r) { r.mask = MaskUse::kIgnored; }}}},
      {"mask_inverted",
       stage,
       "The mask is inverted: what it blocks is seen, what it lets through is "
       "blocked.",
       polarity_remedy,
       {{[](Recipe& r) { r.mask = MaskUse::kInverted; }}}},
      {"mask_added",
       stage,
       "The mask is added to the scores as 0 and 1: that shifts them a little "
       "and blocks nothing.",
       fill_remedy,
       {{[](Recipe& r) { r.mask = MaskUse::kAdded; }},
        {[](Recipe& r) { r.mask = MaskUse::kKeepAdded; },
         "1 is added where a key may be seen."},
        {[](Recipe& r) { r.padding = MaskUse::kAdded; },
         "It is the padding mask."}}},
      {"mask_multiplied",
       stage,
       "The scores are multiplied by the mask before the softmax: a blocked "
       "score becomes 0, and exp(0) = 1 is no small weight.",
       fill_remedy,
       {{[](Recipe& r) { r.mask = MaskUse::kMultiplied; }},
        {[](Recipe& r) { r.mask = MaskUse::kGivenMultiplied; },
         "The mask as it was given."},
        {[](Recipe& r) { r.padding = MaskUse::kMultiplied; },
         "It is the padding mask."}}},
      {"mask_after_softmax", stage,
       "The mask is applied after the softmax: blocked keys have taken their "
       "share of the sum, and the rows no longer sum to 1.",
       fill_remedy,
       either([](Recipe& r) { r.mask = MaskUse::kAfterSoftmax; },
              [](Recipe& r) { r.padding = MaskUse::kAfterSoftmax; })},
      {"mask_sentinel_leaks",
       stage,
       "Blocked scores get a finite number that is not small enough, so "
       "blocked "
       "keys keep some weight.",
       "Fill with float(\"-inf\"), or torch.finfo(dtype).min where a row may "
       "be "
       "blocked altogether.",
       {sentinel_way([](Recipe& r) { r.sentinel = 0.0; }, "It is 0."),
        sentinel_way([](Recipe& r) { r.sentinel = 1e-9; },
                     "It is 1e-9, which is nearly 0; -1e9 was meant."),
        sentinel_way([](Recipe& r) { r.sentinel = -1e-9; },
                     "It is -1e-9, which is nearly 0; -1e9 was meant."),
        sentinel_way([](Recipe& r) { r.sentinel = 1e9; },
                     "It is +1e9: only blocked keys are seen."),
        sentinel_way([](Recipe& r) { r.sentinel = infinity; },
                     "It is +inf, which makes NaN."),
        sentinel_way([](Recipe& r) { r.sentinel = -1.0; }, "It is -1."),
        sentinel_way([](Recipe& r) { r.sentinel = -2.0; }, "It is -2."),
        sentinel_way([](Recipe& r) { r.sentinel = -5.0; }, "It is -5."),
        sentinel_way([](Recipe& r) { r.sentinel = -10.0; }, "It is -10."),
        sentinel_way([](Recipe& r) { r.sentinel = -20.0; }, "It is -20."),
        sentinel_way([](Recipe& r) { r.sentinel = 1.0; }, "It is 1.")}},
      {"mask_transposed",
       stage,
       "The mask is transposed: its rows are taken for keys.",
       "Rows of the mask are queries, columns are keys: (Lq, Lk).",
       {{[](Recipe& r) { r.mask = MaskUse::kTransposed; }}}},
      {"mask_batch_as_heads",
       stage,
       "A mask (B, Lq, Lk) is broadcast as (H, Lq, Lk): batch item b's mask "
       "goes to head b.",
       axis_remedy,
       {{[](Recipe& r) { r.mask = MaskUse::kBatchAsHeads; }}}},
      {"mask_batch_as_queries",
       stage,
       "A padding mask (B, Lk) is broadcast as (Lq, Lk): batch item b's mask "
       "goes to query b.",
       axis_remedy,
       {{[](Recipe& r) { r.padding = MaskUse::kBatchAsQueries; }}}},
      {"mask_head_order",
       stage,
       "The per-head mask is read in the wrong order: (H·B, Lq, Lk) for "
       "(B·H, Lq, Lk).",
       "Heads are innermost: mask.view(B, H, Lq, Lk); to make it, "
       "mask.repeat_interleave(H, dim=0), not mask.repeat(H, 1, 1).",
       {{[](Recipe& r) { r.mask = MaskUse::kHeadMajor; }}}},
      {"mask_of_first_item",
       stage,
       "The mask of the first batch item is used for all.",
       axis_remedy,
       {{[](Recipe& r) { r.mask = MaskUse::kFirstItem; }},
        {[](Recipe& r) { r.padding = MaskUse::kFirstItem; },
         "It is the padding mask."}}},
      {"mask_of_first_head",
       stage,
       "The mask of the first head is used for all.",
       "A per-head mask is (B, H, Lq, Lk) and meets the scores of its own "
       "head.",
       {{[](Recipe& r) { r.mask = MaskUse::kFirstHead; }}}},
      {"padding_ignored",
       stage,
       "The padding mask is ignored.",
       "Block the padded keys for every query: scores.masked_fill("
       "padding[:, None, None, :], float(\"-inf\")).",
       {{[](Recipe& r) { r.padding = MaskUse::kIgnored; }}}},
      {"padding_inverted",
       stage,
       "The padding mask is inverted: only padding is seen.",
       polarity_remedy,
       {{[](Recipe& r) { r.padding = MaskUse::kInverted; }}}},
      {"padding_on_queries",
       stage,
       "The padding mask is applied to the queries, not to the keys.",
       axis_remedy,
       {{[](Recipe& r) { r.padding = MaskUse::kOnQueries; }},
        {[](Recipe& r) { r.mask = MaskUse::kOnQueries; }}}},
      {"causal_ignored",
       stage,
       "Causal attention was asked for and ignored.",
       causal_remedy,
       {{[](Recipe& r) { r.causal = Causal::kIgnored; }}}},
      {"causal_inverted",
       stage,
       "The causal mask is inverted: queries see the future, not the past.",
       causal_remedy,
       {{[](Recipe& r) { r.causal = Causal::kOnlyFuture; }},
        {[](Recipe& r) { r.causal = Causal::kPresentAndFuture; },
         "They see themselves, too."}}},
      {"causal_bottom_right",
       stage,
       "The causal mask is aligned at the bottom right: query i sees keys up "
       "to "
       "i + Lk - Lq.",
       "PyTorch's is_causal aligns at the top left: query i sees keys up to i. "
       "Bottom right is for caches, where the last query is the newest key.",
       {{[](Recipe& r) { r.causal = Causal::kBottomRight; }}}},
      {"causal_misses_diagonal",
       stage,
       "The causal mask blocks the diagonal: no query sees itself, and the "
       "first sees nothing.",
       "Block above the diagonal only: triu(diagonal=1).",
       {{[](Recipe& r) { r.causal = Causal::kMissesDiagonal; }}}},
      {"causal_one_too_far",
       stage,
       "The causal mask is one too far: each query sees the next key.",
       "Block from the diagonal above on: triu(diagonal=1), not 2; "
       "tril(diagonal=0), not 1.",
       {{[](Recipe& r) { r.causal = Causal::kOneTooFar; }}}},
  };
}

}  // namespace multihead::diagnosis
