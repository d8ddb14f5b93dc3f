// SPDX-License-Identifier: MIT
//
// multi_head_attention_forward, step by step: which path, masks, projections,
// heads, and the two ways to attend.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_native_multi_head_attention.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "multihead/attention/checks.h"
#include "multihead/attention/exact.h"
#include "multihead/attention/route.h"
#include "multihead/functional.h"
#include "multihead/layer/checks.h"
#include "multihead/layer/fused_layer.h"
#include "multihead/layer/masks.h"
#include "multihead/layer/projection.h"
#include "multihead/optional_tensor.h"

namespace multihead {
namespace {

using Forward = std::tuple<at::Tensor, at::Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// 0 and −inf for false and true; a float mask as it is.
at::Tensor additive(const at::Tensor& mask, at::ScalarType dtype) {
  if (!mask.defined() || !is_bool(mask)) return mask;
  return at::zeros_like(mask, mask.options().dtype(dtype))
      .masked_fill_(mask, -kInfinity);
}

// ---- PyTorch's inference path ---------------------------------------------

bool any_requires_grad(const at::Tensor& query, const AttentionLayer& layer) {
  if (!at::GradMode::is_enabled()) return false;
  for (const auto* x : {&query, &layer.in_proj_weight, &layer.in_proj_bias,
                        &layer.out_proj_weight, &layer.out_proj_bias}) {
    if (x->defined() && x->requires_grad()) return true;
  }
  return false;
}

bool layer_has_fast_path(const AttentionLayer& layer) {
  return layer.in_proj_weight.defined() && layer.in_proj_bias.defined() &&
         layer.out_proj_weight.defined() && !layer.training &&
         layer.num_heads % 2 == 0 && layer.batch_first &&
         !layer.bias_k.defined() && !layer.bias_v.defined() &&
         !layer.add_zero_attn && kv_heads(layer) == layer.num_heads;
}

// The conditions of torch.nn.MultiheadAttention.forward, and ours: under kAuto
// masked rows must not turn into NaN, and is_causal must not be forgotten; on
// the CPU the fused kernels are faster.
bool takes_fast_path(const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const AttentionLayer& layer,
                     const ForwardOptions& options) {
  const at::Tensor& mask = options.attn_mask();
  const at::Tensor& padding = options.key_padding_mask();
  const bool masked = mask.defined() || padding.defined();
  if (!options.fast_path() || current_backend() == Backend::kFused ||
      (current_backend() == Backend::kAuto && (masked || query.is_cpu())) ||
      (options.is_causal() && !mask.defined()) ||
      (mask.defined() && !is_bool(mask)) ||
      (padding.defined() && !is_bool(padding))) {
    return false;
  }
  const auto device = query.device().type();
  return query.dim() == 3 && query.is_same(key) && key.is_same(value) &&
         layer_has_fast_path(layer) &&
         query.scalar_type() == layer.in_proj_weight.scalar_type() &&
         query.scalar_type() == layer.in_proj_bias.scalar_type() &&
         !options.static_k().defined() && !options.static_v().defined() &&
         (device == at::kCPU || device == at::kCUDA ||
          device == at::kPrivateUse1) &&
         !at::autocast::is_autocast_enabled(at::kCUDA) &&
         !any_requires_grad(query, layer) && exact::is_plain(query);
}

Forward fast_path(const at::Tensor& query, const AttentionLayer& layer,
                  const ForwardOptions& options) {
  const auto dtype = query.scalar_type();
  at::Tensor mask = additive(options.attn_mask(), dtype);
  at::Tensor padding = additive(options.key_padding_mask(), dtype);
  std::optional<int64_t> kind;
  if (mask.defined()) {
    const auto batch_size = query.size(0), length = query.size(1);
    kind = 2;
    mask = mask.dim() == 3 ? mask.view({batch_size, -1, length, length})
                           : mask.view({1, 1, length, length})
                                 .expand({batch_size, layer.num_heads, -1, -1});
    if (padding.defined()) {
      mask = mask + padding.view({batch_size, 1, 1, length})
                        .expand({-1, layer.num_heads, -1, -1});
    }
  } else if (padding.defined()) {
    kind = 1;
    mask = padding;
  }
  return at::_native_multi_head_attention(
      query, query, query, layer.embed_dim, layer.num_heads,
      layer.in_proj_weight, layer.in_proj_bias, layer.out_proj_weight,
      layer.out_proj_bias, optional(mask), options.need_weights(),
      options.average_attn_weights(), kind);
}

// ---- The two ways to attend -----------------------------------------------

// Both masks as one to be added, (1 or B·H, 1 or Lq, Lk).
at::Tensor merge_additive(const LayerMasks& masks, const exact::Heads& heads) {
  if (!masks.padding.defined()) return masks.attn_mask;
  const auto key_length = masks.padding.sym_size(-1);
  const at::Tensor padding =
      masks.padding.view_symint({heads.batch_size, 1, 1, key_length})
          .expand_symint({-1, heads.num_heads, -1, -1})
          .reshape_symint({heads.batch_size * heads.num_heads, 1, key_length});
  return masks.attn_mask.defined() ? masks.attn_mask + padding : padding;
}

// torch.nn.functional.scaled_dot_product_attention on the heads:
// (B·H, Lq, D) from mask (1 or B·H, 1 or Lq, Lk).
at::Tensor attend_fused_by_pytorch(const exact::Heads& heads,
                                   const at::Tensor& mask, double dropout_p,
                                   bool is_causal) {
  const auto& [query, key, value, batch_size, num_heads, kv_heads] = heads;
  const auto by_head = [&](const at::Tensor& x, const c10::SymInt& n) {
    return x.view_symint({batch_size, n, x.sym_size(1), x.sym_size(2)});
  };
  at::Tensor mask4 = mask;
  if (mask.defined()) {
    mask4 =
        mask.sym_size(0) == 1
            ? mask.unsqueeze(0)
            : mask.view_symint({batch_size, num_heads, -1, mask.sym_size(-1)});
  }
  return at::scaled_dot_product_attention(
             by_head(query, num_heads), by_head(key, kv_heads),
             by_head(value, kv_heads), optional(mask4), dropout_p, is_causal,
             /*scale=*/std::nullopt, /*enable_gqa=*/num_heads != kv_heads)
      .flatten(0, 1);
}

exact::Attention attend_exactly(exact::Heads heads, LayerMasks masks,
                                const AttentionLayer& layer,
                                const ForwardOptions& options,
                                double dropout_p) {
  // PyTorch believes the hint, and drops the mask unread, only here.
  const bool trusts_hint =
      masks.is_causal && !masks.padding.defined() && !options.need_weights();
  const auto dtype = heads.query.scalar_type();
  masks.attn_mask = trusts_hint
                        ? at::Tensor()
                        : pad_mask(additive(masks.attn_mask, dtype), layer);
  masks.padding = pad_mask(additive(masks.padding, dtype), layer);
  const at::Tensor mask = merge_additive(masks, heads);
  if (!options.need_weights()) {
    return {
        attend_fused_by_pytorch(heads, mask, dropout_p, trusts_hint), {}, {}};
  }
  heads.key = exact::expand_groups(heads.key, heads);
  heads.value = exact::expand_groups(heads.value, heads);
  return exact::attention_as_pytorch(heads, mask, dropout_p);
}

exact::Attention attend(const exact::Heads& heads, const CallSizes& sizes,
                        const AttentionLayer& layer,
                        const ForwardOptions& options) {
  const double dropout_p = layer.training ? layer.dropout_p : 0.0;
  const LayerMasks masks = layer_masks(sizes, layer, options);
  if (current_backend() == Backend::kExact) {
    return attend_exactly(heads, masks, layer, options, dropout_p);
  }
  const auto width = static_cast<double>(head_width(layer));
  return exact::attention(heads,
                          {.scale = std::sqrt(1.0 / width),
                           .mask = merge(masks, sizes, layer),
                           .dropout_p = dropout_p},
                          /*with_logsumexp=*/false);
}

// ---- Layouts ---------------------------------------------------------------

Sequences sequence_first(const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, bool batch_first) {
  if (query.dim() == 2) {
    // Not shared, as in PyTorch: three products, even for self-attention.
    return {query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)};
  }
  const Sequences inputs{query, key, value};
  if (!batch_first) return inputs;
  return map_shared(inputs,
                    [](const at::Tensor& x) { return x.transpose(1, 0); });
}

// Lk, before the layer appends anything.
c10::SymInt given_keys(const Sequences& inputs, const ForwardOptions& options) {
  return options.static_k().defined() ? options.static_k().sym_size(1)
                                      : inputs.key.sym_size(0);
}

}  // namespace

Forward multi_head_attention_forward(const at::Tensor& query,
                                     const at::Tensor& key,
                                     const at::Tensor& value,
                                     const AttentionLayer& layer,
                                     const ForwardOptions& options) {
  constexpr auto* fn = "multi_head_attention_forward";
  check_defined(fn, query, key, value);
  check_mask_dtypes(options);
  const Route way = route(query, key, value, layer, options);
  if (way.way == Way::kPyTorch) return fast_path(query, layer, options);
  check_forward(query, key, value, layer, options);
  check_route(fn, way);
  if (way.way == Way::kFused) {
    return fused_forward(query, key, value, layer, options);
  }
  warn_of_all_weights(fn, query, way);

  const bool is_batched = query.dim() == 3;
  const Sequences inputs = sequence_first(query, key, value, layer.batch_first);
  const exact::Heads heads = project_in(inputs, layer, options);
  const exact::Attention attention =
      attend(heads,
             {heads.batch_size, heads.query.sym_size(1),
              given_keys(inputs, options), is_batched, query.device()},
             layer, options);

  at::Tensor out = project_out(attention.out, heads, layer);
  out = is_batched ? (layer.batch_first ? out.transpose(1, 0) : out)
                   : out.squeeze(1);
  if (!options.need_weights()) return {out, at::Tensor()};
  at::Tensor weights = attention.weights.view_symint(
      {heads.batch_size, heads.num_heads, attention.weights.sym_size(1),
       attention.weights.sym_size(2)});
  if (options.average_attn_weights()) weights = weights.mean(1);
  return {out, is_batched ? weights : weights.squeeze(0)};
}

Route route(const at::Tensor& query, const at::Tensor& key,
            const at::Tensor& value, const AttentionLayer& layer,
            const ForwardOptions& options) {
  const bool exact = current_backend() == Backend::kExact;
  std::string reason =
      exact ? kAskedForExact
            : kernel_refusal(tensors_of(query, key, value, layer, options),
                             query.scalar_type());
  if (takes_fast_path(query, key, value, layer, options)) {
    return {Way::kPyTorch, std::move(reason)};
  }
  return route_unless(std::move(reason),
                      exact ? Way::kTorchOrder : Way::kDefinition);
}

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

}  // namespace multihead
