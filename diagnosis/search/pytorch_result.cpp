// SPDX-License-Identifier: MIT
#include "diagnosis/search/pytorch_result.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "diagnosis/stages/masks.h"
#include "multihead/functional.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

Tensor out_in(const AlignedWeights::Matrix& matrix, const Recipe& recipe) {
  const bool stored_in_out =
      matrix.orientation == Orientation::kUnknown && recipe.weights_in_out;
  return stored_in_out ? matrix.weight.t() : matrix.weight;
}

// Every mask of the call as one to add, (B, H, Lq, Lk); undefined: none.
Tensor additive_mask(const ObservedCall& call, const Recipe& recipe) {
  const Sizes& n = call.sizes;
  const Tensor zeros =
      at::zeros({n.batch, n.heads, n.queries, n.keys}, at::kDouble);
  const std::optional<Masked> masked = mask_scores(call, recipe, zeros);
  return masked && !masked->scores.is_same(zeros) ? masked->scores : Tensor();
}

AttentionLayer layer_of(const ObservedCall& call, const Recipe& recipe) {
  const AlignedWeights& from =
      recipe.fused_head_by_head ? call.weights_head_by_head : call.weights;
  const auto in = [&](const Tensor& x) {
    return x.defined() ? x.to(call.dtype).contiguous() : x;
  };
  AttentionLayer layer{
      .embed_dim = from.output.weight.defined()
                       ? out_in(from.output, recipe).size(0)
                       : call.sizes.embed_dim,
      .num_heads = call.sizes.heads,
      .num_kv_heads = call.sizes.kv_heads,
      .head_dim = call.sizes.width,
      .q_proj_weight = in(out_in(from.query, recipe)),
      .k_proj_weight = in(out_in(from.key, recipe)),
      .v_proj_weight = in(out_in(from.value, recipe)),
      .q_proj_bias = in(from.query.bias),
      .k_proj_bias = in(from.key.bias),
      .v_proj_bias = in(from.value.bias),
      // A product with the identity keeps every bit.
      .out_proj_weight = from.output.weight.defined()
                             ? in(out_in(from.output, recipe))
                             : at::eye(call.sizes.heads * call.sizes.width,
                                       at::TensorOptions(call.dtype)),
      .out_proj_bias = in(from.output.bias),
      .batch_first = true};
  const bool biased = layer.q_proj_bias.defined();
  const bool packed =
      layer.q_proj_weight.sizes() == layer.k_proj_weight.sizes() &&
      layer.q_proj_weight.sizes() == layer.v_proj_weight.sizes() &&
      biased == layer.k_proj_bias.defined() &&
      biased == layer.v_proj_bias.defined() &&
      call.sizes.heads * call.sizes.width == layer.embed_dim;
  if (packed) {
    layer.in_proj_weight = at::cat(
        {layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight});
    layer.q_proj_weight = layer.k_proj_weight = layer.v_proj_weight = Tensor();
    if (biased) {
      layer.in_proj_bias =
          at::cat({layer.q_proj_bias, layer.k_proj_bias, layer.v_proj_bias});
      layer.q_proj_bias = layer.k_proj_bias = layer.v_proj_bias = Tensor();
    }
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

std::vector<Tensor> pytorch_results(const ObservedCall& call,
                                    const Recipe& recipe) try {
  const BackendGuard exact(Backend::kExact);
  if (call.training && call.dropout_p > 0) return {};
  if (!call.has_weights) return attention_results(call, recipe);
  const AlignedWeights& weights = call.weights;
  for (const auto* matrix :
       {&weights.query, &weights.key, &weights.value, &weights.output}) {
    if (!matrix->weight.defined()) return {};
  }
  if (!weights.output.weight.defined() &&
      call.sizes.heads * call.sizes.width != call.sizes.embed_dim) {
    return {};
  }
  if (call.scale) return {};
  return layer_results(call, recipe);
} catch (const c10::Error&) {
  return {};  // widths that PyTorch's module does not have
}

}  // namespace multihead::diagnosis
