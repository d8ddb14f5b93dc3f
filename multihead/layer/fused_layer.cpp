// SPDX-License-Identifier: MIT
#include "multihead/layer/fused_layer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "multihead/attention/call.h"
#include "multihead/layer/masks.h"
#include "multihead/layer/projection.h"
#include "multihead/optional_tensor.h"

namespace multihead {
namespace {

// Heads of one call: query (B, H, Lq, D), key and value (B, G, Lk, D).
struct CallHeads {
  at::Tensor query, key, value;
};

// A bias of another dtype is what PyTorch takes for some layouts of the input.
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                  const at::Tensor& bias) {
  if (!weight.defined()) return input;
  const bool fits =
      !bias.defined() || bias.scalar_type() == weight.scalar_type();
  return at::linear(input, weight,
                    optional(fits ? bias : bias.to(weight.scalar_type())));
}

// (B, L, parts·heads·D), or (L, B, …), → parts tensors (B, heads, L, D), views.
// Cut before they are turned, so that in backward their gradients, which lie in
// memory as they do, come together in one copy.
std::vector<at::Tensor> cut_heads(const at::Tensor& projected, int64_t parts,
                                  int64_t heads, const AttentionLayer& layer) {
  std::vector<at::Tensor> rows =
      projected
          .reshape_symint({projected.sym_size(0), projected.sym_size(1), parts,
                           heads, head_width(layer)})
          .unbind(2);
  for (at::Tensor& part : rows) {
    part = part.permute(layer.batch_first ? at::IntArrayRef({0, 2, 1, 3})
                                          : at::IntArrayRef({1, 2, 0, 3}));
  }
  return rows;
}

// One product for self-attention, two when key is value, else three.
CallHeads project_packed(const Sequences& in, const AttentionLayer& layer) {
  const at::Tensor& weight = layer.in_proj_weight;
  const at::Tensor& bias = layer.in_proj_bias;
  const auto part = [&](const at::Tensor& input, int64_t from, int64_t parts) {
    const int64_t width = layer.num_heads * head_width(layer);
    const auto rows = [&](const at::Tensor& x) {
      return x.defined() ? x.narrow(0, from * width, parts * width) : x;
    };
    return cut_heads(parts == 3 ? linear(input, weight, bias)
                                : linear(input, rows(weight), rows(bias)),
                     parts, layer.num_heads, layer);
  };
  if (in.key.is_same(in.value) && in.query.is_same(in.key)) {
    const auto heads = part(in.query, 0, 3);
    return {heads[0], heads[1], heads[2]};
  }
  if (in.key.is_same(in.value)) {
    const auto heads = part(in.key, 1, 2);
    return {part(in.query, 0, 1)[0], heads[0], heads[1]};
  }
  return {part(in.query, 0, 1)[0], part(in.key, 1, 1)[0],
          part(in.value, 2, 1)[0]};
}

CallHeads project_separately(const Sequences& in, const AttentionLayer& layer) {
  std::vector<at::Tensor> biases{layer.q_proj_bias, layer.k_proj_bias,
                                 layer.v_proj_bias};
  if (layer.in_proj_bias.defined()) biases = layer.in_proj_bias.chunk(3);
  const auto project = [&](const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& bias, int64_t heads) {
    return cut_heads(linear(input, weight, bias), 1, heads, layer)[0];
  };
  const int64_t kv = kv_heads(layer);
  return {project(in.query, layer.q_proj_weight, biases[0], layer.num_heads),
          project(in.key, layer.k_proj_weight, biases[1], kv),
          project(in.value, layer.v_proj_weight, biases[2], kv)};
}

// (B, G, L, D) with static_rows (B·G, L, D) in its place, if there are any, and
// with what the layer appends: bias (1, 1, G·D), zeros.
at::Tensor complete_rows(at::Tensor rows, const at::Tensor& static_rows,
                         const at::Tensor& bias, const AttentionLayer& layer) {
  const auto batch_size = rows.sym_size(0);
  const int64_t heads = kv_heads(layer), width = head_width(layer);
  if (bias.defined()) {
    rows = at::cat({rows, bias.view({1, heads, 1, width})
                              .to(rows.scalar_type())
                              .expand_symint({batch_size, -1, -1, -1})},
                   2);
  }
  if (static_rows.defined()) {
    rows = static_rows.unflatten_symint(0, {batch_size, heads});
  }
  if (layer.add_zero_attn) {
    rows = at::cat(
        {rows, at::zeros_symint({batch_size, heads, 1, width}, rows.options())},
        2);
  }
  return rows;
}

// (B, H, L, D) → (B, L, H·D), or (L, B, H·D): a view, since results lie in
// memory as queries do.
at::Tensor merge_heads(const at::Tensor& out, bool batch_first) {
  return out
      .permute(batch_first ? at::IntArrayRef({0, 2, 1, 3})
                           : at::IntArrayRef({2, 0, 1, 3}))
      .flatten(2, 3);
}

// PyTorch ignores a negative probability where it returns weights.
double dropout_of(const AttentionLayer& layer, const ForwardOptions& options) {
  if (!layer.training) return 0.0;
  return options.need_weights() ? std::max(layer.dropout_p, 0.0)
                                : layer.dropout_p;
}

}  // namespace

std::array<const at::Tensor*, 19> tensors_of(const at::Tensor& query,
                                             const at::Tensor& key,
                                             const at::Tensor& value,
                                             const AttentionLayer& layer,
                                             const ForwardOptions& options) {
  return {&query,
          &key,
          &value,
          &layer.in_proj_weight,
          &layer.q_proj_weight,
          &layer.k_proj_weight,
          &layer.v_proj_weight,
          &layer.in_proj_bias,
          &layer.q_proj_bias,
          &layer.k_proj_bias,
          &layer.v_proj_bias,
          &layer.bias_k,
          &layer.bias_v,
          &layer.out_proj_weight,
          &layer.out_proj_bias,
          &options.attn_mask(),
          &options.key_padding_mask(),
          &options.static_k(),
          &options.static_v()};
}

std::tuple<at::Tensor, at::Tensor> fused_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionLayer& layer, const ForwardOptions& options) {
  // Where nothing is differentiated, autograd need not keep account of views.
  std::optional<at::AutoDispatchBelowADInplaceOrView> past_autograd;
  if (!call::is_recorded(tensors_of(query, key, value, layer, options))) {
    past_autograd.emplace();
  }
  const int64_t batch_dim = layer.batch_first ? 0 : 1;
  const bool is_batched = query.dim() == 3;
  const Sequences given{query, key, value};
  const Sequences inputs =
      is_batched ? given : map_shared(given, [&](const at::Tensor& x) {
        return x.unsqueeze(batch_dim);
      });

  CallHeads heads = layer.in_proj_weight.defined()
                        ? project_packed(inputs, layer)
                        : project_separately(inputs, layer);
  const CallSizes sizes{heads.query.sym_size(0), heads.query.sym_size(2),
                        options.static_k().defined()
                            ? options.static_k().sym_size(1)
                            : heads.key.sym_size(2),
                        is_batched, query.device()};
  heads.key = complete_rows(heads.key, options.static_k(), layer.bias_k, layer);
  heads.value =
      complete_rows(heads.value, options.static_v(), layer.bias_v, layer);

  const Mask mask = merge(layer_masks(sizes, layer, options), sizes, layer);
  const AttentionOptions attention{.attn_mask = attention_mask(mask),
                                   .dropout_p = dropout_of(layer, options),
                                   .is_causal = mask.is_causal,
                                   .enable_gqa = true,
                                   .key_mask = mask.key_mask};
  const auto state = call::draw_dropout_state(attention.dropout_p);
  const auto [rows, logsumexp] = call::fused_attention(
      heads.query, heads.key, heads.value, attention, state);

  at::Tensor out = linear(merge_heads(rows, layer.batch_first),
                          layer.out_proj_weight, layer.out_proj_bias);
  if (!is_batched) out = out.squeeze(batch_dim);
  if (!options.need_weights()) return {out, at::Tensor()};
  const at::Tensor weights =
      call::attention_weights(heads.query, heads.key, logsumexp,
                              options.average_attn_weights(), attention, state);
  return {out, is_batched ? weights : weights.squeeze(0)};
}

}  // namespace multihead
