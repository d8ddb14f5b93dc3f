// SPDX-License-Identifier: MIT
#include "multihead/modules.h"

#include <ATen/ops/linear.h>
#include <torch/nn/init.h>
#include <torch/types.h>

#include <cmath>
#include <ostream>

#include "multihead/layer/cached_layer.h"
#include "multihead/layer/checks.h"

namespace multihead {
namespace {

at::TensorOptions tensor_options(const std::optional<at::Device>& device,
                                 const std::optional<at::ScalarType>& dtype) {
  at::TensorOptions options;
  if (device) options = options.device(*device);
  if (dtype) options = options.dtype(*dtype);
  return options;
}

AttentionLayer sizes(const MultiheadAttentionOptions& o) {
  return {.embed_dim = o.embed_dim(), .num_heads = o.num_heads()};
}

AttentionLayer sizes(const GroupedQueryAttentionOptions& o) {
  return {.embed_dim = o.embed_dim(),
          .num_heads = o.num_heads(),
          .num_kv_heads = o.num_kv_heads(),
          .head_dim = o.head_dim()};
}

void append_projected(KVCache& cache, const at::Tensor& key,
                      const at::Tensor& value, const AttentionLayer& layer,
                      const at::Tensor& key_padding_mask) {
  cached_forward({}, key, value, layer,
                 ForwardOptions()
                     .key_padding_mask(key_padding_mask)
                     .need_weights(false)
                     .cache(&cache));
}

const char* text(bool value) { return value ? "true" : "false"; }

}  // namespace

ProjectionImpl::ProjectionImpl(int64_t in_features, int64_t out_features,
                               bool bias, at::TensorOptions tensor_options)
    : in_features_(in_features),
      out_features_(out_features),
      has_bias_(bias),
      tensor_options_(tensor_options) {
  reset();
}

void ProjectionImpl::reset() {
  weight = register_parameter(
      "weight", torch::empty({out_features_, in_features_}, tensor_options_));
  if (has_bias_) {
    bias = register_parameter("bias",
                              torch::empty(out_features_, tensor_options_));
  }
}

void ProjectionImpl::pretty_print(std::ostream& stream) const {
  stream << "multihead::Projection(in_features=" << in_features_
         << ", out_features=" << out_features_ << ", bias=" << text(has_bias_)
         << ")";
}

void ProjectionImpl::reset_parameters() {
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5));
  if (!has_bias_) return;
  const double bound = 1.0 / std::sqrt(static_cast<double>(in_features_));
  torch::nn::init::uniform_(bias, -bound, bound);
}

at::Tensor ProjectionImpl::forward(const at::Tensor& input) {
  return at::linear(input, weight,
                    has_bias_ ? std::optional(bias) : std::nullopt);
}

MultiheadAttentionImpl::MultiheadAttentionImpl(
    const MultiheadAttentionOptions& options_)
    : options(options_) {
  reset();
  reset_parameters();
}

void MultiheadAttentionImpl::reset() {
  check_layer_sizes(sizes(options));
  const auto tensors = tensor_options(options.device(), options.dtype());
  const int64_t embed_dim = options.embed_dim();
  const int64_t kdim = options.kdim().value_or(embed_dim);
  const int64_t vdim = options.vdim().value_or(embed_dim);
  const auto parameter = [&](const char* name, at::IntArrayRef shape) {
    return register_parameter(name, torch::empty(shape, tensors));
  };
  if (kdim == embed_dim && vdim == embed_dim) {
    in_proj_weight = parameter("in_proj_weight", {3 * embed_dim, embed_dim});
  } else {
    q_proj_weight = parameter("q_proj_weight", {embed_dim, embed_dim});
    k_proj_weight = parameter("k_proj_weight", {embed_dim, kdim});
    v_proj_weight = parameter("v_proj_weight", {embed_dim, vdim});
  }
  if (options.bias()) in_proj_bias = parameter("in_proj_bias", {3 * embed_dim});
  if (options.add_bias_kv()) {
    bias_k = parameter("bias_k", {1, 1, embed_dim});
    bias_v = parameter("bias_v", {1, 1, embed_dim});
  }
  out_proj = register_module(
      "out_proj", Projection(embed_dim, embed_dim, options.bias(), tensors));
}

void MultiheadAttentionImpl::reset_parameters() {
  namespace init = torch::nn::init;
  out_proj->reset_parameters();
  for (auto* weight :
       {&in_proj_weight, &q_proj_weight, &k_proj_weight, &v_proj_weight}) {
    if (weight->defined()) init::xavier_uniform_(*weight);
  }
  if (options.bias()) {
    init::zeros_(in_proj_bias);
    init::zeros_(out_proj->bias);
  }
  if (options.add_bias_kv()) {
    init::xavier_normal_(bias_k);
    init::xavier_normal_(bias_v);
  }
}

AttentionLayer MultiheadAttentionImpl::layer() const {
  AttentionLayer layer = sizes(options);
  layer.in_proj_weight = in_proj_weight;
  layer.q_proj_weight = q_proj_weight;
  layer.k_proj_weight = k_proj_weight;
  layer.v_proj_weight = v_proj_weight;
  layer.in_proj_bias = in_proj_bias;
  layer.out_proj_weight = out_proj->weight;
  layer.out_proj_bias = out_proj->bias;
  layer.bias_k = bias_k;
  layer.bias_v = bias_v;
  layer.add_zero_attn = options.add_zero_attn();
  layer.dropout_p = options.dropout();
  layer.training = is_training();
  layer.batch_first = options.batch_first();
  return layer;
}

std::tuple<at::Tensor, at::Tensor> MultiheadAttentionImpl::forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const ForwardOptions& forward_options) {
  return multi_head_attention_forward(query, key, value, layer(),
                                      forward_options);
}

void MultiheadAttentionImpl::append_to_cache(
    KVCache& cache, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& key_padding_mask) {
  append_projected(cache, key, value, layer(), key_padding_mask);
}

void MultiheadAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "multihead::MultiheadAttention(embed_dim=" << options.embed_dim()
         << ", num_heads=" << options.num_heads()
         << ", dropout=" << options.dropout()
         << ", bias=" << text(options.bias())
         << ", batch_first=" << text(options.batch_first()) << ")";
}

GroupedQueryAttentionImpl::GroupedQueryAttentionImpl(
    const GroupedQueryAttentionOptions& options_)
    : options(options_) {
  reset();
  reset_parameters();
}

void GroupedQueryAttentionImpl::reset() {
  check_layer_sizes(sizes(options));
  const auto tensors = tensor_options(options.device(), options.dtype());
  const int64_t embed_dim = options.embed_dim();
  const int64_t head_dim =
      options.head_dim().value_or(embed_dim / options.num_heads());
  const int64_t query_rows = options.num_heads() * head_dim;
  const int64_t kv_rows = options.num_kv_heads() * head_dim;
  const auto project = [&](const char* name, int64_t from, int64_t to) {
    return register_module(name, Projection(from, to, options.bias(), tensors));
  };
  q_proj = project("q_proj", embed_dim, query_rows);
  k_proj = project("k_proj", options.kdim().value_or(embed_dim), kv_rows);
  v_proj = project("v_proj", options.vdim().value_or(embed_dim), kv_rows);
  out_proj = project("out_proj", query_rows, embed_dim);
}

void GroupedQueryAttentionImpl::reset_parameters() {
  namespace init = torch::nn::init;
  out_proj->reset_parameters();
  for (const auto& projection : {q_proj, k_proj, v_proj}) {
    init::xavier_uniform_(projection->weight);
    if (options.bias()) init::zeros_(projection->bias);
  }
  if (options.bias()) init::zeros_(out_proj->bias);
}

AttentionLayer GroupedQueryAttentionImpl::layer() const {
  AttentionLayer layer = sizes(options);
  layer.q_proj_weight = q_proj->weight;
  layer.k_proj_weight = k_proj->weight;
  layer.v_proj_weight = v_proj->weight;
  layer.q_proj_bias = q_proj->bias;
  layer.k_proj_bias = k_proj->bias;
  layer.v_proj_bias = v_proj->bias;
  layer.out_proj_weight = out_proj->weight;
  layer.out_proj_bias = out_proj->bias;
  layer.dropout_p = options.dropout();
  layer.training = is_training();
  layer.batch_first = options.batch_first();
  return layer;
}

std::tuple<at::Tensor, at::Tensor> GroupedQueryAttentionImpl::forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const ForwardOptions& forward_options) {
  return multi_head_attention_forward(query, key, value, layer(),
                                      forward_options);
}

void GroupedQueryAttentionImpl::append_to_cache(
    KVCache& cache, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& key_padding_mask) {
  append_projected(cache, key, value, layer(), key_padding_mask);
}

void GroupedQueryAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "multihead::GroupedQueryAttention(embed_dim=" << options.embed_dim()
         << ", num_heads=" << options.num_heads()
         << ", num_kv_heads=" << options.num_kv_heads()
         << ", dropout=" << options.dropout()
         << ", bias=" << text(options.bias())
         << ", batch_first=" << text(options.batch_first()) << ")";
}

}  // namespace multihead
