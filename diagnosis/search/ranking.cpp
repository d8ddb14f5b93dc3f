// SPDX-License-Identifier: MIT
//
// Of explanations that fit equally, which is believed.
#include <algorithm>
#include <cmath>

#include "diagnosis/search/search.h"

namespace multihead::diagnosis {
namespace {

// Some faults give equal results and differ on the way there; nullopt where no
// call shows its way.
std::optional<bool> shows_distinguishing(std::span<const ObservedCall> calls,
                                         const Explanation& explanation) {
  for (const ObservedCall& call : calls) {
    if (call.trace.empty()) continue;
    const std::optional<Stages> stages = simulate(call, explanation.recipe);
    if (!stages) return std::nullopt;
    if (stages->distinguishing.empty()) continue;  // as without a mask
    for (const at::Tensor& tensor : stages->distinguishing) {
      const double allowed =
          rounding_allowed(call.dtype, *stages, largest_finite(tensor));
      if (in_trace(call, tensor, allowed)) return true;
    }
    return false;
  }
  return std::nullopt;
}

// What an explanation leaves of the largest result, rounding included.
double left_by(const Explanation& explanation,
               std::span<const ObservedCall> calls) {
  double left = 0;
  for (const ObservedCall& call : calls) {
    const Error out = errors(call, explanation.recipe, call.dtype).out;
    left = std::max(left, out.difference / largest_finite(call.out));
  }
  return left;
}

// Where digits are few, several may fit: those that leave far more than another
// come later.
void put_closest_first(std::span<const ObservedCall> calls,
                       std::vector<Explanation>& found) {
  if (found.size() < 2) return;
  for (Explanation& one : found) one.left = left_by(one, calls);
  const double least =
      std::ranges::min_element(found, {}, &Explanation::left)->left;
  std::ranges::stable_partition(found, [&](const Explanation& one) {
    return one.left <= 4 * std::max(least, 1e-12);
  });
}

// A scale that a fault has by name explains more than some number does.
void forget_numbers(std::vector<Explanation>& found) {
  const auto has_number = [](const Explanation& one) {
    return std::ranges::any_of(one.faults, [](const Pick& pick) {
      return pick.fault->name == "scale_of_another_number";
    });
  };
  if (!std::ranges::all_of(found, has_number)) std::erase_if(found, has_number);
}

// A number as small as 1e-9, added in float32, cannot be told from nothing.
void forget_small_sentinels(std::span<const ObservedCall> calls,
                            std::vector<Explanation>& found) {
  const bool wide = std::ranges::any_of(calls, [](const ObservedCall& call) {
    return call.dtype == at::kDouble;
  });
  const auto adds_nothing = [&](const Explanation& one) {
    return (one.in_float || !wide) && one.recipe.sentinel_added &&
           std::abs(one.recipe.sentinel) < 1e-6;
  };
  if (!std::ranges::all_of(found, adds_nothing))
    std::erase_if(found, adds_nothing);
}

}  // namespace

std::vector<Explanation> ranked(std::span<const ObservedCall> calls,
                                std::vector<Explanation> found) {
  std::vector<Explanation> first, rest;
  for (Explanation& explanation : found) {
    const std::optional<bool> shown = shows_distinguishing(calls, explanation);
    if (shown.has_value() && !*shown) continue;
    (shown.has_value() ? first : rest).push_back(std::move(explanation));
  }
  if (first.empty()) first = std::move(rest);
  forget_numbers(first);
  forget_small_sentinels(calls, first);
  put_closest_first(calls, first);
  std::vector<Explanation> unique;
  for (Explanation& explanation : first) {
    const bool known =
        std::ranges::any_of(unique, [&](const Explanation& other) {
          return names_of(other) == names_of(explanation);
        });
    if (!known) unique.push_back(std::move(explanation));
  }
  return unique;
}

std::vector<std::string> names_of(const Explanation& explanation) {
  std::vector<std::string> names;
  for (const Pick& pick : explanation.faults)
    names.emplace_back(pick.fault->name);
  std::ranges::sort(names);
  return names;
}

}  // namespace multihead::diagnosis
