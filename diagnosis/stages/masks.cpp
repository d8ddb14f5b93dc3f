// SPDX-License-Identifier: MIT
#include "diagnosis/stages/masks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What masks do to scores, collected; undefined = nothing.
struct Effect {
  Tensor blocked;  // bool
  Tensor added;
  Tensor factor;
  Tensor keep_after;  // bool
};

bool fits(const Tensor& mask, const Tensor& scores) {
  for (int64_t d = 0; d < 4; ++d) {
    if (mask.size(d) != 1 && mask.size(d) != scores.size(d)) return false;
  }
  return true;
}

void unite(Tensor& all, const Tensor& more) {
  all = all.defined() ? all.logical_or(more) : more;
}

void add(Tensor& all, const Tensor& more) {
  all = all.defined() ? all + more : more;
}

void multiply(Tensor& all, const Tensor& more) {
  all = all.defined() ? all * more : more;
}

// ---- The shape in which a mask meets the scores ----------------------------

// A mistake about a shape leaves masks of other shapes as they are.
Tensor laid_out(const GivenMask& given, MaskUse use, const Sizes& sizes) {
  const Tensor& mask = given.numbers;
  const bool per_item =
      given.rank == 3 && mask.size(1) == 1 && mask.size(0) > 1;
  const bool per_head =
      given.rank == 3 && mask.size(1) == sizes.heads && sizes.heads > 1;
  switch (use) {
    case MaskUse::kTransposed:
      return mask.transpose(-2, -1);
    case MaskUse::kBatchAsHeads:
      return per_item ? mask.transpose(0, 1) : mask;
    case MaskUse::kBatchAsQueries:
      return given.rank == 2 && mask.size(2) == 1 ? mask.transpose(0, 2) : mask;
    case MaskUse::kHeadMajor:
      if (!per_head) return mask;
      return mask
          .reshape({sizes.heads, sizes.batch, mask.size(2), mask.size(3)})
          .transpose(0, 1);
    case MaskUse::kTiledOverHeads:
      if (!per_item) return mask;
      return mask.repeat({sizes.heads, 1, 1, 1})
          .view({sizes.batch, sizes.heads, mask.size(2), mask.size(3)});
    case MaskUse::kRepeatedOverItems:
      if (!per_item) return mask;
      return mask.repeat_interleave(sizes.heads, 0)
          .view({sizes.heads, sizes.batch, mask.size(2), mask.size(3)})
          .transpose(0, 1);
    case MaskUse::kFirstItem:
      return per_head ? mask.slice(0, 0, 1).slice(1, 0, 1)
                      : mask.slice(0, 0, 1);
    case MaskUse::kFirstHead:
      return mask.slice(1, 0, 1);
    case MaskUse::kOnQueries:
      return given.rank == 2 && mask.size(2) == 1 ? mask.transpose(-2, -1)
                                                  : mask;
    default:
      return mask;
  }
}

// ---- One mask --------------------------------------------------------------

bool keeps(const GivenMask& mask, bool convention) {
  return mask.meaning == MaskMeaning::kKeep ||
         (mask.meaning == MaskMeaning::kUnknown && convention);
}

// false: these shapes do not allow it.
bool apply(const GivenMask& given, bool convention, MaskUse use,
           const ObservedCall& call, const Tensor& scores, Effect& effect) {
  if (!given.numbers.defined() || use == MaskUse::kIgnored) return true;
  const Tensor numbers = laid_out(given, use, call.sizes);
  if (!fits(numbers, scores)) return false;
  const bool additive = given.meaning == MaskMeaning::kAdditive;
  const Tensor keep = additive                   ? numbers.ne(-kInfinity)
                      : keeps(given, convention) ? numbers.ne(0)
                                                 : numbers.eq(0);
  switch (use) {
    case MaskUse::kInverted:
      unite(effect.blocked, keep);
      return !additive;
    case MaskUse::kAdded:
      add(effect.added, numbers);
      return !additive;
    case MaskUse::kKeepAdded:
      add(effect.added, keep.to(at::kDouble));
      return true;
    case MaskUse::kMultiplied:
      multiply(effect.factor, keep.to(at::kDouble));
      return true;
    case MaskUse::kGivenMultiplied:
      multiply(effect.factor, numbers);
      return true;
    case MaskUse::kAfterSoftmax:
      effect.keep_after = effect.keep_after.defined()
                              ? effect.keep_after.logical_and(keep)
                              : keep;
      return true;
    default:
      if (additive) {
        add(effect.added, numbers);
      } else {
        unite(effect.blocked, keep.logical_not());
      }
      return true;
  }
}

// bool (Lq, Lk), true = blocked.
Tensor causal_mask(Causal causal, int64_t queries, int64_t keys) {
  const Tensor distance = at::arange(keys, at::kLong) -
                          at::arange(queries, at::kLong).unsqueeze(-1);
  switch (causal) {
    case Causal::kTopLeft:
    case Causal::kAfterSoftmax:
      return distance.gt(0);
    case Causal::kIgnored:
      return {};
    case Causal::kOnlyFuture:
      return distance.le(0);
    case Causal::kPresentAndFuture:
      return distance.lt(0);
    case Causal::kBottomRight:
      return distance.gt(keys - queries);
    case Causal::kMissesDiagonal:
      return distance.ge(0);
    case Causal::kOneTooFar:
      return distance.gt(1);
  }
  return {};
}

}  // namespace

std::optional<Masked> mask_scores(const ObservedCall& call,
                                  const Recipe& recipe, const Tensor& scores) {
  Effect effect;
  if (!apply(call.mask, recipe.mask_keeps, recipe.mask, call, scores, effect) ||
      !apply(call.padding, recipe.padding_keeps, recipe.padding, call, scores,
             effect)) {
    return std::nullopt;
  }
  const bool causal =
      call.causal == CausalRequest::kYes ||
      (call.causal == CausalRequest::kUnknown && recipe.causal_by_itself);
  if (causal) {
    const Tensor future =
        causal_mask(recipe.causal, scores.size(2), scores.size(3));
    if (recipe.causal == Causal::kAfterSoftmax) {
      const Tensor past = future.logical_not();
      effect.keep_after = effect.keep_after.defined()
                              ? effect.keep_after.logical_and(past)
                              : past;
    } else if (future.defined()) {
      unite(effect.blocked, future);
    }
  }

  Masked result{.scores = scores, .blocks = effect.blocked.defined()};
  if (effect.factor.defined()) result.scores = result.scores * effect.factor;
  if (effect.added.defined()) result.scores = result.scores + effect.added;
  if (effect.blocked.defined()) {
    const bool usual = recipe.sentinel == -kInfinity;
    const bool added = usual && recipe.fully_masked == FullyMasked::kAsSeen;
    const bool filled = usual && recipe.fully_masked == FullyMasked::kUniform;
    // Of the numbers in use the most usual: it says what rounding leaves.
    const double sentinel = added || filled ? -1e9 : recipe.sentinel;
    result.scores =
        added || recipe.sentinel_added
            ? result.scores + effect.blocked.to(at::kDouble) * sentinel
            : result.scores.masked_fill(effect.blocked, sentinel);
  }
  if (effect.keep_after.defined()) {
    result.keep_after = effect.keep_after.to(at::kDouble);
  }
  if (effect.blocked.defined() || effect.added.defined()) {
    const Tensor fully_masked = result.scores.eq(-kInfinity).all(-1);
    if (fully_masked.any().item<bool>()) result.fully_masked = fully_masked;
  }
  return result;
}

// ---- Faults ----------------------------------------------------------------

namespace {

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

constexpr std::string_view kFillRemedy =
    "Set the blocked scores to -inf before the softmax: "
    "scores.masked_fill(blocked, float(\"-inf\")).";
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
     {{[](Recipe& r) { r.mask = MaskUse::kIgnored; }}}},
    {"mask_inverted",
     "The mask is inverted: what it blocks is seen, what it lets through is "
     "blocked.",
     kPolarityRemedy,
     {{[](Recipe& r) { r.mask = MaskUse::kInverted; }}}},
    {"mask_added",
     "The mask is added to the scores as 0 and 1: that shifts them a little "
     "and blocks nothing.",
     kFillRemedy,
     {{[](Recipe& r) { r.mask = MaskUse::kAdded; }},
      {[](Recipe& r) { r.mask = MaskUse::kKeepAdded; },
       "1 is added where a key may be seen."},
      {[](Recipe& r) { r.padding = MaskUse::kAdded; },
       "It is the padding mask."}}},
    {"mask_multiplied",
     "Blocked scores become 0 before the softmax, multiplied by the mask or "
     "filled with 0, and exp(0) = 1 is no small weight.",
     kFillRemedy,
     {{[](Recipe& r) { r.mask = MaskUse::kMultiplied; }},
      {[](Recipe& r) { r.mask = MaskUse::kGivenMultiplied; },
       "The mask as it was given."},
      {[](Recipe& r) { r.padding = MaskUse::kMultiplied; },
       "It is the padding mask."}}},
    {"mask_after_softmax",
     "The mask is applied after the softmax: blocked keys have taken their "
     "share of the sum, and the rows no longer sum to 1.",
     kFillRemedy,
     {{[](Recipe& r) { r.mask = MaskUse::kAfterSoftmax; }},
      {[](Recipe& r) { r.padding = MaskUse::kAfterSoftmax; },
       "It is the padding mask."},
      {[](Recipe& r) { r.causal = Causal::kAfterSoftmax; },
       "It is the causal mask."}}},
    {"mask_sentinel_leaks",
     "Blocked scores get a finite number that is not small enough, so "
     "blocked keys keep some weight.",
     "Fill with float(\"-inf\"), or torch.finfo(dtype).min where a row may "
     "be blocked altogether.",
     sentinel_ways()},
    {"mask_transposed",
     "The mask is transposed: its rows are taken for keys.",
     "Rows of the mask are queries, columns are keys: (Lq, Lk).",
     {{[](Recipe& r) { r.mask = MaskUse::kTransposed; }}}},
    {"mask_batch_as_heads",
     "A mask (B, Lq, Lk) is broadcast as (H, Lq, Lk): batch item b's mask "
     "goes to head b.",
     kAxisRemedy,
     {{[](Recipe& r) { r.mask = MaskUse::kBatchAsHeads; }}}},
    {"mask_batch_as_queries",
     "A padding mask (B, Lk) is broadcast as (Lq, Lk): batch item b's mask "
     "goes to query b.",
     kAxisRemedy,
     {{[](Recipe& r) { r.padding = MaskUse::kBatchAsQueries; }}}},
    {"mask_head_order",
     "The mask meets heads in the wrong order: (H·B, Lq, Lk) for (B·H, Lq, "
     "Lk).",
     "Heads are innermost: mask.view(B, H, Lq, Lk); to make it, "
     "mask.repeat_interleave(H, dim=0), not mask.repeat(H, 1, 1).",
     {{[](Recipe& r) { r.mask = MaskUse::kHeadMajor; }},
      {[](Recipe& r) { r.mask = MaskUse::kTiledOverHeads; },
       "(B, Lq, Lk) is repeated as a whole, item after item."},
      {[](Recipe& r) { r.mask = MaskUse::kRepeatedOverItems; },
       "(B, Lq, Lk) is repeated item by item where heads come first."}}},
    {"mask_of_first_item",
     "The mask of the first batch item is used for all.",
     kAxisRemedy,
     {{[](Recipe& r) { r.mask = MaskUse::kFirstItem; }},
      {[](Recipe& r) { r.padding = MaskUse::kFirstItem; },
       "It is the padding mask."}}},
    {"mask_of_first_head",
     "The mask of the first head is used for all.",
     "A per-head mask is (B, H, Lq, Lk) and meets the scores of its own "
     "head.",
     {{[](Recipe& r) { r.mask = MaskUse::kFirstHead; }}}},
    {"padding_ignored",
     "The padding mask is ignored.",
     "Block the padded keys for every query: scores.masked_fill(padding[:, "
     "None, None, :], float(\"-inf\")).",
     {{[](Recipe& r) { r.padding = MaskUse::kIgnored; }}}},
    {"padding_inverted",
     "The padding mask is inverted: only padding is seen.",
     kPolarityRemedy,
     {{[](Recipe& r) { r.padding = MaskUse::kInverted; }}}},
    {"padding_on_queries",
     "The padding mask is applied to the queries, not to the keys.",
     kAxisRemedy,
     {{[](Recipe& r) { r.padding = MaskUse::kOnQueries; }},
      {[](Recipe& r) { r.mask = MaskUse::kOnQueries; }}}},
    {"causal_ignored",
     "Causal attention was asked for and ignored.",
     kCausalRemedy,
     {{[](Recipe& r) { r.causal = Causal::kIgnored; }}}},
    {"causal_inverted",
     "The causal mask is inverted: queries see the future, not the past.",
     kCausalRemedy,
     {{[](Recipe& r) { r.causal = Causal::kOnlyFuture; }},
      {[](Recipe& r) { r.causal = Causal::kPresentAndFuture; },
       "They see themselves, too."}}},
    {"causal_bottom_right",
     "The causal mask is aligned at the bottom right: query i sees keys up "
     "to i + Lk - Lq.",
     "PyTorch's is_causal aligns at the top left: query i sees keys up to i. "
     "Bottom right is for caches, where the last query is the newest key.",
     {{[](Recipe& r) { r.causal = Causal::kBottomRight; }}}},
    {"causal_misses_diagonal",
     "The causal mask blocks the diagonal: no query sees itself, and the "
     "first sees nothing.",
     "Block above the diagonal only: triu(diagonal=1).",
     {{[](Recipe& r) { r.causal = Causal::kMissesDiagonal; }}}},
    {"causal_one_too_far",
     "The causal mask is one too far: each query sees the next key.",
     "Block from the diagonal above on: triu(diagonal=1), not 2; "
     "tril(diagonal=0), not 1.",
     {{[](Recipe& r) { r.causal = Causal::kOneTooFar; }}}},
};

}  // namespace multihead::diagnosis
