// SPDX-License-Identifier: MIT
//
// Multi-head attention as grouped-query attention and back.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include "multihead/layer/checks.h"
#include "multihead/modules.h"

namespace multihead {
namespace {

void assign(at::Tensor& parameter, const at::Tensor& value) {
  if (parameter.defined()) parameter.copy_(value);
}

std::vector<at::Tensor> in_projections(const MultiheadAttentionImpl& mha) {
  return mha.in_proj_weight.defined()
             ? mha.in_proj_weight.chunk(3)
             : std::vector<at::Tensor>{mha.q_proj_weight, mha.k_proj_weight,
                                       mha.v_proj_weight};
}

}  // namespace

at::Tensor pool_heads(const at::Tensor& rows, int64_t num_heads,
                      int64_t num_kv_heads) {
  check_groups("pool_heads", rows, num_heads, num_heads, num_kv_heads);
  return rows.unflatten(0, {num_kv_heads, num_heads / num_kv_heads, -1})
      .mean(1)
      .flatten(0, 1);
}

at::Tensor repeat_heads(const at::Tensor& rows, int64_t num_heads,
                        int64_t num_kv_heads) {
  check_groups("repeat_heads", rows, num_kv_heads, num_heads, num_kv_heads);
  return rows.unflatten(0, {num_kv_heads, -1})
      .repeat_interleave(num_heads / num_kv_heads, 0)
      .flatten(0, 1);
}

GroupedQueryAttention to_grouped_query(const MultiheadAttention& mha,
                                       int64_t num_kv_heads) {
  const MultiheadAttentionOptions& from = mha->options;
  TORCH_CHECK_VALUE(!from.add_bias_kv() && !from.add_zero_attn(),
                    "to_grouped_query: mha must have neither add_bias_kv nor "
                    "add_zero_attn, which grouped-query attention lacks");
  const at::NoGradGuard no_grad;
  const at::Tensor& example = mha->out_proj->weight;
  GroupedQueryAttention gqa(GroupedQueryAttentionOptions(from.embed_dim(),
                                                         from.num_heads(),
                                                         num_kv_heads)
                                .dropout(from.dropout())
                                .bias(from.bias())
                                .kdim(from.kdim())
                                .vdim(from.vdim())
                                .batch_first(from.batch_first())
                                .device(example.device())
                                .dtype(example.scalar_type()));
  const auto pool = [&](const at::Tensor& rows) {
    return pool_heads(rows, from.num_heads(), num_kv_heads);
  };
  const auto weights = in_projections(*mha);
  assign(gqa->q_proj->weight, weights[0]);
  assign(gqa->k_proj->weight, pool(weights[1]));
  assign(gqa->v_proj->weight, pool(weights[2]));
  assign(gqa->out_proj->weight, mha->out_proj->weight);
  if (from.bias()) {
    const auto biases = mha->in_proj_bias.chunk(3);
    assign(gqa->q_proj->bias, biases[0]);
    assign(gqa->k_proj->bias, pool(biases[1]));
    assign(gqa->v_proj->bias, pool(biases[2]));
    assign(gqa->out_proj->bias, mha->out_proj->bias);
  }
  gqa->train(mha->is_training());
  return gqa;
}

MultiheadAttention to_multihead(const GroupedQueryAttention& gqa) {
  const GroupedQueryAttentionOptions& from = gqa->options;
  TORCH_CHECK_VALUE(
      gqa->q_proj->weight.size(0) == from.embed_dim(),
      "to_multihead: gqa must have head_dim * num_heads = embed_dim, got ",
      gqa->q_proj->weight.size(0), " and ", from.embed_dim());
  const at::NoGradGuard no_grad;
  const at::Tensor& example = gqa->out_proj->weight;
  MultiheadAttention mha(
      MultiheadAttentionOptions(from.embed_dim(), from.num_heads())
          .dropout(from.dropout())
          .bias(from.bias())
          .kdim(from.kdim())
          .vdim(from.vdim())
          .batch_first(from.batch_first())
          .device(example.device())
          .dtype(example.scalar_type()));
  const auto repeat = [&](const at::Tensor& rows) {
    return repeat_heads(rows, from.num_heads(), from.num_kv_heads());
  };
  const at::Tensor key_weight = repeat(gqa->k_proj->weight);
  const at::Tensor value_weight = repeat(gqa->v_proj->weight);
  if (mha->in_proj_weight.defined()) {
    mha->in_proj_weight.copy_(
        at::cat({gqa->q_proj->weight, key_weight, value_weight}));
  }
  assign(mha->q_proj_weight, gqa->q_proj->weight);
  assign(mha->k_proj_weight, key_weight);
  assign(mha->v_proj_weight, value_weight);
  assign(mha->out_proj->weight, gqa->out_proj->weight);
  if (from.bias()) {
    mha->in_proj_bias.copy_(
        at::cat({gqa->q_proj->bias, repeat(gqa->k_proj->bias),
                 repeat(gqa->v_proj->bias)}));
    assign(mha->out_proj->bias, gqa->out_proj->bias);
  }
  mha->train(gqa->is_training());
  return mha;
}

}  // namespace multihead
