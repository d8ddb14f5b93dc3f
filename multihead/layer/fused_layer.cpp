// SPDX-License-Identifier: MIT
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "multihead/attention/call.h"
#include "multihead/attention/provider.h"
#include "multihead/layer/ways.h"

namespace multihead {
namespace {

// PyTorch ignores a negative probability where it returns weights.
double dropout_of(const AttentionLayer& layer, const ForwardOptions& options) {
  if (!layer.training) return 0.0;
  return options.need_weights() ? std::max(layer.dropout_p, 0.0)
                                : layer.dropout_p;
}

// int64 (2), or (7) for a part of a layer's heads.
std::optional<at::Tensor> draw_state(double dropout_p,
                                     const AttentionLayer& layer) {
  auto state = call::draw_dropout_state(dropout_p);
  if (!state || !layer.heads_in_all) return state;
  const auto number = [](int64_t value) {
    return at::full({1}, value, at::kLong);
  };
  const at::Tensor zero = number(0);
  return at::cat({*state, zero, number(layer.first_head),
                  number(*layer.heads_in_all), zero, zero});
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
  const auto tensors = tensors_of(query, key, value, layer, options);
  const auto recorded = [](const at::Tensor* x) {
    return call::is_recorded(*x);
  };
  if (std::none_of(tensors.begin(), tensors.end(), recorded)) {
    past_autograd.emplace();
  }
  const int64_t batch_dim = layer.batch_first ? 0 : 1;
  const bool is_batched = query.dim() == 3;
  const Sequences given{query, key, value};
  const Sequences inputs =
      is_batched ? given : map_shared(given, [&](const at::Tensor& x) {
        return x.unsqueeze(batch_dim);
      });

  const Sequences heads = project_in_for_kernels(inputs, layer, options);
  const CallSizes sizes{heads.query.sym_size(0), heads.query.sym_size(2),
                        options.static_k().defined()
                            ? options.static_k().sym_size(1)
                            : inputs.key.sym_size(1 - batch_dim),
                        is_batched, query.device()};
  const Mask mask = merge(layer_masks(sizes, layer, options), sizes, layer);
  AttentionOptions attention{.attn_mask = attention_mask(mask),
                             .dropout_p = dropout_of(layer, options),
                             .is_causal = mask.is_causal,
                             .enable_gqa = true,
                             .key_mask = mask.key_mask};
  const auto state = draw_state(attention.dropout_p, layer);
  const Provider* provider = current_provider();
  if (provider != nullptr && attention.attn_mask.defined()) {
    // What key_padding_mask adds.
    attention.attn_mask = provider->mask_of_all_keys(attention.attn_mask);
  }
  const auto [rows, logsumexp] =
      provider != nullptr
          ? provider->attention(heads.query, heads.key, heads.value, attention,
                                state)
          : call::run<call::FusedAttention>(heads.query, heads.key, heads.value,
                                            attention, state);

  at::Tensor out = project_out_of_kernels(rows, layer);
  if (!is_batched) out = out.squeeze(batch_dim);
  if (!options.need_weights()) return {out, at::Tensor()};
  const at::Tensor weights = call::run<call::AttentionWeights>(
      heads.query, heads.key, logsumexp, options.average_attn_weights(),
      attention, state);
  return {out, is_batched ? weights : weights.squeeze(0)};
}

}  // namespace multihead
