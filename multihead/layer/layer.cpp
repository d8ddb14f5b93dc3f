// SPDX-License-Identifier: MIT
//
// Attention with its projections: check, route, run.
#include "multihead/attention/checks.h"
#include "multihead/attention/count.h"
#include "multihead/attention/definition.h"
#include "multihead/attention/provider.h"
#include "multihead/attention/route.h"
#include "multihead/functional.h"
#include "multihead/layer/cached_layer.h"
#include "multihead/layer/checks.h"
#include "multihead/layer/ways.h"

namespace multihead {
namespace {

HeadResults attend(Way way, const Heads& heads, const CallSizes& sizes,
                   const AttentionLayer& layer, const ForwardOptions& options) {
  const double dropout_p = layer.training ? layer.dropout_p : 0.0;
  const LayerMasks masks = layer_masks(sizes, layer, options);
  if (way == Way::kTorchOrder) {
    return attend_in_torch_order(heads, masks, layer, options, dropout_p);
  }
  const auto width = static_cast<double>(head_dim(layer));
  return definition::attention(heads, std::sqrt(1.0 / width),
                               merge(masks, sizes, layer), dropout_p);
}

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

// What a provider, whose keys are not those of this call alone, cannot give.
void check_without_provider(const AttentionLayer& layer,
                            const ForwardOptions& options) {
  constexpr auto* fn = "multi_head_attention_forward";
  if (options.need_weights()) check_no_provider(fn, "weights (need_weights)");
  if (options.attn_mask().defined()) {
    check_no_provider(fn, "attn_mask of a layer (is_causal, key_padding_mask)");
  }
  if (layer.bias_k.defined() || layer.bias_v.defined()) {
    check_no_provider(fn, "bias_k and bias_v");
  }
  if (layer.add_zero_attn) check_no_provider(fn, "add_zero_attn");
}

// Lk, before the layer appends anything.
c10::SymInt given_keys(const Sequences& inputs, const ForwardOptions& options) {
  return options.static_k().defined() ? options.static_k().sym_size(1)
                                      : inputs.key.sym_size(0);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> multi_head_attention_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionLayer& layer, const ForwardOptions& options) {
  constexpr auto* fn = "multi_head_attention_forward";
  if (options.cache() != nullptr) {
    check_no_provider(fn, "caches");
    TORCH_CHECK_TYPE(query.defined(), fn,
                     ": query must be a tensor, got None, an undefined one");
    check_mask_dtypes(options);
    return cached_forward(query, key, value, layer, options);
  }
  check_defined(fn, query, key, value);
  check_mask_dtypes(options);
  check_without_provider(layer, options);
  const Route way = route(query, key, value, layer, options);
  const SourceGuard source(Source::kModule);
  count(way);
  if (way.way == Way::kPyTorch) return fast_path(query, layer, options);
  check_forward(query, key, value, layer, options);
  check_route(fn, way);
  if (way.way == Way::kFused) {
    return fused_forward(query, key, value, layer, options);
  }
  warn_of_all_weights(fn, query, way);

  const bool is_batched = query.dim() == 3;
  const Sequences inputs = sequence_first(query, key, value, layer.batch_first);
  const Heads heads = project_in(inputs, layer, options);
  const HeadResults attention =
      attend(way.way, heads,
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
  if (current_provider() == nullptr &&
      takes_fast_path(query, key, value, layer, options)) {
    return {Way::kPyTorch, std::move(reason)};
  }
  return route_unless(std::move(reason),
                      exact ? Way::kTorchOrder : Way::kDefinition);
}

}  // namespace multihead
