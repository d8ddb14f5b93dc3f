// SPDX-License-Identifier: MIT
//
// What masks do to the scores, each used as the recipe says.
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

#include <algorithm>
#include <array>
#include <functional>
#include <span>

#include "diagnosis/stages/mask_shapes.h"
#include "diagnosis/stages/simulate.h"
#include "diagnosis/stages/windows.h"

namespace multihead::diagnosis {

using at::Tensor;

namespace {

// What masks do to scores, collected; undefined = nothing.
struct Effect {
  Tensor blocked;    // bool
  Tensor by_causal;  // bool, and by a window
  Tensor added;
  Tensor factor;
  Tensor keep_after;  // bool
  Tensor unused;      // bool, blocked in scores that are thrown away
};

template <typename Join>
void collect(Tensor& all, const Tensor& more, Join join) {
  all = all.defined() ? join(all, more) : more;
}

template <MaskUse Recipe::* mask, auto layout>
void lay_out(Recipe& r) {
  r.*mask = {layout};
}

// ---- What it does to them --------------------------------------------------

// of_keys (B, 1, 1, L): (B, 1, L, L), true for both the query and the key.
Tensor pairs_of(const Tensor& of_keys) {
  require(of_keys.size(2) == 1);
  return of_keys.logical_and(of_keys.transpose(-2, -1));
}

void meet(const GivenMask& given, const MaskUse& use, bool keeps,
          const ObservedCall& call, const Tensor& scores, Effect& all) {
  if (!given.numbers.defined() || use.effect == MaskEffect::kIgnored) return;
  const bool both =
      call.mask.numbers.defined() && call.padding.numbers.defined();
  if (use.effect == MaskEffect::kGivesWay && both) return;
  const Tensor numbers =
      use.layout ? use.layout(given, call.sizes) : given.numbers;
  require(at::is_expandable_to(numbers.sizes(), scores.sizes()));
  const bool additive = given.meaning == MaskMeaning::kAdditive;
  if (given.meaning != MaskMeaning::kUnknown) {
    keeps = given.meaning == MaskMeaning::kKeep;
  }
  const Tensor keep = additive ? numbers.ne(-kInfinity)
                      : keeps  ? numbers.ne(0)
                               : numbers.eq(0);
  switch (use.effect) {
    case MaskEffect::kThrownAway:
      require(!additive);
      return collect(all.unused, keep.logical_not(), std::bit_or<>());
    case MaskEffect::kInverted:
      require(!additive);
      return collect(all.blocked, keep, std::bit_or<>());
    case MaskEffect::kAdded:
      require(!additive);
      return collect(all.added, numbers, std::plus<>());
    case MaskEffect::kKeepAdded:
      return collect(all.added, keep.to(at::kDouble), std::plus<>());
    case MaskEffect::kMultiplied:
      return collect(all.factor, keep.to(at::kDouble), std::multiplies<>());
    case MaskEffect::kTakenForCausal:
      return collect(all.by_causal, distances(call, scores).gt(0),
                     std::bit_or<>());
    case MaskEffect::kSeenPairs:
      return collect(all.blocked, pairs_of(keep), std::bit_or<>());
    case MaskEffect::kBlockedPairs:
      return collect(all.blocked, pairs_of(~keep), std::bit_or<>());
    case MaskEffect::kGivenMultiplied:
      return collect(all.factor, numbers, std::multiplies<>());
    case MaskEffect::kAfterSoftmax:
      return collect(all.keep_after, keep, std::bit_and<>());
    default:
      return additive
                 ? collect(all.added, numbers, std::plus<>())
                 : collect(all.blocked, keep.logical_not(), std::bit_or<>());
  }
}

// Padding (B, 1, 1, Lk) of keys and, where these are as many, of queries.
void meet_pairs(const ObservedCall& call, const Recipe& recipe,
                const Tensor& scores, Effect& all) {
  if (!call.padding.numbers.defined()) return;
  Effect own;
  meet(call.padding, recipe.padding, recipe.padding_keeps, call, scores, own);
  require(own.blocked.defined() && call.sizes.queries == call.sizes.keys);
  collect(all.blocked, ~pairs_of(~own.blocked), std::bit_or<>());
}

// ---- Causal attention ------------------------------------------------------

Tensor causal_after_softmax(const Tensor& distance, int64_t) {
  return distance.gt(0);
}

Tensor causal_ignored(const Tensor&, int64_t) { return {}; }

// That nobody asked for, but what the code makes, or its name, says so.
Tensor causal_without_effect(const Tensor&, int64_t) { return {}; }

Tensor causal_thrown_away(const Tensor& distance, int64_t) {
  return distance.gt(0);
}

// What masked_fill makes of a bool mask is True, which is added as 1.
Tensor causal_added(const Tensor& distance, int64_t) { return distance.gt(0); }

// A mask of ones for what may be seen, which is float and so added.
Tensor causal_keep_added(const Tensor& distance, int64_t) {
  return distance.le(0);
}

// Of queries that are said to be the last of the keys.
Tensor causal_from_the_first(const Tensor& distance, int64_t) {
  return distance.gt(0);
}

template <auto causal>
void causal_as(Recipe& r) {
  r.causal = causal;
}

bool is_asked_for(const ObservedCall& call, const Recipe& recipe) {
  const bool unmasked = !call.mask.numbers.defined();
  const bool by_itself =
      recipe.causal_by_itself || (recipe.causal_unless_masked && unmasked);
  return call.causal == CausalRequest::kYes ||
         call.causal == CausalRequest::kExpected ||
         (call.causal == CausalRequest::kUnknown && by_itself);
}

void meet_causal(const ObservedCall& call, const Recipe& recipe,
                 const Tensor& scores, Effect& all) {
  const bool expected = call.causal == CausalRequest::kExpected;
  require(expected || (recipe.causal != causal_without_effect &&
                       recipe.causal != causal_thrown_away));
  require(!expected || recipe.causal != causal_ignored);
  require(call.queries_are_last || recipe.causal != causal_from_the_first);
  // Where queries are the last ones, the last sees itself among the keys.
  const int64_t ahead = scores.size(3) - scores.size(2);
  const bool is_shifted =
      call.queries_are_last && recipe.causal != causal_from_the_first;
  const Tensor future = is_shifted
                            ? recipe.causal(distances(call, scores) - ahead, 0)
                            : recipe.causal(distances(call, scores), ahead);
  if (recipe.causal == causal_thrown_away) {
    collect(all.unused, future, std::bit_or<>());
  } else if (recipe.causal == causal_added ||
             recipe.causal == causal_keep_added) {
    collect(all.added, future.to(at::kDouble), std::plus<>());
  } else if (recipe.causal == causal_after_softmax) {
    collect(all.keep_after, future.logical_not(), std::bit_and<>());
  } else if (future.defined()) {
    collect(all.by_causal, future, std::bit_or<>());
  }
}

// What one mask shows is seen, whatever another one blocks.
void join_loosely(const ObservedCall& call, const Recipe& recipe,
                  const Tensor& scores, Effect& all) {
  require((recipe.joined == MasksJoined::kOpens) ==
          call.facts.contains("opens_keys"));
  Effect mask, padding, causal;
  meet(call.mask, recipe.mask, recipe.mask_keeps, call, scores, mask);
  meet(call.padding, recipe.padding, recipe.padding_keeps, call, scores,
       padding);
  if (is_asked_for(call, recipe)) meet_causal(call, recipe, scores, causal);
  Tensor blocked;
  int count = 0;
  for (const Tensor& one : {mask.blocked, padding.blocked, causal.by_causal}) {
    if (!one.defined()) continue;
    collect(blocked, one, std::bit_and<>());
    ++count;
  }
  if (count < 2) return;
  all.blocked = blocked;
  all.by_causal = Tensor();
}

// ---- Windows ---------------------------------------------------------------

template <int more_left, int more_right>
Tensor resized(const Tensor& distance, int64_t left, int64_t right) {
  const auto widened = [](int64_t size, int more) {
    return size < 0 ? size : std::max<int64_t>(size + more, 0);
  };
  // A side that has no limit, or none to lose, cannot be another.
  require((more_left == 0 || (left >= 0 && left + more_left >= 0)) &&
          (more_right == 0 || (right >= 0 && right + more_right >= 0)));
  return window_as_given(distance, widened(left, more_left),
                         widened(right, more_right));
}

template <auto window>
void window_as(Recipe& r) {
  r.window = window;
}

// Keys of other blocks of the sequence than the query's own.
void meet_blocks(const ObservedCall& call, const Tensor& scores, Effect& all) {
  if (call.own_block == 0) return;
  const auto blocks = [&](int64_t length) {
    return at::arange(length, at::kLong).floor_divide(call.own_block);
  };
  const Tensor others =
      blocks(scores.size(2)).unsqueeze(-1).ne(blocks(scores.size(3)));
  collect(all.by_causal, others, std::bit_or<>());
}

// All of it, of masks, causal attention and windows.
Effect met(const ObservedCall& call, const Recipe& recipe,
           const Tensor& scores) {
  Effect effect;
  meet(call.mask, recipe.mask, recipe.mask_keeps, call, scores, effect);
  // Keys that are more or fewer have a mask of their own, not of the queries.
  if (recipe.padding_of_pairs && call.sizes.queries == call.sizes.keys) {
    meet_pairs(call, recipe, scores, effect);
  } else {
    meet(call.padding, recipe.padding, recipe.padding_keeps, call, scores,
         effect);
  }
  const bool is_causal = is_asked_for(call, recipe);
  if (is_causal) meet_causal(call, recipe, scores, effect);
  if (call.window && recipe.window_reading != WindowReading::kElsewhere) {
    const auto [left, right] =
        sides_of(*call.window, recipe.window_reading, is_causal);
    // Queries that are the last of the keys stand at their places.
    const int64_t ahead =
        call.queries_are_last ? scores.size(3) - scores.size(2) : 0;
    const Tensor beyond =
        recipe.window(distances(call, scores) - ahead, left, right);
    // One fill blocks both, and what it returns is thrown away.
    const bool is_unused = is_causal && recipe.causal == causal_thrown_away;
    Tensor& all = is_unused ? effect.unused : effect.by_causal;
    if (beyond.defined()) collect(all, beyond, std::bit_or<>());
  }
  if (recipe.own_key_blocked && scores.size(2) == scores.size(3)) {
    collect(effect.by_causal, distances(call, scores).eq(0), std::bit_or<>());
  }
  if (recipe.own_key_seen && effect.blocked.defined() &&
      scores.size(2) == scores.size(3)) {
    effect.blocked = effect.blocked & distances(call, scores).ne(0);
  }
  if (recipe.within_blocks) meet_blocks(call, scores, effect);
  if (recipe.joined != MasksJoined::kEach)
    join_loosely(call, recipe, scores, effect);
  return effect;
}

}  // namespace

Tensor causal_top_left(const Tensor& distance, int64_t) {
  return distance.gt(0);
}

Masked mask_scores(const ObservedCall& call, const Recipe& recipe,
                   const Tensor& scores) {
  const Effect effect = met(call, recipe, scores);
  const Tensor by_causal = effect.by_causal;
  require(!recipe.sentinel_of_mask || by_causal.defined());
  Tensor blocked = effect.blocked;
  if (by_causal.defined()) collect(blocked, by_causal, std::bit_or<>());

  Masked result{.scores = scores, .blocks = blocked.defined()};
  if (effect.factor.defined()) result.scores = result.scores * effect.factor;
  if (effect.added.defined()) result.scores = result.scores + effect.added;
  const bool is_finite = recipe.fully_masked == FullyMasked::kFinite &&
                         recipe.sentinel == -kInfinity;
  if (blocked.defined() && is_finite) {
    result.scores = with_sentinels(call, recipe.sentinels, result.scores,
                                   blocked, effect.blocked, by_causal);
  } else if (blocked.defined()) {
    const double sentinel = sentinel_of(call, recipe);
    // Added to every key of a query it changes nothing.
    require(!recipe.sentinel_added || !blocked.all().item<bool>());
    result.scores = recipe.sentinel_added
                        ? result.scores + blocked.to(at::kDouble) * sentinel
                        : result.scores.masked_fill(blocked, sentinel);
    if (recipe.sentinel_of_mask)
      result.scores = result.scores.masked_fill(by_causal, -kInfinity);
  }
  if (effect.unused.defined()) {
    result.unused = scores.masked_fill(effect.unused, -kInfinity);
  }
  if (effect.keep_after.defined()) {
    result.keep_after = effect.keep_after.to(at::kDouble);
  }
  const bool may_blind = blocked.defined() || effect.added.defined();
  if (may_blind && has_blind_row(result.scores))
    result.fully_masked = result.scores.eq(-kInfinity).all(-1);
  return result;
}

// ---- Faults ----------------------------------------------------------------

namespace {

template <double sentinel, bool added = false, bool of_mask = false>
void with_sentinel(Recipe& r) {
  r.sentinel = sentinel;
  r.sentinel_added = added;
  r.sentinel_of_mask = of_mask;
}

// Beside a causal triangle that is right.
template <double sentinel>
constexpr auto with_sentinel_of_mask = with_sentinel<sentinel, false, true>;

constexpr std::string_view kFillRemedy =
    "Set the blocked scores to -inf before the softmax: "
    "scores.masked_fill(blocked, float(\"-inf\")).";
constexpr std::string_view kThrownAway =
    "The masked scores are computed and thrown away: `masked_fill` returns a "
    "new tensor, `masked_fill_` changes the one that it has.";
constexpr std::string_view kWindowRemedy =
    "With a window of (left, right), query i sees the keys from i - left to i "
    "+ "
    "right, itself among them: block j < i - left and j > i + right.";
constexpr std::string_view kPolarityRemedy =
    "Polarity differs by interface: nn.MultiheadAttention takes True = "
    "blocked, F.scaled_dot_product_attention True = may attend. Fill where a "
    "key is blocked.";
constexpr std::string_view kAxisRemedy =
    "Give the mask its dimensions by hand before it meets the scores (B, H, "
    "Lq, Lk): padding (B, Lk) as mask[:, None, None, :], a mask per item (B, "
    "Lq, Lk) as mask[:, None].";
constexpr std::string_view kCausalRemedy =
    "Query i sees the keys j <= i: block torch.ones(Lq, Lk, "
    "dtype=torch.bool).triu(1).";

}  // namespace

const std::vector<Fault> kMaskFaults = {
    {"mask_ignored",
     "The mask is ignored.",
     "Use it: block its scores before the softmax.",
     {{[](Recipe& r) { r.mask = {.effect = MaskEffect::kIgnored}; }},
      {[](Recipe& r) { r.mask = {.effect = MaskEffect::kThrownAway}; },
       kThrownAway},
      {[](Recipe& r) { r.mask = {.effect = MaskEffect::kGivesWay}; },
       "That is so in calls with a padding mask."}}},
    {"mask_inverted",
     "The mask is inverted: what it blocks is seen, what it lets through is "
     "blocked.",
     kPolarityRemedy,
     {{[](Recipe& r) { r.mask = {.effect = MaskEffect::kInverted}; }}}},
    {"padding_inverted",
     "The padding mask is inverted: only padding is seen.",
     kPolarityRemedy,
     {{[](Recipe& r) { r.padding = {.effect = MaskEffect::kInverted}; }},
      {[](Recipe& r) { r.padding = {.effect = MaskEffect::kSeenPairs}; },
       "Pairs of two tokens are blocked."}}},
    {"mask_added",
     "The mask is added to the scores as 0 and 1: that shifts them a little "
     "and blocks nothing.",
     kFillRemedy,
     {{[](Recipe& r) { r.mask = {.effect = MaskEffect::kAdded}; }},
      {[](Recipe& r) { r.mask = {.effect = MaskEffect::kKeepAdded}; },
       "1 is added where a key may be seen."},
      {[](Recipe& r) { r.padding = {.effect = MaskEffect::kAdded}; },
       "It is the padding mask."}}},
    {"mask_multiplied",
     "Blocked scores become 0 before the softmax, multiplied by the mask or "
     "filled with 0, and exp(0) = 1 is no small weight.",
     kFillRemedy,
     {{[](Recipe& r) { r.mask = {.effect = MaskEffect::kMultiplied}; }},
      {[](Recipe& r) { r.mask = {.effect = MaskEffect::kGivenMultiplied}; },
       "The mask as it was given."},
      {[](Recipe& r) { r.padding = {.effect = MaskEffect::kMultiplied}; },
       "It is the padding mask."}}},
    {"mask_after_softmax",
     "The mask is applied after the softmax: blocked keys have taken their "
     "share of the sum, and the rows no longer sum to 1.",
     kFillRemedy,
     {{[](Recipe& r) { r.mask = {.effect = MaskEffect::kAfterSoftmax}; }},
      {[](Recipe& r) { r.padding = {.effect = MaskEffect::kAfterSoftmax}; },
       "It is the padding mask."},
      {causal_as<causal_after_softmax>, "It is the causal mask."}}},
    {"mask_sentinel_leaks",
     "Blocked scores get a finite number that is not small enough, so "
     "blocked keys keep some weight.",
     "Fill with float(\"-inf\"), or torch.finfo(dtype).min where a row may "
     "be blocked altogether.",
     {{with_sentinel<0.0>, "It is 0."},
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
      {[](Recipe& r) { r.sentinel_from = SentinelFrom::kCap; },
       "The scores are capped once they are masked: it is -c."},
      {[](Recipe& r) { r.sentinel_from = SentinelFrom::kTrace; },
       "It is another number, near those of the scores."},
      {with_sentinel<-1e-9, true>, "-1e-9 is added; -1e9 was meant."},
      {with_sentinel<1e-9, true>, "1e-9 is added; -1e9 was meant."},
      {with_sentinel<1e9, true>, "+1e9 is added: only blocked keys are seen."},
      {with_sentinel<-1.0, true>, "-1 is added."},
      {with_sentinel<-2.0, true>, "-2 is added."},
      {with_sentinel<-5.0, true>, "-5 is added."},
      {with_sentinel<-10.0, true>, "-10 is added."},
      {with_sentinel<-20.0, true>, "-20 is added."},
      {with_sentinel_of_mask<1e-9>, "It is 1e-9 where the mask blocks."},
      {with_sentinel_of_mask<-1e-9>, "It is -1e-9 where the mask blocks."},
      {with_sentinel_of_mask<1e9>, "It is +1e9 where the mask blocks."},
      {with_sentinel_of_mask<-1.0>, "It is -1 where the mask blocks."},
      {with_sentinel_of_mask<-5.0>, "It is -5 where the mask blocks."},
      {with_sentinel_of_mask<-10.0>, "It is -10 where the mask blocks."},
      {with_sentinel_of_mask<-20.0>, "It is -20 where the mask blocks."}}},
    {"mask_transposed",
     "The mask is transposed: its rows are taken for keys.",
     "Rows of the mask are queries, columns are keys: (Lq, Lk).",
     {{lay_out<&Recipe::mask,
               [](const GivenMask& mask, const Sizes&) {
                 return mask.numbers.transpose(-2, -1);
               }>}}},
    {"mask_batch_as_heads",
     "A mask (B, Lq, Lk) is broadcast as (H, Lq, Lk): batch item b's mask "
     "goes to head b.",
     kAxisRemedy,
     {{lay_out<&Recipe::mask, items_as_heads<is_per_item>>},
      {lay_out<&Recipe::padding, items_as_heads<is_of_items>>,
       "It is the padding mask: (B, Lk) is broadcast as (H, 1, Lk)."}}},
    {"mask_batch_as_queries",
     "A padding mask (B, Lk) is broadcast as (Lq, Lk): batch item b's mask "
     "goes to query b.",
     kAxisRemedy,
     {{lay_out<&Recipe::padding, items_as_queries>}}},
    {"mask_head_order",
     "The mask meets heads in the wrong order: (H·B, Lq, Lk) for (B·H, Lq, "
     "Lk).",
     "Heads are innermost: mask.view(B, H, Lq, Lk); to make it, "
     "mask.repeat_interleave(H, dim=0), not mask.repeat(H, 1, 1).",
     {{lay_out<&Recipe::mask,
               [](const GivenMask& mask, const Sizes& n) {
                 const Tensor& x = mask.numbers;
                 return is_per_head(mask, n) ? heads_first(x, n) : x;
               }>},
      {lay_out<&Recipe::mask, repeated_as_a_whole>,
       "The mask of each item is repeated as a whole, item after item."},
      {lay_out<&Recipe::mask, of_items_only<repeated_as_a_whole>>,
       "The mask (B, Lq, Lk) is repeated as a whole, item after item."},
      {[](Recipe& r) { r.mask = r.padding = {folded_heads_first}; },
       "Masks of heads are folded with the heads before the items."},
      {lay_out<&Recipe::mask, repeated_item_by_item>,
       "The mask of each item is repeated item by item where heads come "
       "first."},
      {lay_out<&Recipe::padding, repeated_as_a_whole>,
       "The padding mask is repeated as a whole, item after item."},
      {lay_out<&Recipe::padding, repeated_item_by_item>,
       "The padding mask is repeated item by item where heads come first."}}},
    {"mask_of_first_item",
     "The mask of the first batch item is used for all.",
     kAxisRemedy,
     {{lay_out<&Recipe::mask, first_item>},
      {lay_out<&Recipe::padding, first_item>, "It is the padding mask."}}},
    {"mask_of_first_head",
     "The mask of the first head is used for all.",
     "A per-head mask is (B, H, Lq, Lk) and meets the scores of its own "
     "head.",
     {{lay_out<&Recipe::mask,
               [](const GivenMask& mask, const Sizes&) {
                 return mask.numbers.slice(1, 0, 1);
               }>}}},
    {"mask_taken_for_causal",
     "What the mask holds is ignored: any mask only makes it causal.",
     "Block what the mask blocks; be causal where that is asked for.",
     {{[](Recipe& r) { r.mask = {.effect = MaskEffect::kTakenForCausal}; }}}},
    {"padding_ignored",
     "The padding mask is ignored.",
     "Block the padded keys for every query: scores.masked_fill(padding[:, "
     "None, None, :], float(\"-inf\")).",
     {{[](Recipe& r) { r.padding = {.effect = MaskEffect::kIgnored}; }},
      {[](Recipe& r) { r.padding = {.effect = MaskEffect::kThrownAway}; },
       kThrownAway},
      {[](Recipe& r) { r.padding = {.effect = MaskEffect::kGivesWay}; },
       "That is so in calls with another mask: both should block."},
      {[](Recipe& r) { r.padding = {.effect = MaskEffect::kBlockedPairs}; },
       "It blocks only between two padded positions: tokens see what is "
       "padded."}}},
    {"masks_joined_loosely",
     "Of two masks, a key is hidden only where both hide it.",
     "Masks of True = blocked are joined by |, those of True = may be seen by "
     "&: a key that either hides is hidden.",
     {{[](Recipe& r) { r.joined = MasksJoined::kLoosely; }}}},
    {"padding_off_by_one",
     "Padding is one key off.",
     "Block what is padded, and no other key: of n real keys at the front the "
     "last is n - 1, so torch.arange(Lk) >= lengths[:, None].",
     {{lay_out<&Recipe::padding, one_key_later>,
       "It begins one too late: the first padded key is seen."},
      {lay_out<&Recipe::padding, one_key_sooner>,
       "It begins one too soon: the last real key is hidden."}}},
    {"padding_on_queries",
     "The padding mask is applied to the queries, not to the keys.",
     kAxisRemedy,
     {{lay_out<&Recipe::padding, on_queries>},
      {lay_out<&Recipe::mask, on_queries>}}},
    {"causal_ignored",
     "Causal attention was asked for and ignored.",
     kCausalRemedy,
     {{causal_as<causal_ignored>}}},
    {"causal_without_effect",
     "It is not causal, though it makes a causal mask, or its name says so: "
     "every query sees later keys.",
     kCausalRemedy,
     {{causal_as<causal_without_effect>},
      {causal_as<causal_thrown_away>, kThrownAway},
      {causal_as<causal_added>,
       "1 is added to scores of later keys: -inf in a bool mask is True."},
      {causal_as<causal_keep_added>,
       "1 is added to the scores of keys up to the query's own: a mask of "
       "floating-point numbers is added."}}},
    {"causal_inverted",
     "The causal mask is inverted: queries see the future, not the past.",
     kCausalRemedy,
     {{causal_as<[](const Tensor& d, int64_t) { return d.le(0); }>},
      {causal_as<[](const Tensor& d, int64_t) { return d.lt(0); }>,
       "They see themselves, too."}}},
    {"causal_bottom_right",
     "The causal mask is aligned at the bottom right: query i sees keys up "
     "to i + Lk - Lq.",
     "PyTorch's is_causal aligns at the top left: query i sees keys up to i. "
     "Bottom right is for caches, where the last query is the newest key.",
     {{causal_as<[](const Tensor& d, int64_t ahead) { return d.gt(ahead); }>}}},
    {"causal_top_left",
     "The causal mask is aligned at the top left: query i sees keys up to i, "
     "though the queries are said to be the last of the keys.",
     "Count from the end: block j > i + Lk - Lq, torch.ones(Lq, Lk, "
     "dtype=torch.bool).triu(1 + Lk - Lq).",
     {{causal_as<causal_from_the_first>}}},
    {"causal_misses_diagonal",
     "The causal mask blocks the diagonal: no query sees itself, and the "
     "first sees nothing.",
     "Block above the diagonal only: triu(diagonal=1).",
     {{causal_as<[](const Tensor& d, int64_t) { return d.ge(0); }>}}},
    {"causal_one_too_far",
     "The causal mask is one too far: each query sees the next key.",
     "Block from the diagonal above on: triu(diagonal=1), not 2; "
     "tril(diagonal=0), not 1.",
     {{causal_as<[](const Tensor& d, int64_t) { return d.gt(1); }>}}},
    {"causal_first_key_only",
     "Every query sees the first key alone: the triangle of the causal mask "
     "has one row, which is broadcast.",
     "Make it of as many rows as there are queries: torch.ones(Lq, Lk).tril().",
     {{causal_as<[](const Tensor& d, int64_t) {
       return (d - d.slice(1, 0, 1)).gt(0);
     }>}}},
    {"window_ignored",
     "A window was asked for and ignored.",
     kWindowRemedy,
     {{window_as<[](const Tensor&, int64_t, int64_t) { return Tensor(); }>}}},
    {"window_on_wrong_side",
     "The window lies on the wrong side: what it should see of earlier keys it "
     "sees of later ones.",
     kWindowRemedy,
     {{window_as<[](const Tensor& d, int64_t left, int64_t right) {
        require(left != right);
        return window_as_given(d, right, left);
      }>},
      {window_as<[](const Tensor& d, int64_t left, int64_t) {
         require(left > 0);
         return window_as_given(d, -1, left);
       }>,
       "It sees as many later keys, and every earlier one."}}},
    {"window_off_by_one",
     "The window is wrong by one key.",
     kWindowRemedy,
     {{window_as<resized<1, 0>>, "It is one longer on the left."},
      {window_as<resized<-1, 0>>, "It is one shorter on the left."},
      {window_as<resized<0, 1>>, "It is one longer on the right."},
      {window_as<resized<0, -1>>, "It is one shorter on the right."},
      {window_as<resized<1, 1>>, "It is one longer on both sides."},
      {window_as<resized<-1, -1>>, "It is one shorter on both sides."}}},
};

}  // namespace multihead::diagnosis
