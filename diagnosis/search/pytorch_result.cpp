// SPDX-License-Identifier: MIT
#include "diagnosis/search/pytorch_result.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "diagnosis/stages/masking.h"
#include "multihead/functional.h"

namespace multihead::diagnosis {
namespace {

using at::Tensor;

Tensor out_in(const AlignedWeights::Matrix& matrix, const Recipe& recipe) {
  const bool stored_in_out =
      matrix.orientation == Orientation::kUnknown && recipe.weights_in_out;
  return stored_in_out ? matrix.weight.t() : matrix.weight;
}

// Every mask of the run as one to add, (B, H, Lq, Lk); undefined: none.
Tensor additive_mask(const Run& run, const Recipe& recipe) {
  const Sizes& n = run.sizes;
  const Tensor zeros =
      at::zeros({n.batch, n.heads, n.queries, n.keys}, at::kDouble);
  const std::optional<Masked> masked = mask_scores(run, recipe, zeros);
  return masked && !masked->scores.is_same(zeros) ? masked->scores : Tensor();
}

AttentionLayer layer_of(const Run& run, const Recipe& recipe) {
  const AlignedWeights& from =
      recipe.fused_head_by_head ? run.weights_head_by_head : run.weights;
  const auto in = [&](const Tensor& x) {
    return x.defined() ? x.to(run.dtype).contiguous() : x;
  };
  AttentionLayer layer{
      .embed_dim = from.output.weight.defined()
                       ? out_in(from.output, recipe).size(0)
                       : run.sizes.embed_dim,
      .num_heads = run.sizes.heads,
      .num_kv_heads = run.sizes.kv_heads,
      .head_dim = run.sizes.width,
      .q_proj_weight = in(out_in(from.query, recipe)),
      .k_proj_weight = in(out_in(from.key, recipe)),
      .v_proj_weight = in(out_in(from.value, recipe)),
      .q_proj_bias = in(from.query.bias),
      .k_proj_bias = in(from.key.bias),
      .v_proj_bias = in(from.value.bias),
      // A product with the identity keeps every bit.
      .out_proj_weight = from.output.weight.defined()
                             ? in(out_in(from.output, recipe))
                             : at::eye(run.sizes.heads * run.sizes.width,
                                       at::TensorOptions(run.dtype)),
      .out_proj_bias = in(from.output.bias),
      .batch_first = true};
  const bool biased = layer.q_proj_bias.defined();
  const bool packed =
      layer.q_proj_weight.sizes() == layer.k_proj_weight.sizes() &&
      layer.q_proj_weight.sizes() == layer.v_proj_weight.sizes() &&
      biased == layer.k_proj_bias.defined() &&
      biased == layer.v_proj_bias.defined() &&
      run.sizes.heads * run.sizes.width == layer.embed_dim;
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

std::vector<Tensor> layer_results(const Run& run, const Recipe& recipe) {
  const AttentionLayer layer = layer_of(run, recipe);
  Tensor mask = additive_mask(run, recipe);
  if (mask.defined()) mask = mask.flatten(0, 1).to(run.dtype);
  std::array<Tensor, 3> inputs;
  for (int role = 0; role < 3; ++role) {
    inputs[role] = run.same_as[role] == role ? run.inputs[role].to(run.dtype)
                                             : inputs[run.same_as[role]];
  }
  std::vector<Tensor> results;
  for (const bool need_weights : {true, false}) {
    results.push_back(std::get<0>(multi_head_attention_forward(
        inputs[0], inputs[1], inputs[2], layer,
        ForwardOptions().attn_mask(mask).need_weights(need_weights))));
  }
  return results;
}

std::vector<Tensor> attention_results(const Run& run, const Recipe& recipe) {
  AttentionOptions options{.scale = run.scale, .enable_gqa = true};
  const Tensor mask = additive_mask(run, recipe);
  if (mask.defined()) options.attn_mask = mask.to(run.dtype);
  return {scaled_dot_product_attention(run.inputs[0].to(run.dtype),
                                       run.inputs[1].to(run.dtype),
                                       run.inputs[2].to(run.dtype), options)};
}

}  // namespace

std::vector<Tensor> pytorch_results(const Run& run, const Recipe& recipe) try {
  const BackendGuard exact(Backend::kExact);
  if (run.training && run.dropout_p > 0) return {};
  if (!run.has_weights) return attention_results(run, recipe);
  const AlignedWeights& weights = run.weights;
  for (const auto* matrix :
       {&weights.query, &weights.key, &weights.value, &weights.output}) {
    if (!matrix->weight.defined()) return {};
  }
  if (!weights.output.weight.defined() &&
      run.sizes.heads * run.sizes.width != run.sizes.embed_dim) {
    return {};
  }
  if (run.scale) return {};
  return layer_results(run, recipe);
} catch (const c10::Error&) {
  return {};  // widths that PyTorch's module does not have
}

}  // namespace multihead::diagnosis
