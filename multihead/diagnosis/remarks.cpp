// SPDX-License-Identifier: MIT
#include "multihead/diagnosis/remarks.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

#include "multihead/diagnosis/compare.h"
#include "multihead/shape_text.h"

namespace multihead::diagnosis {
namespace {

const Finding kNaNRows = {
    .name = "nan_rows",
    .stage = "weights",
    .sentence =
        "A query whose keys are all blocked gives NaN: the softmax of "
        "nothing but -inf. `nn.MultiheadAttention` gives NaN there with "
        "weights, and 0 without.",
    .remedy =
        "Where such rows occur, as in padded batches, set their weights to "
        "0."};

const Finding kUniformRows = {
    .name = "uniform_rows",
    .stage = "weights",
    .sentence =
        "A query whose keys are all blocked attends to the blocked keys: "
        "a finite sentinel cancels in the softmax.",
    .remedy = "Where such rows occur, set their weights to 0."};

const Finding kComputedInFloat = {
    .name = "computed_in_float32",
    .stage = "weights",
    .sentence =
        "In float64 it agrees to the digits of float32 only: something is "
        "rounded to float32 on the way, or a small number is added.",
    .remedy = "That is right for float32 and narrower inputs."};

const Finding kInputsNotFinite = {
    .name = "inputs_not_finite",
    .sentence =
        "Inputs hold NaN or infinite numbers: what these reach is not judged.",
    .remedy = "Save a case of finite numbers."};

// What became of queries that see no key; nullptr: nothing to say.
const Finding* on_blind_rows(const Run& run, const Recipe& attention) {
  const std::optional<Stages> stages = run_recipe(run, attention);
  if (!stages || !stages->blind.defined()) return nullptr;
  const at::Tensor blind = seeing_rows(run, *stages).logical_not();
  if (run.out.isnan().any(-1).logical_and(blind).any().item<bool>()) {
    return &kNaNRows;
  }
  const double allowed =
      rounding_allowed(run.dtype, *stages, largest_finite(stages->out));
  return largest_difference(run.out, stages->out, blind) > allowed
             ? &kUniformRows
             : nullptr;
}

}  // namespace

std::vector<Finding> remarks(std::span<const Run> runs, const Recipe& attention,
                             const Explanation& explanation) {
  // Where a fault meets the mask, it is what becomes of blind rows.
  const bool masks =
      std::none_of(explanation.faults.begin(), explanation.faults.end(),
                   [](const Pick& pick) {
                     return pick.fault->stage == Stage::kMaskedScores;
                   });
  bool nan_rows = false, uniform_rows = false;
  for (const Run& run : runs) {
    const Finding* remark = masks ? on_blind_rows(run, attention) : nullptr;
    nan_rows = nan_rows || remark == &kNaNRows;
    uniform_rows = uniform_rows || remark == &kUniformRows;
  }
  std::vector<Finding> all;
  if (nan_rows) all.push_back(kNaNRows);
  if (uniform_rows) all.push_back(kUniformRows);
  if (explanation.in_float) all.push_back(kComputedInFloat);
  const bool finite = std::all_of(runs.begin(), runs.end(), [](const Run& run) {
    return std::all_of(run.inputs.begin(), run.inputs.end(), [](const auto& x) {
      return x.isfinite().all().template item<bool>();
    });
  });
  if (!finite) all.push_back(kInputsNotFinite);
  return all;
}

std::optional<Finding> lost_in_rounding(std::span<const Run> runs) {
  for (const Run& run : runs) {
    const std::optional<Stages> stages = run_recipe(run, Recipe{});
    if (!stages || !is_lost_in_rounding(run.dtype, *stages)) continue;
    return Finding{
        .name = "lost_in_rounding",
        .stage = "scores",
        .sentence = "Scores are as large as " +
                    c10::str(largest_finite(stages->scores)) +
                    ": rounding alone may change the weights, and nothing can "
                    "be told from the result.",
        .remedy = "Save a case with smaller numbers, or in float64."};
  }
  return std::nullopt;
}

std::optional<Finding> another_shape(std::span<const Run> runs) {
  for (const Run& run : runs) {
    const std::optional<Stages> stages = run_recipe(run, Recipe{});
    if (!stages || stages->out.sizes() == run.out.sizes()) continue;
    return Finding{.name = "another_shape",
                   .stage = "output",
                   .sentence = "out has the shape " + shape_text(run.out) +
                               ", attention on these inputs " +
                               shape_text(stages->out) + "."};
  }
  return std::nullopt;
}

Finding search_cut_short() {
  return {
      .name = "search_cut_short",
      .sentence = "The search for faults was cut short: the tensors are large.",
      .remedy = "Save a small case, of a few positions and features."};
}

}  // namespace multihead::diagnosis
