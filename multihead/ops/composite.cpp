// SPDX-License-Identifier: MIT
//
// The operators that are composites of ATen operations and of the fused
// operators: autograd, autocast, meta and torch.compile see through them.
#include <torch/library.h>

#include <memory>
#include <vector>

#include "multihead/attention/fields.h"
#include "multihead/distributed.h"
#include "multihead/errors.h"
#include "multihead/functional.h"
#include "multihead/install.h"
#include "multihead/layer/checks.h"
#include "multihead/layer/projection.h"
#include "multihead/optional_tensor.h"
#include "multihead/stats.h"

namespace multihead {
namespace {

using at::Tensor;
using OptionalTensor = const std::optional<Tensor>&;

using Result = std::tuple<Tensor, std::optional<Tensor>>;

Result scaled_dot_product_attention_op(const Tensor& query, const Tensor& key,
                                       const Tensor& value,
                                       const AttentionOptions& options,
                                       bool return_lse,
                                       std::string_view backend) {
  const BackendGuard guard(backend_from_name(backend));
  if (!return_lse) {
    return {multihead::scaled_dot_product_attention(query, key, value, options),
            std::nullopt};
  }
  return scaled_dot_product_attention_with_lse(query, key, value, options);
}

// The options that a varlen operator has; `fn` begins an error.
VarlenOptions varlen_options(const char* fn, double dropout_p, bool is_causal,
                             std::optional<double> scale,
                             std::string_view causal_alignment,
                             at::OptionalIntArrayRef window,
                             OptionalTensor key_lengths,
                             std::optional<double> softcap,
                             OptionalTensor alibi_slopes,
                             OptionalTensor sinks) {
  TORCH_CHECK_VALUE(
      causal_alignment == "top_left" || causal_alignment == "bottom_right", fn,
      ": causal_alignment must be \"top_left\" or \"bottom_right\", got \"",
      causal_alignment, "\"");
  TORCH_CHECK_VALUE(!window || window->size() == 2, fn,
                    ": window must be two sizes, got ", *window);
  return {.dropout_p = dropout_p,
          .is_causal = is_causal,
          .scale = scale,
          .causal_alignment = causal_alignment_from_name(causal_alignment),
          .window = fields::Kind<fields::Window>::unpack(window),
          .key_lengths = or_undefined(key_lengths),
          .softcap = softcap,
          .alibi_slopes = or_undefined(alibi_slopes),
          .sinks = or_undefined(sinks)};
}

Result varlen_attention_op(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& cu_seqlens_q, OptionalTensor cu_seqlens_k, double dropout_p,
    bool is_causal, std::optional<double> scale,
    std::string_view causal_alignment, at::OptionalIntArrayRef window,
    OptionalTensor key_lengths, std::optional<double> softcap,
    OptionalTensor alibi_slopes, OptionalTensor sinks,
    OptionalTensor block_table, bool return_lse, std::string_view backend) {
  const BackendGuard guard(backend_from_name(backend));
  VarlenOptions options = varlen_options(
      "varlen_attention", dropout_p, is_causal, scale, causal_alignment, window,
      key_lengths, softcap, alibi_slopes, sinks);
  options.block_table = or_undefined(block_table);
  const Tensor cu_k = or_undefined(cu_seqlens_k);
  if (!return_lse) {
    return {multihead::varlen_attention(query, key, value, cu_seqlens_q, cu_k,
                                        options),
            std::nullopt};
  }
  return varlen_attention_with_lse(query, key, value, cu_seqlens_q, cu_k,
                                   options);
}

Tensor plain_attention_op(const Tensor& query, const Tensor& key,
                          const Tensor& value, OptionalTensor attn_mask,
                          double dropout_p, bool is_causal,
                          std::optional<double> scale, bool enable_gqa) {
  return multihead::scaled_dot_product_attention(
      query, key, value,
      {.attn_mask = or_undefined(attn_mask),
       .dropout_p = dropout_p,
       .is_causal = is_causal,
       .scale = scale,
       .enable_gqa = enable_gqa});
}

std::tuple<std::string, std::string> route_op(const Tensor& query,
                                              const Tensor& key,
                                              const Tensor& value,
                                              const AttentionOptions& options,
                                              bool return_lse,
                                              std::string_view backend) {
  const BackendGuard guard(backend_from_name(backend));
  const Route way = route(query, key, value, options, return_lse);
  return {name_of(way.way), way.reason};
}

std::tuple<Tensor, Tensor, Tensor> attention_summary_op(
    const Tensor& query, const Tensor& key, int64_t k,
    const AttentionOptions& options, std::string_view backend) {
  const BackendGuard guard(backend_from_name(backend));
  auto [weights, keys, entropy] =
      multihead::attention_summary(query, key, k, options);
  return {weights, keys, entropy};
}

using InParallel = decltype(&ring_attention_with_lse);
template <InParallel attend>
Result parallel_attention_op(const Tensor& query, const Tensor& key,
                             const Tensor& value,
                             const AttentionOptions& options,
                             std::string_view group, std::string_view order,
                             bool return_lse) {
  auto [out, logsumexp] = attend(query, key, value, std::string(group), options,
                                 token_order_from_name(order));
  if (!return_lse) return {out, std::nullopt};
  return {out, logsumexp};
}

using VarlenInParallel = decltype(&ring_varlen_attention_with_lse);
template <VarlenInParallel attend>
Result parallel_varlen_attention_op(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, double dropout_p,
    bool is_causal, std::optional<double> scale,
    std::string_view causal_alignment, at::OptionalIntArrayRef window,
    OptionalTensor key_lengths, std::optional<double> softcap,
    OptionalTensor alibi_slopes, OptionalTensor sinks, std::string_view group,
    std::string_view order, bool return_lse) {
  auto [out, logsumexp] =
      attend(query, key, value, cu_seqlens_q, cu_seqlens_k, std::string(group),
             varlen_options("varlen_attention", dropout_p, is_causal, scale,
                            causal_alignment, window, key_lengths, softcap,
                            alibi_slopes, sinks),
             token_order_from_name(order));
  if (!return_lse) return {out, std::nullopt};
  return {out, logsumexp};
}

// Those that Python has entered in this thread.
thread_local std::vector<std::unique_ptr<ContextParallelGuard>> contexts;

void enter_context_parallel(std::string_view group, std::string_view order,
                            std::string_view method) {
  contexts.push_back(std::make_unique<ContextParallelGuard>(
      std::string(group), token_order_from_name(order),
      context_method_from_name(method)));
}

void leave_context_parallel() {
  TORCH_CHECK(!contexts.empty(),
              "leave_context_parallel: calls must follow as many of "
              "enter_context_parallel in one thread, got one more");
  contexts.pop_back();
}

ForwardOptions forward_options(OptionalTensor key_padding_mask,
                               bool need_weights, OptionalTensor attn_mask,
                               bool average_attn_weights, bool is_causal) {
  return ForwardOptions()
      .key_padding_mask(or_undefined(key_padding_mask))
      .need_weights(need_weights)
      .attn_mask(or_undefined(attn_mask))
      .average_attn_weights(average_attn_weights)
      .is_causal(is_causal);
}

Result forward(const Tensor& query, const Tensor& key, const Tensor& value,
               const AttentionLayer& layer, const ForwardOptions& options) {
  const auto [out, weights] = multihead::multi_head_attention_forward(
      query, key, value, layer, options);
  return {out, optional(weights)};
}

Result multi_head_attention_forward_op(
    const Tensor& query, const Tensor& key, const Tensor& value,
    int64_t embed_dim_to_check, int64_t num_heads,
    OptionalTensor in_proj_weight, OptionalTensor in_proj_bias,
    OptionalTensor bias_k, OptionalTensor bias_v, bool add_zero_attn,
    double dropout_p, OptionalTensor out_proj_weight,
    OptionalTensor out_proj_bias, bool training,
    OptionalTensor key_padding_mask, bool need_weights,
    OptionalTensor attn_mask, bool use_separate_proj_weight,
    OptionalTensor q_proj_weight, OptionalTensor k_proj_weight,
    OptionalTensor v_proj_weight, OptionalTensor static_k,
    OptionalTensor static_v, bool average_attn_weights, bool is_causal,
    bool batch_first, bool fast_path, std::string_view backend) {
  const BackendGuard guard(backend_from_name(backend));
  AttentionLayer layer{.embed_dim = embed_dim_to_check,
                       .num_heads = num_heads,
                       .in_proj_bias = or_undefined(in_proj_bias),
                       .out_proj_weight = or_undefined(out_proj_weight),
                       .out_proj_bias = or_undefined(out_proj_bias),
                       .bias_k = or_undefined(bias_k),
                       .bias_v = or_undefined(bias_v),
                       .add_zero_attn = add_zero_attn,
                       .dropout_p = dropout_p,
                       .training = training,
                       .batch_first = batch_first};
  if (use_separate_proj_weight) {
    layer.q_proj_weight = or_undefined(q_proj_weight);
    layer.k_proj_weight = or_undefined(k_proj_weight);
    layer.v_proj_weight = or_undefined(v_proj_weight);
  } else {
    MULTIHEAD_ASSERT(
        in_proj_weight,
        "use_separate_proj_weight is False but in_proj_weight is None");
    layer.in_proj_weight = *in_proj_weight;
  }
  return forward(query, key, value, layer,
                 forward_options(key_padding_mask, need_weights, attn_mask,
                                 average_attn_weights, is_causal)
                     .static_k(or_undefined(static_k))
                     .static_v(or_undefined(static_v))
                     .fast_path(fast_path));
}

Result grouped_query_attention_forward_op(
    const Tensor& query, const Tensor& key, const Tensor& value,
    int64_t num_heads, int64_t num_kv_heads, const Tensor& q_proj_weight,
    OptionalTensor q_proj_bias, const Tensor& k_proj_weight,
    OptionalTensor k_proj_bias, const Tensor& v_proj_weight,
    OptionalTensor v_proj_bias, const Tensor& out_proj_weight,
    OptionalTensor out_proj_bias, double dropout_p, bool training,
    OptionalTensor key_padding_mask, bool need_weights,
    OptionalTensor attn_mask, bool average_attn_weights, bool is_causal,
    bool batch_first, std::string_view backend) {
  const BackendGuard guard(backend_from_name(backend));
  TORCH_CHECK_VALUE(num_heads > 0,
                    "grouped_query_attention_forward: num_heads must be "
                    "greater than 0, got ",
                    num_heads);
  const AttentionLayer layer{.embed_dim = out_proj_weight.size(0),
                             .num_heads = num_heads,
                             .num_kv_heads = num_kv_heads,
                             .head_dim = q_proj_weight.size(0) / num_heads,
                             .q_proj_weight = q_proj_weight,
                             .k_proj_weight = k_proj_weight,
                             .v_proj_weight = v_proj_weight,
                             .q_proj_bias = or_undefined(q_proj_bias),
                             .k_proj_bias = or_undefined(k_proj_bias),
                             .v_proj_bias = or_undefined(v_proj_bias),
                             .out_proj_weight = out_proj_weight,
                             .out_proj_bias = or_undefined(out_proj_bias),
                             .dropout_p = dropout_p,
                             .training = training,
                             .batch_first = batch_first};
  return forward(query, key, value, layer,
                 forward_options(key_padding_mask, need_weights, attn_mask,
                                 average_attn_weights, is_causal));
}

// What lies between the projections of a layer that computes those itself.
Result projected_attention_forward_op(
    const Tensor& query, const Tensor& key, const Tensor& value,
    int64_t head_dim, double dropout_p, bool training,
    OptionalTensor key_padding_mask, bool need_weights,
    OptionalTensor attn_mask, bool average_attn_weights, bool is_causal,
    bool batch_first, std::optional<int64_t> heads_in_all, int64_t first_head,
    std::string_view backend) {
  const BackendGuard guard(backend_from_name(backend));
  TORCH_CHECK_VALUE(head_dim > 0,
                    "projected_attention_forward: head_dim must be greater "
                    "than 0, got ",
                    head_dim);
  const int64_t num_heads = query.size(-1) / head_dim;
  TORCH_CHECK_VALUE(
      !heads_in_all ||
          (first_head >= 0 && first_head <= *heads_in_all - num_heads),
      "projected_attention_forward: first_head must be between 0 and "
      "heads_in_all less the heads of query, ",
      heads_in_all.value_or(0) - num_heads, ", got ", first_head);
  const AttentionLayer layer{.embed_dim = num_heads * head_dim,
                             .num_heads = num_heads,
                             .num_kv_heads = key.size(-1) / head_dim,
                             .head_dim = head_dim,
                             .is_projected = true,
                             .dropout_p = dropout_p,
                             .training = training,
                             .batch_first = batch_first,
                             .heads_in_all = heads_in_all,
                             .first_head = first_head};
  return forward(query, key, value, layer,
                 forward_options(key_padding_mask, need_weights, attn_mask,
                                 average_attn_weights, is_causal));
}

int64_t head_dim_op(int64_t embed_dim, int64_t num_heads, int64_t num_kv_heads,
                    std::optional<int64_t> head_dim) {
  const AttentionLayer layer{.embed_dim = embed_dim,
                             .num_heads = num_heads,
                             .num_kv_heads = num_kv_heads,
                             .head_dim = head_dim};
  check_layer_sizes(layer);
  return multihead::head_dim(layer);
}

std::tuple<std::vector<std::string>, std::vector<std::string>,
           std::vector<std::string>, std::vector<int64_t>>
stats_op() {
  std::vector<std::string> sources, ways, reasons;
  std::vector<int64_t> calls;
  for (CallCount& count : stats()) {
    sources.push_back(std::move(count.source));
    ways.push_back(std::move(count.way));
    reasons.push_back(std::move(count.reason));
    calls.push_back(count.calls);
  }
  return {sources, ways, reasons, calls};
}

template <typename Library>
void implement(Library& m) {
  using fields::implementation;
  m.impl("scaled_dot_product_attention",
         implementation<&scaled_dot_product_attention_op>);
  m.impl("scaled_dot_product_attention.plain", &plain_attention_op);
  m.impl("varlen_attention", &varlen_attention_op);
  m.impl("ring_attention",
         implementation<&parallel_attention_op<&ring_attention_with_lse>>);
  m.impl("ring_varlen_attention",
         &parallel_varlen_attention_op<&ring_varlen_attention_with_lse>);
  m.impl("ulysses_attention",
         implementation<&parallel_attention_op<&ulysses_attention_with_lse>>);
  m.impl("ulysses_varlen_attention",
         &parallel_varlen_attention_op<&ulysses_varlen_attention_with_lse>);
  m.impl("merge_attention", &merge_attention);
  m.impl("attention_summary", implementation<&attention_summary_op>);
  m.impl("route", implementation<&route_op>);
  m.impl("multi_head_attention_forward", &multi_head_attention_forward_op);
  m.impl("grouped_query_attention_forward",
         &grouped_query_attention_forward_op);
  m.impl("projected_attention_forward", &projected_attention_forward_op);
  m.impl("pool_heads", &pool_heads);
  m.impl("repeat_heads", &repeat_heads);
}

}  // namespace

TORCH_LIBRARY_IMPL(multihead, CompositeImplicitAutograd, m) {
  implement(m);
  m.impl("head_dim", &head_dim_op);
  m.impl("install", [](bool linear, bool varlen) {
    install({.linear = linear, .varlen = varlen});
  });
  m.impl("uninstall", &uninstall);
  m.impl("is_installed", &is_installed);
  m.impl("enter_installed", [](bool linear, bool varlen) {
    enter_installed({.linear = linear, .varlen = varlen});
  });
  m.impl("leave_installed", [](bool linear, bool varlen) {
    leave_installed({.linear = linear, .varlen = varlen});
  });
  m.impl("enter_varlen", &enter_varlen);
  m.impl("leave_varlen", &leave_varlen);
  m.impl("why_not_linear", &why_not_linear);
  m.impl("token_positions", [](int64_t length, int64_t rank, int64_t processes,
                               std::string_view order) {
    return token_positions(length, static_cast<int>(rank),
                           static_cast<int>(processes),
                           token_order_from_name(order));
  });
  m.impl("enter_context_parallel", &enter_context_parallel);
  m.impl("leave_context_parallel", &leave_context_parallel);
  m.impl("is_context_parallel", &is_context_parallel);
  m.impl("stats", &stats_op);
  m.impl("reset_stats", &reset_stats);
}

// vmap: the same operations on tensors with a hidden dimension, no loop.
TORCH_LIBRARY_IMPL(multihead, FuncTorchBatchedDecomposition, m) {
  implement(m);
}

}  // namespace multihead
