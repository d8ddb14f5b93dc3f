// SPDX-License-Identifier: MIT
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_native_multi_head_attention.h>

#include "multihead/attention/nonfinite.h"
#include "multihead/layer/ways.h"
#include "multihead/optional_tensor.h"

namespace multihead {
namespace {

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
         !layer.add_zero_attn && num_kv_heads(layer) == layer.num_heads;
}

}  // namespace

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
         !any_requires_grad(query, layer) && is_plain(query);
}

std::tuple<at::Tensor, at::Tensor> fast_path(const at::Tensor& query,
                                             const AttentionLayer& layer,
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

}  // namespace multihead
