// SPDX-License-Identifier: MIT
//
// What PyTorch itself returns for a call: the same numbers, computed by this
// library's exact path, which has PyTorch's bits.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <array>

#include "diagnosis/search/search.h"
#include "multihead/functional.h"

namespace multihead::diagnosis {

using at::Tensor;

namespace {

// Every mask of the call as one to add, (B, H, Lq, Lk); undefined: none.
Tensor additive_mask(const ObservedCall& call, const Recipe& recipe) {
  const Sizes& n = call.sizes;
  const Tensor zeros =
      at::zeros({n.batch, n.heads, n.queries, n.keys}, at::kDouble);
  const Tensor masked = mask_scores(call, recipe, zeros).scores;
  return masked.is_same(zeros) ? Tensor() : masked;
}

AttentionLayer layer_of(const ObservedCall& call, const Recipe& recipe) {
  std::array<Tensor, 4> weights, biases;
  for (int i = 0; i < 4; ++i) {
    const AlignedWeights::Matrix matrix = matrix_by(call, recipe, i);
    weights[i] = matrix.weight.to(call.dtype).contiguous();
    if (matrix.bias.defined()) biases[i] = matrix.bias.to(call.dtype);
  }
  const auto& [query, key, value, output] = weights;
  AttentionLayer layer{.embed_dim = output.size(0),
                       .num_heads = call.sizes.heads,
                       .num_kv_heads = call.sizes.kv_heads,
                       .head_dim = call.sizes.width,
                       .out_proj_weight = output,
                       .out_proj_bias = biases[3],
                       .batch_first = true};
  const bool biased = biases[0].defined();
  const bool packed =
      query.sizes() == key.sizes() && query.sizes() == value.sizes() &&
      biased == biases[1].defined() && biased == biases[2].defined() &&
      call.sizes.heads * call.sizes.width == layer.embed_dim;
  if (packed) {
    layer.in_proj_weight = at::cat({query, key, value});
    if (biased) {
      layer.in_proj_bias = at::cat({biases[0], biases[1], biases[2]});
    }
  } else {
    layer.q_proj_weight = query, layer.q_proj_bias = biases[0];
    layer.k_proj_weight = key, layer.k_proj_bias = biases[1];
    layer.v_proj_weight = value, layer.v_proj_bias = biases[2];
  }
  return layer;
}

std::vector<Tensor> layer_results(const ObservedCall& call,
                                  const Recipe& recipe) {
  const AttentionLayer layer = layer_of(call, recipe);
  Tensor mask = additive_mask(call, recipe);
  if (mask.defined()) mask = mask.flatten(0, 1).to(call.dtype);
  std::array<Tensor, 3> inputs;
  for (int role = 0; role < 3; ++role) {
    inputs[role] = call.same_as[role] == role ? call.inputs[role].to(call.dtype)
                                              : inputs[call.same_as[role]];
  }
  std::vector<Tensor> results;
  for (const bool need_weights : {true, false}) {
    results.push_back(std::get<0>(multi_head_attention_forward(
        inputs[0], inputs[1], inputs[2], layer,
        ForwardOptions().attn_mask(mask).need_weights(need_weights))));
  }
  return results;
}

std::vector<Tensor> attention_results(const ObservedCall& call,
                                      const Recipe& recipe) {
  AttentionOptions options{.scale = call.scale, .enable_gqa = true};
  const Tensor mask = additive_mask(call, recipe);
  if (mask.defined()) options.attn_mask = mask.to(call.dtype);
  return {scaled_dot_product_attention(call.inputs[0].to(call.dtype),
                                       call.inputs[1].to(call.dtype),
                                       call.inputs[2].to(call.dtype), options)};
}

}  // namespace

// Whether something stands beside attention, or features in another order, for
// which PyTorch has no call.
bool has_structure(const Recipe& recipe) {
  if (recipe.merge == merge_by_feature) return true;
  Habits habits = recipe;
  const Habits none;
  habits.weights_in_out = none.weights_in_out;
  habits.output_weight_otherwise = none.output_weight_otherwise;
  habits.fused = none.fused;
  habits.mask_keeps = none.mask_keeps;
  habits.padding_keeps = none.padding_keeps;
  habits.padding_of_pairs = none.padding_of_pairs;
  habits.causal_by_itself = none.causal_by_itself;
  habits.causal_unless_masked = none.causal_unless_masked;
  habits.heads_before_items = none.heads_before_items;
  habits.fully_masked = none.fully_masked;
  habits.sentinels = none.sentinels;
  habits.window_reading = none.window_reading;
  return habits != none;
}

std::vector<Tensor> pytorch_results(const ObservedCall& call,
                                    const Recipe& recipe) try {
  if (has_structure(recipe)) return {};
  const BackendGuard exact(Backend::kExact);
  if (call.training && call.dropout_p > 0) return {};
  if (!call.has_weights) return attention_results(call, recipe);
  for (const auto* matrix : call.weights.matrices()) {
    if (!matrix->weight.defined()) return {};
  }
  if (call.scale) return {};
  return layer_results(call, recipe);
} catch (const c10::Error&) {
  return {};  // widths that PyTorch's module does not have
}

}  // namespace multihead::diagnosis
