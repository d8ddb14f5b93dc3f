// SPDX-License-Identifier: MIT
#include "diagnosis/stages/masking.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

#include <limits>

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
bool apply(const GivenMask& given, bool convention, MaskUse use, const Run& run,
           const Tensor& scores, Effect& effect) {
  if (!given.numbers.defined() || use == MaskUse::kIgnored) return true;
  const Tensor numbers = laid_out(given, use, run.sizes);
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

std::optional<Masked> mask_scores(const Run& run, const Recipe& recipe,
                                  const Tensor& scores) {
  Effect effect;
  if (!apply(run.mask, recipe.mask_keeps, recipe.mask, run, scores, effect) ||
      !apply(run.padding, recipe.padding_keeps, recipe.padding, run, scores,
             effect)) {
    return std::nullopt;
  }
  const bool causal =
      run.causal == CausalRequest::kYes ||
      (run.causal == CausalRequest::kUnknown && recipe.causal_by_itself);
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
    const bool added = usual && recipe.blind == Blind::kAsSeen;
    const bool filled = usual && recipe.blind == Blind::kUniform;
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
    const Tensor blind = result.scores.eq(-kInfinity).all(-1);
    if (blind.any().item<bool>()) result.blind = blind;
  }
  return result;
}

}  // namespace multihead::diagnosis
