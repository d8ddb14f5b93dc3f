// SPDX-License-Identifier: MIT
#include "multihead/layer/projection.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

#include "multihead/optional_tensor.h"

namespace multihead {
namespace {

// Projected sequences, heads beside each other: query (Lq, B, H·D), key and
// value (Lk, B, G·D).
using Projected = Sequences;

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                  const at::Tensor& bias) {
  return at::linear(input, weight, optional(bias));
}

// (L, B, heads·D) → (B·heads, L, D), a view.
at::Tensor cut_heads(const at::Tensor& rows, int64_t heads, int64_t head_dim) {
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
  if (in.key.is_same(in.value) && in.query.is_same(in.key)) {
    const auto parts = split_projection(linear(in.query, weight, bias), 3);
    return {parts[0], parts[1], parts[2]};
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
    return {query, parts[0], parts[1]};
  }
  const auto weights = weight.chunk(3);
  const auto biases = chunk_bias(bias);
  return {linear(in.query, weights[0], biases[0]),
          linear(in.key, weights[1], biases[1]),
          linear(in.value, weights[2], biases[2])};
}

Projected project_separately(const Sequences& in, const AttentionLayer& layer) {
  if (layer.is_projected) {
    return {in.query.contiguous(), in.key.contiguous(), in.value.contiguous()};
  }
  const auto biases =
      layer.in_proj_bias.defined()
          ? chunk_bias(layer.in_proj_bias)
          : std::vector<at::Tensor>{layer.q_proj_bias, layer.k_proj_bias,
                                    layer.v_proj_bias};
  return {linear(in.query, layer.q_proj_weight, biases[0]),
          linear(in.key, layer.k_proj_weight, biases[1]),
          linear(in.value, layer.v_proj_weight, biases[2])};
}

// (L, B, G·D) and bias (1, 1, G·D) → (L + 1, B, G·D). The bias is repeated
// before heads are cut, as PyTorch does: its gradient is a sum over the batch,
// and the shape of that sum decides the last bit.
at::Tensor append_bias(const at::Tensor& rows, const at::Tensor& bias) {
  return at::cat({rows, bias.repeat_symint({1, rows.sym_size(1), 1})});
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
  Projected rows = layer.in_proj_weight.defined()
                       ? project_packed(inputs, layer)
                       : project_separately(inputs, layer);
  if (layer.bias_k.defined()) {
    rows.key = append_bias(rows.key, layer.bias_k);
    rows.value = append_bias(rows.value, layer.bias_v);
  }
  const int64_t heads = layer.num_heads, groups = kv_heads(layer);
  const int64_t width = head_width(layer);
  at::Tensor key = options.static_k().defined()
                       ? options.static_k()
                       : cut_heads(rows.key, groups, width);
  at::Tensor value = options.static_v().defined()
                         ? options.static_v()
                         : cut_heads(rows.value, groups, width);
  if (layer.add_zero_attn) {
    key = append_zero(key);
    value = append_zero(value);
  }
  return {cut_heads(rows.query, heads, width),
          key,
          value,
          inputs.query.sym_size(1),
          heads,
          groups};
}

at::Tensor project_out(const at::Tensor& out, const exact::Heads& heads,
                       const AttentionLayer& layer) {
  const auto query_length = out.sym_size(1);
  const at::Tensor merged = out.transpose(0, 1).reshape_symint(
      {query_length * heads.batch_size, heads.num_heads * out.sym_size(2)});
  const at::Tensor projected =
      layer.out_proj_weight.defined()
          ? linear(merged, layer.out_proj_weight, layer.out_proj_bias)
          : merged;
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
