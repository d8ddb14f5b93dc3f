// SPDX-License-Identifier: MIT
#include "multihead/projection.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

namespace multihead {
namespace {

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                  const at::Tensor& bias) {
  return at::linear(input, weight, optional(bias));
}

// (L, B, parts·E) → parts tensors (L, B, E), each contiguous.
std::vector<at::Tensor> split_projection(const at::Tensor& projected,
                                         int64_t parts) {
  return projected.unflatten_symint(-1, {parts, projected.sym_size(-1) / parts})
      .unsqueeze(0)
      .transpose(0, -2)
      .squeeze(-2)
      .contiguous()
      .unbind(0);
}

std::vector<at::Tensor> chunk_bias(const at::Tensor& bias) {
  return bias.defined() ? bias.chunk(3) : std::vector<at::Tensor>(3);
}

// One product for self-attention, two when key is value, three otherwise.
Sequences project_packed(const Sequences& in, const AttentionLayer& layer) {
  const at::Tensor& weight = layer.in_proj_weight;
  const at::Tensor& bias = layer.in_proj_bias;
  if (in.key.is_same(in.value) && in.query.is_same(in.key)) {
    const auto parts = split_projection(linear(in.query, weight, bias), 3);
    return {parts[0], parts[1], parts[2]};
  }
  if (in.key.is_same(in.value)) {
    const auto embed_dim = weight.sym_size(0) / 3;
    const auto weights = weight.split_with_sizes_symint({embed_dim, 2 * embed_dim});
    const auto biases =
        bias.defined() ? bias.split_with_sizes_symint({embed_dim, 2 * embed_dim})
                       : std::vector<at::Tensor>(2);
    const at::Tensor query = linear(in.query, weights[0], biases[0]);
    const auto parts =
        split_projection(linear(in.key, weights[1], biases[1]), 2);
    return {query, parts[0], parts[1]};
  }
  const auto weights = weight.chunk(3);
  const auto biases = chunk_bias(bias);
  return {linear(in.query, weights[0], biases[0]),
          linear(in.key, weights[1], biases[1]),
          linear(in.value, weights[2], biases[2])};
}

Sequences project_separately(const Sequences& in, const AttentionLayer& layer) {
  auto biases = layer.in_proj_bias.defined()
                    ? chunk_bias(layer.in_proj_bias)
                    : std::vector<at::Tensor>{layer.q_proj_bias,
                                              layer.k_proj_bias,
                                              layer.v_proj_bias};
  return {linear(in.query, layer.q_proj_weight, biases[0]),
          linear(in.key, layer.k_proj_weight, biases[1]),
          linear(in.value, layer.v_proj_weight, biases[2])};
}

at::Tensor append_row(const at::Tensor& rows, const at::Tensor& bias) {
  return at::cat({rows, bias.repeat_symint({1, rows.sym_size(1), 1})});
}

// (L, B, heads·D) → (B·heads, L, D), a view.
at::Tensor view_heads(const at::Tensor& rows, const c10::SymInt& batch_heads,
                      int64_t head_dim) {
  return rows.view_symint({rows.sym_size(0), batch_heads, head_dim})
      .transpose(0, 1);
}

at::Tensor append_zero_key(const at::Tensor& rows) {
  return at::cat(
      {rows, at::zeros_symint({rows.sym_size(0), 1, rows.sym_size(2)},
                              rows.options())},
      /*dim=*/1);
}

}  // namespace

int64_t head_width(const AttentionLayer& layer) {
  return layer.head_dim.value_or(layer.embed_dim / layer.num_heads);
}

int64_t kv_heads(const AttentionLayer& layer) {
  return layer.num_kv_heads.value_or(layer.num_heads);
}

Sequences project_in(const Sequences& inputs, const AttentionLayer& layer) {
  return layer.in_proj_weight.defined() ? project_packed(inputs, layer)
                                        : project_separately(inputs, layer);
}

exact::Heads split_heads(const Sequences& projected,
                         const AttentionLayer& layer,
                         const ForwardOptions& options) {
  at::Tensor key = projected.key;
  at::Tensor value = projected.value;
  if (layer.bias_k.defined()) {
    key = append_row(key, layer.bias_k);
    value = append_row(value, layer.bias_v);
  }
  const auto batch_size = projected.query.sym_size(1);
  const int64_t head_dim = head_width(layer);
  const auto batch_kv_heads = batch_size * kv_heads(layer);
  key = options.static_k().defined() ? options.static_k()
                                     : view_heads(key, batch_kv_heads, head_dim);
  value = options.static_v().defined()
              ? options.static_v()
              : view_heads(value, batch_kv_heads, head_dim);
  if (layer.add_zero_attn) {
    key = append_zero_key(key);
    value = append_zero_key(value);
  }
  return {view_heads(projected.query, batch_size * layer.num_heads, head_dim),
          key,
          value,
          batch_size,
          layer.num_heads,
          kv_heads(layer)};
}

at::Tensor project_out(const at::Tensor& out, const exact::Heads& heads,
                       const AttentionLayer& layer) {
  const auto query_length = out.sym_size(1);
  const at::Tensor merged = out.transpose(0, 1).reshape_symint(
      {query_length * heads.batch_size, heads.num_heads * out.sym_size(2)});
  const at::Tensor projected =
      linear(merged, layer.out_proj_weight, layer.out_proj_bias);
  return projected.view_symint(
      {query_length, heads.batch_size, projected.sym_size(1)});
}

at::Tensor pad_mask(const at::Tensor& mask, const AttentionLayer& layer) {
  at::Tensor padded = mask;
  if (mask.defined() && layer.bias_k.defined()) {
    padded = at::constant_pad_nd(padded, {0, 1}, 0);
  }
  if (mask.defined() && layer.add_zero_attn) {
    padded = at::constant_pad_nd(padded, {0, 1}, 0);
  }
  return padded;
}

}  // namespace multihead
