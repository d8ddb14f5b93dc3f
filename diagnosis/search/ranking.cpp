// SPDX-License-Identifier: MIT
#include "diagnosis/search/ranking.h"

#include <algorithm>
#include <limits>

#include "diagnosis/search/compare.h"
#include "diagnosis/search/first_stage.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

// Some faults give equal results and differ on the way there; nullopt where no
// run shows its way.
std::optional<bool> shows_telltale(std::span<const Run> runs,
                                   const Explanation& explanation) {
  for (const Run& run : runs) {
    if (run.trace.empty()) continue;
    const std::optional<Stages> stages = run_recipe(run, explanation.recipe);
    if (!stages || stages->telltales.empty()) return std::nullopt;
    for (const Tensor& tensor : stages->telltales) {
      const double allowed =
          rounding_allowed(run.dtype, *stages, largest_finite(tensor));
      if (in_trace(run, tensor, allowed)) return true;
    }
    return false;
  }
  return std::nullopt;
}

// What an explanation leaves of the largest result, rounding included.
double left_by(const Explanation& explanation, std::span<const Run> runs) {
  double left = 0;
  for (const Run& run : runs) {
    const Error out = errors(run, explanation.recipe, run.dtype).out;
    left = std::max(left, out.difference / largest_finite(run.out));
  }
  return left;
}

// Where digits are few, several may fit: those that leave far more than another
// come later.
void put_closest_first(std::span<const Run> runs,
                       std::vector<Explanation>& found) {
  if (found.size() < 2) return;
  std::vector<std::pair<double, Explanation>> measured;
  double least = std::numeric_limits<double>::infinity();
  for (Explanation& one : found) {
    measured.emplace_back(left_by(one, runs), std::move(one));
    least = std::min(least, measured.back().first);
  }
  const double near = 4 * std::max(least, 1e-12);
  std::stable_partition(measured.begin(), measured.end(),
                        [&](const auto& one) { return one.first <= near; });
  for (size_t i = 0; i < found.size(); ++i) {
    found[i] = std::move(measured[i].second);
  }
}

}  // namespace

std::vector<std::string> names_of(const Explanation& explanation) {
  std::vector<std::string> names;
  for (const Pick& pick : explanation.faults)
    names.emplace_back(pick.fault->name);
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<Explanation> ranked(std::span<const Run> runs,
                                std::vector<Explanation> found) {
  std::vector<Explanation> first, rest;
  for (Explanation& explanation : found) {
    const std::optional<bool> shown = shows_telltale(runs, explanation);
    if (shown.has_value() && !*shown) continue;
    (shown.has_value() ? first : rest).push_back(std::move(explanation));
  }
  if (first.empty()) first = std::move(rest);
  put_closest_first(runs, first);
  std::vector<Explanation> unique;
  for (Explanation& explanation : first) {
    const bool known = std::any_of(
        unique.begin(), unique.end(), [&](const Explanation& other) {
          return names_of(other) == names_of(explanation);
        });
    if (!known) unique.push_back(std::move(explanation));
  }
  return unique;
}

}  // namespace multihead::diagnosis
