// SPDX-License-Identifier: MIT
#include "diagnosis/stages/simulate.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "diagnosis/stages/dropping.h"
#include "diagnosis/stages/head_shapes.h"
#include "diagnosis/stages/impossible.h"
#include "diagnosis/stages/masking.h"
#include "diagnosis/stages/scaling.h"
#include "multihead/optional_tensor.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

// x, rounded where the recipe narrows `where` or everything.
Tensor narrowed(const Tensor& x, const Recipe& recipe, Narrow where) {
  if (recipe.narrow != where && recipe.narrow != Narrow::kEverywhere) return x;
  return x.to(type_of(recipe.narrow_type)).to(at::kDouble);
}

Tensor rounded_everywhere(const Tensor& x, const Recipe& recipe) {
  return narrowed(x, recipe, Narrow::kEverywhere);
}

Tensor detached(const Tensor& x, const Recipe& recipe, Detached what) {
  return recipe.detached == what ? x.detach() : x;
}

// ---- Projections -----------------------------------------------------------

const AlignedWeights::Matrix& matrix(const AlignedWeights& weights, int index) {
  const AlignedWeights::Matrix* all[] = {&weights.query, &weights.key,
                                         &weights.value, &weights.output};
  return *all[index];
}

// (out, in) of the matrix, and its bias, as the recipe has them.
AlignedWeights::Matrix matrix_by(const Run& run, const Recipe& recipe,
                                 int index) {
  AlignedWeights::Matrix used =
      matrix(recipe.fused_head_by_head ? run.weights_head_by_head : run.weights,
             index);
  if (!used.weight.defined()) return used;
  if (used.orientation == Orientation::kUnknown && recipe.weights_in_out) {
    used.weight = used.weight.t();
  }
  if (recipe.transposed[index]) {
    need(used.weight.size(0) == used.weight.size(1));
    used.weight = used.weight.t();
  }
  if (recipe.without_bias[index]) used.bias = Tensor();
  return used;
}

Tensor project(const Run& run, const Recipe& recipe, const Tensor& input,
               int index) {
  const auto used = matrix_by(run, recipe, index);
  if (!used.weight.defined()) return input;
  need(used.weight.size(1) == input.size(-1));
  return rounded_everywhere(at::linear(input, used.weight, optional(used.bias)),
                            recipe);
}

// project(), remembered where nothing is recorded or rounded.
Tensor project_shared(const Run& run, const Recipe& recipe, int role) {
  const int index = recipe.matrices[role];
  const Tensor& input = run.inputs[recipe.inputs[role]];
  if (at::GradMode::is_enabled() || recipe.narrow != Narrow::kNever) {
    return project(run, recipe, rounded_everywhere(input, recipe), index);
  }
  Tensor& kept =
      run.projections[{recipe.inputs[role], index, recipe.transposed[index],
                       recipe.without_bias[index], recipe.weights_in_out,
                       recipe.fused_head_by_head}];
  if (!kept.defined()) kept = project(run, recipe, input, index);
  return kept;
}

std::array<Tensor, 3> project_all(const Run& run, const Recipe& recipe) {
  constexpr Detached kInputs[] = {Detached::kQuery, Detached::kKey,
                                  Detached::kValue};
  std::array<Tensor, 3> projected;
  for (int role = 0; role < 3; ++role) {
    projected[role] =
        run.has_weights && !recipe.unprojected[role]
            ? project_shared(run, recipe, role)
            : rounded_everywhere(run.inputs[recipe.inputs[role]], recipe);
    projected[role] = detached(projected[role], recipe, kInputs[role]);
  }
  return projected;
}

// ---- Weights ---------------------------------------------------------------

Tensor normalise(const Tensor& scores, Normalise how) {
  const auto over = [&](int64_t from, int64_t to) {
    Tensor flat = scores.flatten(from, to);
    return flat.softmax(from).view(scores.sizes());
  };
  switch (how) {
    case Normalise::kOverKeys:
      return scores.softmax(-1);
    case Normalise::kOverQueries:
      return scores.softmax(2);
    case Normalise::kOverHeads:
      return scores.softmax(1);
    case Normalise::kOverBatch:
      return scores.softmax(0);
    case Normalise::kOverBatchAndHeads:
      return over(0, 1);
    case Normalise::kOverQueriesAndKeys:
      return over(2, 3);
    case Normalise::kOverItem:
      return over(1, 3);
    case Normalise::kOverAll:
      return over(0, 3);
    case Normalise::kOverHeadsAndKeys:
      return scores.transpose(1, 2)
          .flatten(2)
          .softmax(-1)
          .view({scores.size(0), scores.size(2), scores.size(1), -1})
          .transpose(1, 2);
    case Normalise::kNothing:
      return scores;
    case Normalise::kExpOnly:
      return scores.exp();
    case Normalise::kShiftedExpOnly:
      return (scores - scores.amax(-1, /*keepdim=*/true)).exp();
    case Normalise::kTwice:
      return scores.softmax(-1).softmax(-1);
    case Normalise::kLog:
      return scores.log_softmax(-1);
    case Normalise::kSigmoid:
      return scores.sigmoid();
    case Normalise::kSumOnly:
      return scores / scores.sum(-1, /*keepdim=*/true);
  }
  throw Impossible();
}

// ---- Output ----------------------------------------------------------------

// By a matrix (D, D) that all heads share, or each by its own square on the
// diagonal of (H·D, H·D).
Tensor project_each_head(const Run& run, const Recipe& recipe,
                         const Tensor& context) {
  const auto [weight, bias, orientation, name] = matrix_by(run, recipe, 3);
  need(weight.defined());
  const int64_t heads = context.size(1), width = context.size(3);
  if (weight.size(1) == width) {
    return merge_heads(at::linear(context, weight, optional(bias)), recipe);
  }
  need(weight.size(0) == heads * width && weight.size(1) == heads * width);
  const Tensor squares = weight.view({heads, width, heads, width})
                             .diagonal(0, 0, 2)
                             .permute({2, 1, 0});  // (H, in, out)
  const Tensor merged = merge_heads(context.matmul(squares), recipe);
  return bias.defined() ? merged + bias : merged;
}

Tensor project_out(const Run& run, const Recipe& recipe, const Stages& stages) {
  if (!run.has_weights) return stages.context;
  const Tensor& merged = stages.merged;
  switch (recipe.output) {
    case Output::kLinear:
      return project(run, recipe, merged, 3);
    case Output::kNone:
      return merged;
    case Output::kTwice: {
      const Tensor once = project(run, recipe, merged, 3);
      return project(run, recipe, once, 3);
    }
    case Output::kPerHead:
      return project_each_head(run, recipe, stages.context);
  }
  throw Impossible();
}

Tensor finish(const Run& run, const Recipe& recipe, const Stages& stages) {
  Tensor out = project_out(run, recipe, stages);
  out = drop_later(run, recipe, out, Dropout::kOnOutput);
  out = drop_later(run, recipe, out, Dropout::kOnOutputToo);
  out = drop_later(run, recipe, out, Dropout::kLeftOnOutput);
  if (recipe.input_added) {
    need(out.sizes() == run.inputs[0].sizes());
    out = out + run.inputs[0];
  }
  return detached(narrowed(out, recipe, Narrow::kOutput), recipe,
                  Detached::kOutput);
}

// ---- All of it -------------------------------------------------------------

void attend(const Run& run, const Recipe& recipe, Stages& stages) {
  const Tensor& query = stages.heads[recipe.roles[0]];
  const Tensor key =
      expand_groups(stages.heads[recipe.roles[1]], run.sizes, recipe.groups);
  const Tensor value =
      expand_groups(stages.heads[recipe.roles[2]], run.sizes, recipe.groups);
  need(query.size(-1) == key.size(-1) && query.size(1) == key.size(1) &&
       value.size(1) == key.size(1) && key.size(2) == value.size(2) &&
       query.size(0) == key.size(0) && value.size(0) == key.size(0));

  const double scale = scale_of(run, recipe, query, key);
  const Tensor keys =
      recipe.keys_reshaped
          ? key.reshape({key.size(0), key.size(1), key.size(3), key.size(2)})
          : key.transpose(-2, -1);
  stages.scores = rounded_everywhere(query.matmul(keys) * scale, recipe);
  Tensor scores = drop_scores(run, recipe, stages.scores, Dropout::kBeforeMask);
  const std::optional<Masked> masked = mask_scores(run, recipe, scores);
  need(masked.has_value());
  stages.blind = masked->blind;
  stages.blocks = masked->blocks;
  stages.masked_scores = masked->scores;
  scores = drop_scores(run, recipe, masked->scores, Dropout::kBeforeSoftmax);

  scores = narrowed(scores, recipe, Narrow::kSoftmax);
  Tensor weights = normalise(scores, recipe.normalise);
  if (masked->blind.defined() && recipe.blind == Blind::kZero &&
      recipe.normalise == Normalise::kOverKeys) {
    weights = weights.masked_fill(masked->blind.unsqueeze(-1), 0.0);
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
  stages.dropped = drop_weights(run, recipe, stages.weights);

  const Tensor used = recipe.weights_transposed
                          ? stages.dropped.transpose(-2, -1)
                          : stages.dropped;
  need(used.size(-1) == value.size(2));
  stages.context =
      drop_later(run, recipe, rounded_everywhere(used.matmul(value), recipe),
                 Dropout::kOnContext);
  if (recipe.scale == Scale::kTwice) {
    stages.telltales = {query * std::sqrt(scale),
                        stages.scores / std::sqrt(scale)};
  }
}

Stages follow(const Run& run, const Recipe& recipe) {
  // Without projections, whose input it is and whose role it plays are one.
  need(run.has_weights || recipe.inputs == Recipe{}.inputs);
  Stages stages;
  stages.projected = project_all(run, recipe);
  for (int role = 0; role < 3; ++role) {
    const int64_t heads = role == 0 ? run.sizes.heads : run.sizes.kv_heads;
    const Tensor& projected = stages.projected[role];
    stages.heads[role] = run.has_weights
                             ? split_heads(projected, heads, recipe.split[role])
                             : projected;
  }
  attend(run, recipe, stages);
  stages.merged =
      drop_later(run, recipe,
                 run.has_weights ? merge_heads(stages.context, recipe)
                                 : stages.context.transpose(1, 2).flatten(2),
                 Dropout::kOnMerged);
  stages.out = finish(run, recipe, stages);
  return stages;
}

// Attention over the batch: first and second dimension exchanged, on the way
// in and on the way out.
Stages follow_exchanged(const Run& run, const Recipe& recipe) {
  need(run.has_weights && !drops(run, recipe) &&
       run.sizes.queries == run.sizes.keys);
  Run exchanged = run;
  exchanged.projections.clear();
  for (Tensor& input : exchanged.inputs) input = input.transpose(0, 1);
  std::swap(exchanged.sizes.batch, exchanged.sizes.queries);
  exchanged.sizes.keys = exchanged.sizes.queries;
  for (Tensor& input : exchanged.inputs) input = input.contiguous();
  Stages stages = follow(exchanged, recipe);
  stages.out = stages.out.transpose(0, 1);
  if (stages.blind.defined()) stages.blind = stages.blind.transpose(0, 2);
  return stages;
}

}  // namespace

at::ScalarType type_of(NarrowType type) {
  constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf};
  return kTypes[static_cast<int>(type)];
}

std::optional<Stages> run_recipe(const Run& run, const Recipe& recipe) try {
  Recipe same = recipe;
  same.batch_exchanged = false;
  return recipe.batch_exchanged ? follow_exchanged(run, same)
                                : follow(run, same);
} catch (const Impossible&) {
  return std::nullopt;
} catch (const c10::Error&) {
  // Shapes that two faults together bring about, and no guard above foresees.
  return std::nullopt;
}

}  // namespace multihead::diagnosis
