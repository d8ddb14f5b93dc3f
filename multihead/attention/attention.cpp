// SPDX-License-Identifier: MIT
//
// Attention as a function: check, route, run.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include "multihead/attention/call.h"
#include "multihead/attention/checks.h"
#include "multihead/attention/count.h"
#include "multihead/attention/definition.h"
#include "multihead/attention/provider.h"
#include "multihead/attention/route.h"
#include "multihead/attention/storage.h"
#include "multihead/functional.h"
#include "multihead/optional_tensor.h"

namespace multihead {
namespace {

using call::autocast;

at::Tensor pytorchs(const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value, const AttentionOptions& options) {
  const BackendGuard not_installed(Backend::kExact);  // see install.h
  return at::scaled_dot_product_attention(
      query, key, value, optional(options.attn_mask), options.dropout_p,
      options.is_causal, options.scale, options.enable_gqa);
}

// Whether the kernels take key and value as they are: forward alone does.
bool reads_as_stored(const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const AttentionOptions& options) {
  if (!is_stored(query, key) && !is_stored(query, value)) return true;
  const bool recorded = call::is_recorded(query) || call::is_recorded(key) ||
                        call::is_recorded(value) || call::is_recorded(options);
  return !recorded && query.scalar_type() != at::kDouble;
}

std::tuple<at::Tensor, at::Tensor> attend(const at::Tensor& query,
                                          const at::Tensor& key,
                                          const at::Tensor& value,
                                          const AttentionOptions& options,
                                          bool with_lse) {
  constexpr auto* fn = "scaled_dot_product_attention";
  check_defined(fn, query, key, value);
  check_domains(options);
  const Route way = route(query, key, value, options, with_lse);
  const SourceGuard source(Source::kFunction);
  count(way);
  check_route(fn, way);
  if (way.way == Way::kFused) {
    const auto state = call::draw_dropout_state(options.dropout_p);
    if (const Provider* provider = current_provider()) {
      return provider->attention(query, key, value, options, state);
    }
    if (reads_as_stored(query, key, value, options)) {
      return call::run<call::FusedAttention>(query, key, value, options, state);
    }
    return call::run<call::FusedAttention>(
        query, restored(query, key), restored(query, value), options, state);
  }
  if (way.way == Way::kPyTorch) {
    const bool is_nested =
        query.is_nested() || key.is_nested() || value.is_nested();
    if (!is_nested) check_for_pytorch(key, value, options.enable_gqa);
    const at::Tensor out = pytorchs(query, key, value, options);
    // Not where it has raised.
    if (!is_nested) warn_of_all_weights(fn, query, way);
    return {out, {}};
  }
  const at::Tensor q = autocast(query), stored_key = autocast(key),
                   stored_value = autocast(value);
  check_attention(q, stored_key, stored_value, options);
  const at::Tensor k = restored(q, stored_key), v = restored(q, stored_value);
  warn_of_all_weights(fn, q, way);
  return definition::attention(q, k, v, options, with_lse);
}

}  // namespace

CausalAlignment causal_alignment_from_name(std::string_view name) {
  if (name == "top_left") return CausalAlignment::kTopLeft;
  if (name == "bottom_right") return CausalAlignment::kBottomRight;
  TORCH_CHECK_VALUE(false,
                    "scaled_dot_product_attention: causal_alignment must be "
                    "\"top_left\" or \"bottom_right\", got \"",
                    name, "\"");
}

at::Tensor scaled_dot_product_attention(const at::Tensor& query,
                                        const at::Tensor& key,
                                        const at::Tensor& value,
                                        const AttentionOptions& options) {
  return std::get<0>(attend(query, key, value, options, /*with_lse=*/false));
}

std::tuple<at::Tensor, at::Tensor> scaled_dot_product_attention_with_lse(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionOptions& options) {
  return attend(query, key, value, options, /*with_lse=*/true);
}

AttentionSummary attention_summary(const at::Tensor& query,
                                   const at::Tensor& key, int64_t k,
                                   const AttentionOptions& options) {
  constexpr auto* fn = "attention_summary";
  check_defined(fn, query, key, key);
  check_count(k);
  TORCH_CHECK_VALUE(options.dropout_p == 0.0,
                    "attention_summary: dropout_p must be 0, got ",
                    options.dropout_p);
  check_no_provider(fn, "attention_summary");
  const at::NoGradGuard no_grad;
  const at::Tensor q = autocast(query), rows = restored(q, autocast(key));
  const Route way = route(q, rows, rows, options);
  const SourceGuard source(Source::kFunction);
  count(way);
  if (way.way == Way::kFused) {  // the operators check
    const std::optional<at::Tensor> no_dropout;
    // Values without width: logsumexp alone.
    const auto logsumexp = std::get<1>(call::run<call::FusedAttention>(
        q, rows, rows.narrow(-1, 0, 0), options, no_dropout));
    const auto [weights, keys, entropy] =
        call::run<call::FusedAttentionSummary>(q, rows, logsumexp, k, options,
                                               no_dropout);
    return {weights, keys, entropy};
  }
  check_fused_attention(q, rows, rows, options);
  check_route(fn, way);
  warn_of_all_weights(fn, q, way);
  return definition::summary(q, rows, options, k);
}

}  // namespace multihead
