// SPDX-License-Identifier: MIT
//
// The output projection, and what is returned: out, weights, gradients.
#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>

#include "diagnosis/stages/simulate.h"
#include "multihead/optional_tensor.h"

namespace multihead::diagnosis {

using at::Tensor;

namespace {

// All heads share a matrix (D, D), or each has its own square on the diagonal
// of (H·D, H·D).
Tensor project_each_head(const ObservedCall& call, const Recipe& recipe,
                         const Tensor& context) {
  const auto [weight, bias, orientation, name] = matrix_by(call, recipe, 3);
  require(weight.defined());
  const int64_t heads = context.size(1), width = context.size(3);
  if (weight.size(1) == width) {
    return merge_heads(at::linear(context, weight, optional(bias)), recipe,
                       call.sizes);
  }
  require(weight.size(0) == heads * width && weight.size(1) == heads * width);
  const Tensor squares = weight.view({heads, width, heads, width})
                             .diagonal(0, 0, 2)
                             .permute({2, 1, 0});  // (H, in, out)
  const Tensor merged =
      merge_heads(context.matmul(squares), recipe, call.sizes);
  return bias.defined() ? merged + bias : merged;
}

Tensor project_out(const ObservedCall& call, const Recipe& recipe,
                   const Stages& stages) {
  if (!call.has_weights) return stages.context;
  const Tensor& merged = stages.merged;
  switch (recipe.output) {
    case Output::kLinear:
      return project(call, recipe, merged, 3);
    case Output::kNone:
      return merged;
    case Output::kTwice: {
      const Tensor once = project(call, recipe, merged, 3);
      return project(call, recipe, once, 3);
    }
    case Output::kPerHead:
      return project_each_head(call, recipe, stages.context);
    case Output::kDiagonal: {
      const auto used = matrix_by(call, recipe, 3);
      require(used.weight.defined() &&
              used.weight.size(0) == used.weight.size(1) &&
              used.weight.size(1) == merged.size(-1));
      const Tensor scaled = merged * used.weight.diagonal();
      return used.bias.defined() ? scaled + used.bias : scaled;
    }
  }
  throw Impossible();
}

// O + relu(O·W_o) of O = merged heads + projected queries, (B, Lq, H·D).
Tensor finish_set_block(const ObservedCall& call, const Recipe& recipe,
                        const Stages& stages) {
  const Tensor& queries = stages.projected[0];
  require(call.has_weights && queries.sizes() == stages.merged.sizes());
  const Tensor sum = queries + stages.merged;
  const Tensor out = project(call, recipe, sum, 3);
  require(out.sizes() == sum.sizes());
  return sum + out.relu();
}

}  // namespace

Tensor detached(const Tensor& x, const Recipe& recipe, Detached what) {
  return recipe.detached == what ? x.detach() : x;
}

Tensor finish(const ObservedCall& call, const Recipe& recipe,
              const Stages& stages) {
  Tensor out = recipe.residual == Residual::kSetBlock
                   ? finish_set_block(call, recipe, stages)
                   : project_out(call, recipe, stages);
  if (recipe.activated == Activated::kInputsAndOutput) {
    out = recipe.activation(out);
  }
  out = drop_output(call, recipe, out);
  out = finished_beside(call, recipe, stages, out);
  if (recipe.input_added >= 0) {
    // The query of a layer is its residual connection, a convention.
    require(recipe.input_added > 0 || !call.has_weights);
    const Tensor& input = call.inputs[recipe.input_added];
    require(out.sizes() == input.sizes());
    out = out + input;
  }
  if (recipe.rounded) out = out.detach();
  return detached(narrowed(out, recipe, Narrow::kOutput), recipe,
                  Detached::kOutput);
}

Tensor with_infinity(const Tensor& scores, const Stages& stages) {
  const double least = -100 - largest_finite(stages.scores);
  return scores.masked_fill(scores.lt(least), -kInfinity);
}

Tensor in_shape_of(const Tensor& weights, const Tensor& like,
                   const Recipe& recipe, bool sum) {
  const int64_t whole = weights.numel(), heads = weights.size(1);
  if (like.numel() == whole) {
    // (H, B, Lq, Lk) is as a loop over heads stacks them.
    const bool heads_first = like.dim() == 3
                                 ? recipe.heads_before_items
                                 : like.dim() == 4 && like.size(0) == heads &&
                                       heads != weights.size(0);
    return (heads_first ? weights.transpose(0, 1) : weights)
        .reshape(like.sizes());
  }
  if (like.numel() * heads != whole) return {};
  return (sum ? weights.sum(1) : weights.mean(1)).reshape(like.sizes());
}

Tensor returned_weights(const ObservedCall& call, const Recipe& recipe,
                        const Stages& stages) {
  const Tensor& like = call.returned;
  switch (recipe.returned) {
    case Returned::kWeights:
      return in_shape_of(
          recipe.returned_transposed ? stages.dropped.mT() : stages.dropped,
          like, recipe);
    case Returned::kSum:
      return in_shape_of(stages.dropped, like, recipe, /*sum=*/true);
    case Returned::kFirstHead:
    case Returned::kLastHead: {
      const Tensor head = stages.dropped.select(
          1, recipe.returned == Returned::kFirstHead ? 0 : -1);
      // Asked for all of them, it may well return them.
      return head.numel() == like.numel()
                 ? head.reshape(like.sizes())
                 : in_shape_of(stages.dropped, like, recipe);
    }
    case Returned::kScores: {
      const Tensor masked = in_shape_of(
          with_infinity(stages.masked_scores, stages), like, recipe);
      if (!masked.defined()) return {};
      return largest_difference(with_infinity(like, stages), masked) <
                     1e-3 * largest_finite(stages.scores)
                 ? masked
                 : in_shape_of(stages.scores, like, recipe);
    }
    case Returned::kUnmasked:
      return in_shape_of(stages.scores.softmax(-1), like, recipe);
  }
  return {};
}

// ---- Faults ----------------------------------------------------------------

const std::vector<Fault> kOutputFaults = {
    {"output_weight_transposed",
     "The output matrix W_o is transposed.",
     "nn.Linear stores its weight as (out, in) and computes x @ weight.T.",
     {{[](Recipe& r) { r.transposed[3] = true; }}}},
    {"output_bias_forgotten",
     "The bias of the output projection is not added.",
     "Add it after the matrix: x @ weight.T + bias.",
     {{[](Recipe& r) { r.without_bias[3] = true; }}}},
    {"output_forgotten",
     "The output projection is missing.",
     "Multiply the merged heads by W_o: it is what lets the heads mix.",
     {{[](Recipe& r) { r.output = Output::kNone; }}}},
    {"output_per_head",
     "The output projection is applied to each head by itself.",
     "W_o is (E, H·d) and takes all heads laid side by side.",
     {{[](Recipe& r) { r.output = Output::kPerHead; }}}},
    {"output_projection_twice",
     "The output projection is applied twice.",
     "Apply W_o once.",
     {{[](Recipe& r) { r.output = Output::kTwice; }}}},
    {"output_diagonal",
     "Of the output matrix W_o only the diagonal is used: each feature is "
     "multiplied by a number of its own.",
     "Sum over the features of the heads, under a letter of its own: "
     "merged @ w_o, or \"bld,de->ble\" of an einsum.",
     {{[](Recipe& r) { r.output = Output::kDiagonal; }}}},
    {"input_added",
     "An input is added to the output, which is no residual connection.",
     "A residual connection adds the query's input to the output of a whole "
     "layer; that of attention alone is a weighted mean of the values.",
     {{[](Recipe& r) { r.input_added = 0; }, "It is the query."},
      {[](Recipe& r) { r.input_added = 1; }, "It is the input of the keys."},
      {[](Recipe& r) { r.input_added = 2; },
       "It is the input of the values."}}},
    {"returned_weights_summed",
     "The weights returned are summed over the heads, not averaged.",
     "nn.MultiheadAttention returns their mean: weights.mean(dim=1).",
     {{[](Recipe& r) { r.returned = Returned::kSum; }}},
     Stage::kReturnedWeights},
    {"returned_weights_of_one_head",
     "The weights returned are those of one head.",
     "Return all heads, or their mean.",
     {{[](Recipe& r) { r.returned = Returned::kFirstHead; },
       "It is the first head."},
      {[](Recipe& r) { r.returned = Returned::kLastHead; },
       "It is the last head."}},
     Stage::kReturnedWeights},
    {"returned_weights_before_softmax",
     "What is returned as weights are scores, before the softmax.",
     "Return the softmax of the scores.",
     {{[](Recipe& r) { r.returned = Returned::kScores; }}},
     Stage::kReturnedWeights},
    {"returned_weights_unmasked",
     "The weights returned are those without the mask.",
     "Return the weights that were used.",
     {{[](Recipe& r) { r.returned = Returned::kUnmasked; }}},
     Stage::kReturnedWeights},
    {"gradient_detached",
     "The output is right, and no gradient passes through a part of it.",
     "Look for .detach(), .data, torch.no_grad(), .item() or a tensor made "
     "anew from values.",
     {{[](Recipe& r) { r.detached = Detached::kOutput; },
       "It is the whole output."},
      {[](Recipe& r) { r.detached = Detached::kWeights; },
       "It is the weights: queries and keys never learn."},
      {[](Recipe& r) { r.detached = Detached::kMaskedWeights; },
       "It is the weights, where a mask is given: queries and keys do not "
       "learn there."},
      {[](Recipe& r) { r.detached = Detached::kQuery; }, "It is the query."},
      {[](Recipe& r) { r.detached = Detached::kKey; }, "It is the key."},
      {[](Recipe& r) { r.detached = Detached::kValue; }, "It is the value."},
      {[](Recipe& r) { r.detached = Detached::kKeyAndValue; },
       "It is keys and values, as where they are read from a cache that holds "
       "them without their history."}},
     Stage::kGradients},
    {"weights_without_gradient",
     "The output is right, and no gradient reaches a matrix that took part: it "
     "never learns.",
     "Multiply by the parameter itself: .data, .detach() and torch.no_grad() "
     "cut it off. To freeze it on purpose, requires_grad_(False) says so.",
     {{[](Recipe& r) { r.frozen = {true, true, true, true}; },
       "It is all four matrices."},
      {[](Recipe& r) { r.frozen = {true, true, true, false}; },
       "It is W_q, W_k and W_v."},
      {[](Recipe& r) { r.frozen = {true, true, false, false}; },
       "It is W_q and W_k."},
      {[](Recipe& r) { r.frozen[0] = true; }, "It is W_q."},
      {[](Recipe& r) { r.frozen[1] = true; }, "It is W_k."},
      {[](Recipe& r) { r.frozen[2] = true; }, "It is W_v."},
      {[](Recipe& r) { r.frozen = {false, true, true, false}; },
       "It is W_k and W_v."},
      {[](Recipe& r) { r.frozen[3] = true; }, "It is W_o."}},
     Stage::kGradients},
};

}  // namespace multihead::diagnosis
