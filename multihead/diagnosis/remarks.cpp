// SPDX-License-Identifier: MIT
#include "multihead/diagnosis/remarks.h"

#include "multihead/diagnosis/compare.h"

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
        "Where such rows occur, as in padded batches, fill with "
        "`torch.finfo(dtype).min`, or set the weights of these rows to "
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
    .sentence = "float64 inputs are rounded to float32 on the way.",
    .remedy =
        "That is right for float32 and narrower inputs; float64 loses half "
        "of its digits."};

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
                             bool in_float) {
  bool nan_rows = false, uniform_rows = false;
  for (const Run& run : runs) {
    const Finding* remark = on_blind_rows(run, attention);
    nan_rows = nan_rows || remark == &kNaNRows;
    uniform_rows = uniform_rows || remark == &kUniformRows;
  }
  std::vector<Finding> all;
  if (nan_rows) all.push_back(kNaNRows);
  if (uniform_rows) all.push_back(kUniformRows);
  if (in_float) all.push_back(kComputedInFloat);
  return all;
}

Finding search_cut_short() {
  return {
      .name = "search_cut_short",
      .sentence = "The search for faults was cut short: the tensors are large.",
      .remedy = "Save a small case, of a few positions and features."};
}

}  // namespace multihead::diagnosis
