// SPDX-License-Identifier: MIT
#include "multihead/projection.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

#include "multihead/optional_tensor.h"

namespace multihead {
namespace {

// Projected heads: query (B·H, Lq, D), key and value (B·G, Lk, D).
struct Projected {
  at::Tensor query, key, value;
};

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                  const at::Tensor& bias) {
  return at::linear(input, weight, optional(bias));
}

// (L, B, heads·D) → (B·heads, L, D), a view.
at::Tensor view_heads(const at::Tensor& rows, int64_t heads, int64_t head_dim) {
  return rows
      .view_symint({rows.sym_size(0), rows.sym_size(1) * heads, head_dim})
      .transpose(0, 1);
}

// (L, B, parts·E) → parts tensors (L, B, E), each contiguous. Cutting the heads
// before unbinding would save operations, and change the layout in which the
// gradient meets the matrix product: the bits of in_proj's gradient at E = 1.
std::vector<at::Tensor> split_projection(const at::Tensor& projected,
                                         int64_t parts) {
  return projected
      .view_symint({projected.sym_size(0), projected.sym_size(1), parts,
                    projected.sym_size(2) / parts})
      .permute({2, 0, 1, 3})
      .contiguous()
      .unbind(0);
}

std::vector<at::Tensor> chunk_bias(const at::Tensor& bias) {
  return bias.defined() ? bias.chunk(3) : std::vector<at::Tensor>(3);
}

// One product for self-attention, two when key is value, three otherwise.
Projected project_packed(const Sequences& in, const AttentionLayer& layer) {
  const at::Tensor& weight = layer.in_proj_weight;
  const at::Tensor& bias = layer.in_proj_bias;
  const auto heads = [&](const at::Tensor& rows) {
    return view_heads(rows, layer.num_heads, head_width(layer));
  };
  if (in.key.is_same(in.value) && in.query.is_same(in.key)) {
    const auto parts = split_projection(linear(in.query, weight, bias), 3);
    return {heads(parts[0]), heads(parts[1]), heads(parts[2])};
  }
  if (in.key.is_same(in.value)) {
    const auto width = weight.sym_size(0) / 3;
    const auto weights = weight.split_with_sizes_symint({width, 2 * width});
    const auto biases = bias.defined()
                            ? bias.split_with_sizes_symint({width, 2 * width})
                            : std::vector<at::Tensor>(2);
    const at::Tensor query = linear(in.query, weights[0], biases[0]);
    const auto parts =
        split_projection(linear(in.key, weights[1], biases[1]), 2);
    return {heads(query), heads(parts[0]), heads(parts[1])};
  }
  const auto weights = weight.chunk(3);
  const auto biases = chunk_bias(bias);
  return {heads(linear(in.query, weights[0], biases[0])),
          heads(linear(in.key, weights[1], biases[1])),
          heads(linear(in.value, weights[2], biases[2]))};
}

Projected project_separately(const Sequences& in, const AttentionLayer& layer) {
  const auto biases =
      layer.in_proj_bias.defined()
          ? chunk_bias(layer.in_proj_bias)
          : std::vector<at::Tensor>{layer.q_proj_bias, layer.k_proj_bias,
                                    layer.v_proj_bias};
  const auto project = [&](const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& bias, int64_t heads) {
    return view_heads(linear(input, weight, bias), heads, head_width(layer));
  };
  const int64_t kv = kv_heads(layer);
  return {project(in.query, layer.q_proj_weight, biases[0], layer.num_heads),
          project(in.key, layer.k_proj_weight, biases[1], kv),
          project(in.value, layer.v_proj_weight, biases[2], kv)};
}

// (B·G, L, D) and bias (1, 1, G·D) → (B·G, L + 1, D). Joined in the memory
// layout of the sequence, (L, B·G, D), as PyTorch does.
at::Tensor append_bias(const at::Tensor& rows, const at::Tensor& bias,
                       const AttentionLayer& layer) {
  const int64_t heads = kv_heads(layer);
  const at::Tensor row = bias.view({1, heads, head_width(layer)})
                             .repeat_symint({1, rows.sym_size(0) / heads, 1});
  return at::cat({rows.transpose(0, 1), row}).transpose(0, 1);
}

at::Tensor append_zero(const at::Tensor& rows) {
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

exact::Heads project_in(const Sequences& inputs, const AttentionLayer& layer,
                        const ForwardOptions& options) {
  auto [query, key, value] = layer.in_proj_weight.defined()
                                 ? project_packed(inputs, layer)
                                 : project_separately(inputs, layer);
  if (layer.bias_k.defined()) {
    key = append_bias(key, layer.bias_k, layer);
    value = append_bias(value, layer.bias_v, layer);
  }
  if (options.static_k().defined()) key = options.static_k();
  if (options.static_v().defined()) value = options.static_v();
  if (layer.add_zero_attn) {
    key = append_zero(key);
    value = append_zero(value);
  }
  return {query,          key, value, inputs.query.sym_size(1), layer.num_heads,
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
