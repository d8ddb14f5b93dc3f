// SPDX-License-Identifier: MIT
#include "cli/cases/ours.h"

#include "cli/cases/random.h"
#include "multihead/modules.h"

namespace cli::ours {
namespace {

multihead::MultiheadAttention multi_head(
    const multihead::AttentionLayer& layer) {
  const KeepGenerator keep;
  multihead::MultiheadAttentionOptions options(layer.embed_dim,
                                               layer.num_heads);
  options.dropout(layer.dropout_p)
      .bias(layer.in_proj_bias.defined())
      .add_bias_kv(layer.bias_k.defined())
      .add_zero_attn(layer.add_zero_attn)
      .batch_first(layer.batch_first);
  if (!layer.in_proj_weight.defined())
    options.kdim(layer.k_proj_weight.size(1)).vdim(layer.v_proj_weight.size(1));
  multihead::MultiheadAttention module(options);
  module->in_proj_weight = layer.in_proj_weight;
  module->q_proj_weight = layer.q_proj_weight;
  module->k_proj_weight = layer.k_proj_weight;
  module->v_proj_weight = layer.v_proj_weight;
  module->in_proj_bias = layer.in_proj_bias;
  module->out_proj->weight = layer.out_proj_weight;
  module->out_proj->bias = layer.out_proj_bias;
  module->bias_k = layer.bias_k;
  module->bias_v = layer.bias_v;
  return module;
}

multihead::GroupedQueryAttention grouped_query(
    const multihead::AttentionLayer& layer) {
  const KeepGenerator keep;
  multihead::GroupedQueryAttentionOptions options(
      layer.embed_dim, layer.num_heads, *layer.num_kv_heads);
  options.dropout(layer.dropout_p)
      .bias(layer.q_proj_bias.defined())
      .kdim(layer.k_proj_weight.size(1))
      .vdim(layer.v_proj_weight.size(1))
      .batch_first(layer.batch_first);
  options.head_dim(layer.head_dim);
  multihead::GroupedQueryAttention module(options);
  module->q_proj->weight = layer.q_proj_weight;
  module->k_proj->weight = layer.k_proj_weight;
  module->v_proj->weight = layer.v_proj_weight;
  module->out_proj->weight = layer.out_proj_weight;
  module->q_proj->bias = layer.q_proj_bias;
  module->k_proj->bias = layer.k_proj_bias;
  module->v_proj->bias = layer.v_proj_bias;
  module->out_proj->bias = layer.out_proj_bias;
  return module;
}

template <typename Holder>
Module forward_of(Holder module, bool training) {
  module->train(training);
  return [module](const at::Tensor& query, const at::Tensor& key,
                  const at::Tensor& value,
                  const multihead::ForwardOptions& options) mutable {
    return module->forward(query, key, value, options);
  };
}

}  // namespace

Module make_module(const multihead::AttentionLayer& layer) {
  return layer.num_kv_heads ? forward_of(grouped_query(layer), layer.training)
                            : forward_of(multi_head(layer), layer.training);
}

std::tuple<at::Tensor, at::Tensor> module(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const multihead::AttentionLayer& layer,
    const multihead::ForwardOptions& options) {
  return make_module(layer)(query, key, value, options);
}

}  // namespace cli::ours
