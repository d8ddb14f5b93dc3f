// SPDX-License-Identifier: MIT
#include "diagnosis/search/remarks.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

#include "diagnosis/search/tolerance.h"
#include "multihead/text/shapes.h"

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

const Finding kCutShort = {
    .name = "search_cut_short",
    .sentence =
        "The search for faults was cut short: not all of them, alone and in "
        "pairs, were tried on tensors of this size.",
    .remedy = "A case of a few positions and features is searched to the end."};

const Finding kTooSmall = {
    .name = "too_few_numbers",
    .stage = "output",
    .sentence =
        "Some faults would explain it, but out holds so few numbers that they "
        "may fit by chance.",
    .remedy = "Save a larger case, or one in float64."};

Finding lost_in_rounding(const Stages& stages) {
  return {.name = "lost_in_rounding",
          .stage = "scores",
          .sentence = "Scores are as large as " +
                      c10::str(largest_finite(stages.scores)) +
                      ": rounding alone may change the weights, and nothing "
                      "can be told from the result.",
          .remedy = "Save a case with smaller numbers, or in float64."};
}

std::optional<Finding> wrong_shape(const ObservedCall& call,
                                   const Stages& stages) {
  if (stages.out.sizes() == call.out.sizes()) return std::nullopt;
  return Finding{
      .name = "wrong_shape",
      .stage = "output",
      .sentence = "out has the shape " + shape_text(call.out) +
                  ", attention on these inputs " + shape_text(stages.out) + ".",
      .remedy =
          "Each query gets one output: all sizes but the last are those "
          "of the query, and the heads are merged into the last."};
}

std::optional<Finding> not_finite(const ObservedCall& call,
                                  const Stages& stages) {
  if (stages.out.sizes() != call.out.sizes()) return std::nullopt;
  at::Tensor wrong =
      call.out.isfinite().logical_not().logical_and(stages.out.isfinite());
  if (const at::Tensor rows = seeing_rows(call, stages); rows.defined()) {
    wrong = wrong.logical_and(rows.unsqueeze(-1));
  }
  const int64_t count = wrong.sum().item<int64_t>();
  if (count == 0) return std::nullopt;
  return Finding{
      .name = "not_finite",
      .stage = "output",
      .sentence = c10::str("Of ", wrong.numel(), " numbers of out, ", count,
                           count == 1 ? " is" : " are",
                           " NaN or infinite where attention's are not."),
      .remedy =
          "Print each intermediate tensor's `isfinite().all()`: the first "
          "that is false is where to look."};
}

// What became of queries that see no key; nullptr: nothing to say.
const Finding* on_fully_masked_rows(const ObservedCall& call,
                                    const Recipe& attention) {
  const std::optional<Stages> stages = simulate(call, attention);
  if (!stages || !stages->fully_masked.defined()) return nullptr;
  const at::Tensor fully_masked = seeing_rows(call, *stages).logical_not();
  if (call.out.isnan().any(-1).logical_and(fully_masked).any().item<bool>()) {
    return &kNaNRows;
  }
  const double allowed =
      rounding_allowed(call.dtype, *stages, largest_finite(stages->out));
  return largest_difference(call.out, stages->out, fully_masked) > allowed
             ? &kUniformRows
             : nullptr;
}

}  // namespace

std::vector<Finding> remarks(std::span<const ObservedCall> calls,
                             const Recipe& attention,
                             const Explanation& explanation) {
  // Where a fault meets the mask, it is what becomes of fully masked rows.
  const bool masks =
      std::none_of(explanation.faults.begin(), explanation.faults.end(),
                   [](const Pick& pick) {
                     return pick.fault->stage == Stage::kMaskedScores;
                   });
  bool nan_rows = false, uniform_rows = false;
  for (const ObservedCall& call : calls) {
    const Finding* remark =
        masks ? on_fully_masked_rows(call, attention) : nullptr;
    nan_rows = nan_rows || remark == &kNaNRows;
    uniform_rows = uniform_rows || remark == &kUniformRows;
  }
  std::vector<Finding> all;
  if (nan_rows) all.push_back(kNaNRows);
  if (uniform_rows) all.push_back(kUniformRows);
  if (explanation.in_float) all.push_back(kComputedInFloat);
  const bool finite =
      std::all_of(calls.begin(), calls.end(), [](const ObservedCall& call) {
        return std::all_of(call.inputs.begin(), call.inputs.end(),
                           [](const auto& x) {
                             return x.isfinite().all().template item<bool>();
                           });
      });
  if (!finite) all.push_back(kInputsNotFinite);
  return all;
}

std::vector<Finding> remarks_on_search(std::span<const ObservedCall> calls,
                                       const SearchResult& result) {
  std::vector<Finding> all;
  if (result.cut_short) all.push_back(kCutShort);
  if (result.by_chance) all.push_back(kTooSmall);
  for (const ObservedCall& call : calls) {
    const std::optional<Stages> stages = simulate(call, Recipe{});
    if (!stages || !is_lost_in_rounding(call.dtype, *stages)) continue;
    all.push_back(lost_in_rounding(*stages));
    break;
  }
  return all;
}

std::vector<Finding> flaws_of_out(std::span<const ObservedCall> calls,
                                  const Recipe& attention) {
  std::vector<Finding> all;
  const auto add = [&](const std::optional<Finding>& flaw) {
    const bool known =
        flaw && std::any_of(all.begin(), all.end(), [&](const Finding& other) {
          return other.name == flaw->name;
        });
    if (flaw && !known) all.push_back(*flaw);
  };
  for (const ObservedCall& call : calls) {
    const std::optional<Stages> stages = simulate(call, attention);
    if (!stages) continue;
    add(wrong_shape(call, *stages));
    add(not_finite(call, *stages));
  }
  return all;
}

}  // namespace multihead::diagnosis
