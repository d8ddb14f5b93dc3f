// SPDX-License-Identifier: MIT
#include "diagnosis/stages/simulate.h"

#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

#include <cmath>

namespace multihead::diagnosis {
namespace {

using at::Tensor;

void attend(const ObservedCall& call, const Recipe& recipe, Stages& stages) {
  const Tensor& query = stages.heads[recipe.roles[0]];
  const Tensor key =
      expand_groups(stages.heads[recipe.roles[1]], call.sizes, recipe.groups);
  const Tensor value =
      expand_groups(stages.heads[recipe.roles[2]], call.sizes, recipe.groups);
  require(query.size(-1) == key.size(-1) && query.size(1) == key.size(1) &&
          value.size(1) == key.size(1) && key.size(2) == value.size(2) &&
          query.size(0) == key.size(0) && value.size(0) == key.size(0));

  const double scale = scale_of(call, recipe, query, key);
  const Tensor keys =
      recipe.keys_reshaped
          ? key.reshape({key.size(0), key.size(1), key.size(3), key.size(2)})
          : key.transpose(-2, -1);
  stages.scores = rounded_everywhere(query.matmul(keys) * scale, recipe);
  Tensor scores =
      drop_scores(call, recipe, stages.scores, Dropout::kBeforeMask);
  const std::optional<Masked> masked = mask_scores(call, recipe, scores);
  require(masked.has_value());
  stages.fully_masked = masked->fully_masked;
  stages.blocks = masked->blocks;
  stages.masked_scores = masked->scores;
  scores = drop_scores(call, recipe, masked->scores, Dropout::kBeforeSoftmax);

  scores = narrowed(scores, recipe, Narrow::kSoftmax);
  Tensor weights = normalise(scores, recipe.normalise);
  if (masked->fully_masked.defined() &&
      recipe.fully_masked == FullyMasked::kZero &&
      recipe.normalise == Normalise::kOverKeys) {
    weights = weights.masked_fill(masked->fully_masked.unsqueeze(-1), 0.0);
  }
  weights = narrowed(weights, recipe, Narrow::kSoftmax);
  if (masked->keep_after.defined()) weights = weights * masked->keep_after;
  if (recipe.scale == Scale::kAfterSoftmax) {
    weights = weights / std::sqrt(static_cast<double>(query.size(-1)));
  }
  if (recipe.weights_averaged) {
    weights = weights.mean(1, /*keepdim=*/true).expand_as(weights);
  }
  if (recipe.normalise == Normalise::kSumOnly) {
    stages.magnification += weights.abs().nan_to_num().max().item<double>();
  }
  stages.weights = detached(weights, recipe, Detached::kWeights);
  stages.dropped = drop_weights(call, recipe, stages.weights);

  const Tensor used = recipe.weights_transposed
                          ? stages.dropped.transpose(-2, -1)
                          : stages.dropped;
  require(used.size(-1) == value.size(2));
  stages.context =
      drop_later(call, recipe, rounded_everywhere(used.matmul(value), recipe),
                 Dropout::kOnContext);
  if (recipe.scale == Scale::kTwice) {
    stages.distinguishing = {query * std::sqrt(scale),
                             stages.scores / std::sqrt(scale)};
  }
}

Stages follow(const ObservedCall& call, const Recipe& recipe) {
  // Without projections, whose input it is and whose role it plays are one.
  require(call.has_weights || recipe.inputs == Recipe{}.inputs);
  Stages stages;
  stages.projected = project_inputs(call, recipe);
  for (int role = 0; role < 3; ++role) {
    const int64_t heads = role == 0 ? call.sizes.heads : call.sizes.kv_heads;
    const Tensor& projected = stages.projected[role];
    stages.heads[role] = call.has_weights
                             ? split_heads(projected, heads, recipe.split[role])
                             : projected;
  }
  attend(call, recipe, stages);
  stages.merged =
      drop_later(call, recipe,
                 call.has_weights ? merge_heads(stages.context, recipe)
                                  : stages.context.transpose(1, 2).flatten(2),
                 Dropout::kOnMerged);
  stages.out = finish(call, recipe, stages);
  return stages;
}

// Attention over the batch: first and second dimension exchanged, on the way
// in and on the way out.
Stages follow_exchanged(const ObservedCall& call, const Recipe& recipe) {
  require(call.has_weights && !drops(call, recipe) &&
          call.sizes.queries == call.sizes.keys);
  ObservedCall exchanged = call;
  exchanged.projections.clear();
  for (Tensor& input : exchanged.inputs) input = input.transpose(0, 1);
  std::swap(exchanged.sizes.batch, exchanged.sizes.queries);
  exchanged.sizes.keys = exchanged.sizes.queries;
  for (Tensor& input : exchanged.inputs) input = input.contiguous();
  Stages stages = follow(exchanged, recipe);
  stages.out = stages.out.transpose(0, 1);
  if (stages.fully_masked.defined())
    stages.fully_masked = stages.fully_masked.transpose(0, 2);
  return stages;
}

}  // namespace

std::optional<Stages> simulate(const ObservedCall& call,
                               const Recipe& recipe) try {
  Recipe same = recipe;
  same.batch_exchanged = false;
  return recipe.batch_exchanged ? follow_exchanged(call, same)
                                : follow(call, same);
} catch (const Impossible&) {
  return std::nullopt;
} catch (const c10::Error&) {
  // Shapes that two faults together bring about, and no guard above foresees.
  return std::nullopt;
}

}  // namespace multihead::diagnosis
