// SPDX-License-Identifier: MIT
#include "multihead/layer/projection.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

#include "multihead/linear/linear.h"
#include "multihead/optional_tensor.h"

namespace multihead {
namespace {

// ---- Two orders -----------------------------------------------------------

// PyTorch's: sequences (L, B, E) stay so until all that is appended is there.
struct TorchOrder {
  // A bias of another dtype is PyTorch's to judge.
  static at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& bias) {
    return at::linear(input, weight, optional(bias));
  }

  static at::Tensor projected_already(const at::Tensor& rows) {
    return rows.contiguous();
  }

  static std::vector<at::Tensor> split_rows(
      const at::Tensor& rows, const std::vector<int64_t>& thirds) {
    if (thirds.size() == 3) return rows.chunk(3);
    const auto width = rows.sym_size(0) / 3;
    return rows.split_with_sizes_symint({width, 2 * width});
  }

  // (L, B, parts·E) → parts tensors (L, B, E), each contiguous. Cutting the
  // heads before unbinding would save operations, and change the layout in
  // which the gradient meets the matrix product: the bits of in_proj's gradient
  // at E = 1.
  static std::vector<at::Tensor> split(const at::Tensor& projected,
                                       int64_t parts, int64_t /*heads*/,
                                       const AttentionLayer& /*layer*/) {
    if (parts == 1) return {projected};
    return projected
        .view_symint({projected.sym_size(0), projected.sym_size(1), parts,
                      projected.sym_size(2) / parts})
        .permute({2, 0, 1, 3})
        .contiguous()
        .unbind(0);
  }

  // (L, B, heads·D) → (B·heads, L, D), a view.
  static at::Tensor cut(const at::Tensor& rows, int64_t heads,
                        int64_t head_dim) {
    return rows
        .view_symint({rows.sym_size(0), rows.sym_size(1) * heads, head_dim})
        .transpose(0, 1);
  }

  // (L, B, G·D) → (B·G, L', D). The bias is repeated before heads are cut, as
  // PyTorch does: its gradient is a sum over the batch, and the shape of that
  // sum decides the last bit.
  static at::Tensor complete(at::Tensor rows, const at::Tensor& static_rows,
                             const at::Tensor& bias,
                             const AttentionLayer& layer) {
    if (bias.defined()) {
      rows = at::cat({rows, bias.repeat_symint({1, rows.sym_size(1), 1})});
    }
    rows = static_rows.defined()
               ? static_rows
               : cut(rows, num_kv_heads(layer), head_dim(layer));
    if (!layer.add_zero_attn) return rows;
    return at::cat(
        {rows, at::zeros_symint({rows.sym_size(0), 1, rows.sym_size(2)},
                                rows.options())},
        /*dim=*/1);
  }
};

// The kernels': views of what the products gave, (B, H, L, D).
struct KernelOrder {
  // A bias of another dtype is what PyTorch takes for some layouts of the
  // input.
  static at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& bias) {
    const bool fits =
        !bias.defined() || bias.scalar_type() == weight.scalar_type();
    return multihead::linear(input, weight,
                             fits ? bias : bias.to(weight.scalar_type()));
  }

  static at::Tensor projected_already(const at::Tensor& rows) { return rows; }

  // Views whose gradients are added, from 0 on: no −0 stays in their sum.
  static std::vector<at::Tensor> split_rows(
      const at::Tensor& rows, const std::vector<int64_t>& thirds) {
    const auto width = rows.sym_size(0) / 3;
    std::vector<at::Tensor> views;
    int64_t from = 0;
    for (const int64_t n : thirds) {
      views.push_back(rows.narrow_symint(0, from * width, n * width));
      from += n;
    }
    return views;
  }

  // (B, L, parts·heads·D), or (L, B, …), → parts tensors (B, heads, L, D),
  // views. Cut before they are turned, so that in backward their gradients,
  // which lie in memory as they do, come together in one copy.
  static std::vector<at::Tensor> split(const at::Tensor& projected,
                                       int64_t parts, int64_t heads,
                                       const AttentionLayer& layer) {
    std::vector<at::Tensor> rows =
        projected
            .reshape_symint({projected.sym_size(0), projected.sym_size(1),
                             parts, heads, head_dim(layer)})
            .unbind(2);
    for (at::Tensor& part : rows) {
      part = part.permute(layer.batch_first ? at::IntArrayRef({0, 2, 1, 3})
                                            : at::IntArrayRef({1, 2, 0, 3}));
    }
    return rows;
  }

  // (B, G, L, D) → (B, G, L', D)
  static at::Tensor complete(at::Tensor rows, const at::Tensor& static_rows,
                             const at::Tensor& bias,
                             const AttentionLayer& layer) {
    const auto batch_size = rows.sym_size(0);
    const int64_t heads = num_kv_heads(layer), width = head_dim(layer);
    if (bias.defined()) {
      rows = at::cat({rows, bias.view({1, heads, 1, width})
                                .to(rows.scalar_type())
                                .expand_symint({batch_size, -1, -1, -1})},
                     2);
    }
    if (static_rows.defined()) {
      rows = static_rows.unflatten_symint(0, {batch_size, heads});
    }
    if (!layer.add_zero_attn) return rows;
    return at::cat(
        {rows, at::zeros_symint({batch_size, heads, 1, width}, rows.options())},
        2);
  }
};

// ---- What both do ---------------------------------------------------------

template <class Order>
at::Tensor apply(const at::Tensor& input, const at::Tensor& weight,
                 const at::Tensor& bias) {
  if (!weight.defined()) return Order::projected_already(input);
  return Order::linear(input, weight, bias);
}

// The rows of in_proj for query, key and value, or for query and both others.
template <class Order>
std::vector<at::Tensor> parts(const at::Tensor& rows,
                              const std::vector<int64_t>& thirds) {
  if (!rows.defined()) return std::vector<at::Tensor>(thirds.size());
  return Order::split_rows(rows, thirds);
}

// One product for self-attention, two when key is value, three otherwise.
template <class Order>
Sequences project_packed(const Sequences& in, const AttentionLayer& layer) {
  const at::Tensor& weight = layer.in_proj_weight;
  const at::Tensor& bias = layer.in_proj_bias;
  const auto project = [&](const at::Tensor& input, const at::Tensor& w,
                           const at::Tensor& b, int64_t parts) {
    return Order::split(apply<Order>(input, w, b), parts, layer.num_heads,
                        layer);
  };
  if (in.key.is_same(in.value) && in.query.is_same(in.key)) {
    const auto parts = project(in.query, weight, bias, 3);
    return {parts[0], parts[1], parts[2]};
  }
  if (in.key.is_same(in.value)) {
    const auto w = parts<Order>(weight, {1, 2}), b = parts<Order>(bias, {1, 2});
    const at::Tensor query = project(in.query, w[0], b[0], 1)[0];
    const auto parts = project(in.key, w[1], b[1], 2);
    return {query, parts[0], parts[1]};
  }
  const auto w = parts<Order>(weight, {1, 1, 1}),
             b = parts<Order>(bias, {1, 1, 1});
  return {project(in.query, w[0], b[0], 1)[0],
          project(in.key, w[1], b[1], 1)[0],
          project(in.value, w[2], b[2], 1)[0]};
}

template <class Order>
Sequences project_separately(const Sequences& in, const AttentionLayer& layer) {
  const auto biases =
      layer.in_proj_bias.defined()
          ? layer.in_proj_bias.chunk(3)
          : std::vector<at::Tensor>{layer.q_proj_bias, layer.k_proj_bias,
                                    layer.v_proj_bias};
  const auto project = [&](const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& bias, int64_t heads) {
    return Order::split(apply<Order>(input, weight, bias), 1, heads, layer)[0];
  };
  const int64_t groups = num_kv_heads(layer);
  return {project(in.query, layer.q_proj_weight, biases[0], layer.num_heads),
          project(in.key, layer.k_proj_weight, biases[1], groups),
          project(in.value, layer.v_proj_weight, biases[2], groups)};
}

template <class Order>
Sequences project(const Sequences& inputs, const AttentionLayer& layer,
                  const ForwardOptions& options) {
  Sequences rows = layer.in_proj_weight.defined()
                       ? project_packed<Order>(inputs, layer)
                       : project_separately<Order>(inputs, layer);
  rows.key = Order::complete(rows.key, options.static_k(), layer.bias_k, layer);
  rows.value =
      Order::complete(rows.value, options.static_v(), layer.bias_v, layer);
  return rows;
}

}  // namespace

int64_t head_dim(const AttentionLayer& layer) {
  return layer.head_dim.value_or(layer.embed_dim / layer.num_heads);
}

int64_t num_kv_heads(const AttentionLayer& layer) {
  return layer.num_kv_heads.value_or(layer.num_heads);
}

Heads project_in(const Sequences& inputs, const AttentionLayer& layer,
                 const ForwardOptions& options) {
  const Sequences rows = project<TorchOrder>(inputs, layer, options);
  return {TorchOrder::cut(rows.query, layer.num_heads, head_dim(layer)),
          rows.key,
          rows.value,
          inputs.query.sym_size(1),
          layer.num_heads,
          num_kv_heads(layer)};
}

at::Tensor project_out(const at::Tensor& out, const Heads& heads,
                       const AttentionLayer& layer) {
  const auto query_length = out.sym_size(1);
  const at::Tensor merged = out.transpose(0, 1).reshape_symint(
      {query_length * heads.batch_size, heads.num_heads * out.sym_size(2)});
  const at::Tensor projected =
      layer.out_proj_weight.defined()
          ? apply<TorchOrder>(merged, layer.out_proj_weight,
                              layer.out_proj_bias)
          : merged;
  return projected.view_symint(
      {query_length, heads.batch_size, projected.sym_size(1)});
}

Sequences project_in_for_kernels(const Sequences& inputs,
                                 const AttentionLayer& layer,
                                 const ForwardOptions& options) {
  return project<KernelOrder>(inputs, layer, options);
}

at::Tensor project_out_of_kernels(const at::Tensor& out,
                                  const AttentionLayer& layer) {
  const at::Tensor merged =
      out.permute(layer.batch_first ? at::IntArrayRef({0, 2, 1, 3})
                                    : at::IntArrayRef({2, 0, 1, 3}))
          .flatten(2, 3);
  return apply<KernelOrder>(merged, layer.out_proj_weight, layer.out_proj_bias);
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
