// SPDX-License-Identifier: MIT
//
// The numbers that block scores: -inf has no weight, a finite one may leave
// some, and is all that a query sees whose keys are all blocked.
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

using at::Tensor;

namespace {

// One that leaves no weight is as it should be.
constexpr double kLargestSentinel = 1e3;

bool is_named_sentinel(double number) {
  return std::ranges::any_of(kMaskFaults, [&](const Fault& fault) {
    return std::ranges::any_of(fault.ways, [&](const Way& way) {
      Recipe recipe;
      way.apply(recipe);
      return recipe.sentinel == number;
    });
  });
}

// Of scores (…, Lq, Lk) of all heads or of one, the number that stands there
// most often, where a mask cannot be all that they are.
std::optional<double> repeated_number(const ObservedCall& call,
                                      const Tensor& tensor) {
  const Sizes& n = call.sizes;
  const int64_t of_head = n.batch * n.queries * n.keys;
  if (!tensor.is_floating_point() || tensor.dim() < 2 ||
      tensor.size(-1) != n.keys ||
      (tensor.numel() != of_head && tensor.numel() != of_head * n.heads)) {
    return std::nullopt;
  }
  const Tensor sorted =
      std::get<0>(tensor.detach().to(at::kDouble).flatten().sort());
  const std::span numbers(sorted.const_data_ptr<double>(), sorted.numel());
  size_t run = 0, longest = 1, different = 0;
  double found = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const bool again = i > 0 && numbers[i] == numbers[i - 1];
    run = again ? run + 1 : 1;
    different += !again;
    if (run <= longest) continue;
    longest = run;
    found = numbers[i];
  }
  const bool are_scores = 4 * different > numbers.size();
  return are_scores && longest > 1 && std::abs(found) <= kLargestSentinel
             ? std::optional(found)
             : std::nullopt;
}

// None that a fault names. Impossible: the trace shows none.
double shown_sentinel(const ObservedCall& call) {
  if (!call.sentinel) {
    call.sentinel.emplace();
    for (const Tensor& tensor : call.trace) {
      const std::optional<double> number = repeated_number(call, tensor);
      if (!number || is_named_sentinel(*number)) continue;
      call.sentinel = number;
      break;
    }
  }
  require(call.sentinel->has_value());
  return **call.sentinel;
}

}  // namespace

double sentinel_of(const ObservedCall& call, const Recipe& recipe) {
  switch (recipe.sentinel_from) {
    case SentinelFrom::kRecipe:
      break;
    case SentinelFrom::kCap:
      require(recipe.softcapped && call.cap.has_value());
      return -*call.cap;
    case SentinelFrom::kTrace:
      return shown_sentinel(call);
  }
  return recipe.sentinel;
}

Tensor with_sentinels(const ObservedCall& call, const Sentinels& how,
                      Tensor scores, const Tensor& blocked,
                      const Tensor& by_mask, const Tensor& by_causal) {
  const auto block = [&](const Tensor& where, Sentinels::How way) {
    if (way == Sentinels::kAdded) {
      scores = scores + where.to(at::kDouble) * how.number;
      if (call.dtype == at::kFloat) {
        scores = scores.to(at::kFloat).to(at::kDouble);
      }
    } else {
      const bool filled = way == Sentinels::kFilled;
      scores = scores.masked_fill(where, filled ? how.number : -kInfinity);
    }
  };
  if (how.united) {
    block(blocked, how.mask);
    return scores;
  }
  require(by_mask.defined() && by_causal.defined());
  if (!how.causal_last) block(by_causal, how.causal);
  block(by_mask, how.mask);
  if (how.causal_last) block(by_causal, how.causal);
  return scores;
}

}  // namespace multihead::diagnosis
