// SPDX-License-Identifier: MIT
//
// The operators, torch.ops.multihead.*: the library's table of contents, and
// what Python and exported graphs call. Most are composites of ATen operations
// and of the fused operators: autograd, autocast, meta and torch.compile
// see through them. The fused operators are implemented in the files of their
// dispatch keys.
#include <torch/library.h>

#include <algorithm>

#include "multihead/attention/checks.h"
#include "multihead/errors.h"
#include "multihead/explain.h"
#include "multihead/functional.h"
#include "multihead/layer/projection.h"
#include "multihead/ops/rules.h"
#include "multihead/optional_tensor.h"
#include "multihead/report.h"

namespace multihead {
namespace {

using at::Tensor;
using OptionalTensor = const std::optional<Tensor>&;

using Result = std::tuple<Tensor, std::optional<Tensor>>;

Result scaled_dot_product_attention_op(
    const Tensor& query, const Tensor& key, const Tensor& value,
    OptionalTensor attn_mask, double dropout_p, bool is_causal,
    std::optional<double> scale, bool enable_gqa,
    std::string_view causal_alignment, OptionalTensor query_offset,
    at::OptionalIntArrayRef window, OptionalTensor key_lengths,
    OptionalTensor key_mask, std::optional<double> softcap,
    OptionalTensor alibi_slopes, OptionalTensor sinks, bool return_lse,
    std::string_view backend) {
  const BackendGuard guard(backend_from_name(backend));
  const AttentionOptions options =
      ops::options_of({attn_mask, dropout_p, is_causal, scale, enable_gqa,
                       causal_alignment, query_offset, window, key_lengths,
                       key_mask, softcap, alibi_slopes, sinks});
  if (!return_lse) {
    return {multihead::scaled_dot_product_attention(query, key, value, options),
            std::nullopt};
  }
  return scaled_dot_product_attention_with_lse(query, key, value, options);
}

std::tuple<Tensor, Tensor, Tensor> summarize_attention_op(
    const Tensor& query, const Tensor& key, int64_t k, OptionalTensor attn_mask,
    bool is_causal, std::optional<double> scale, bool enable_gqa,
    std::string_view causal_alignment, OptionalTensor query_offset,
    at::OptionalIntArrayRef window, OptionalTensor key_lengths,
    OptionalTensor key_mask, std::optional<double> softcap,
    OptionalTensor alibi_slopes, OptionalTensor sinks,
    std::string_view backend) {
  const BackendGuard guard(backend_from_name(backend));
  auto [weights, keys, entropy] = multihead::attention_summary(
      query, key, k,
      ops::options_of({attn_mask, /*dropout_p=*/0.0, is_causal, scale,
                       enable_gqa, causal_alignment, query_offset, window,
                       key_lengths, key_mask, softcap, alibi_slopes, sinks}));
  return {weights, keys, entropy};
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
  const auto [out, weights] = multihead::multi_head_attention_forward(
      query, key, value, layer,
      forward_options(key_padding_mask, need_weights, attn_mask,
                      average_attn_weights, is_causal)
          .static_k(or_undefined(static_k))
          .static_v(or_undefined(static_v))
          .fast_path(fast_path));
  return {out, optional(weights)};
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
  const auto [out, weights] = multihead::multi_head_attention_forward(
      query, key, value, layer,
      forward_options(key_padding_mask, need_weights, attn_mask,
                      average_attn_weights, is_causal));
  return {out, optional(weights)};
}

// What lies between the projections of a layer that computes those itself.
Result projected_attention_forward_op(
    const Tensor& query, const Tensor& key, const Tensor& value,
    int64_t head_dim, double dropout_p, bool training,
    OptionalTensor key_padding_mask, bool need_weights,
    OptionalTensor attn_mask, bool average_attn_weights, bool is_causal,
    bool batch_first, std::string_view backend) {
  const BackendGuard guard(backend_from_name(backend));
  TORCH_CHECK_VALUE(head_dim > 0,
                    "projected_attention_forward: head_dim must be greater "
                    "than 0, got ",
                    head_dim);
  const int64_t num_heads = query.size(-1) / head_dim;
  const AttentionLayer layer{.embed_dim = num_heads * head_dim,
                             .num_heads = num_heads,
                             .num_kv_heads = key.size(-1) / head_dim,
                             .head_dim = head_dim,
                             .is_projected = true,
                             .dropout_p = dropout_p,
                             .training = training,
                             .batch_first = batch_first};
  const auto [out, weights] = multihead::multi_head_attention_forward(
      query, key, value, layer,
      forward_options(key_padding_mask, need_weights, attn_mask,
                      average_attn_weights, is_causal));
  return {out, optional(weights)};
}

// Beside the arguments of scaled_dot_product_attention, a dropout_state, which
// changes nothing.
template <class RuleTypes>
struct WhyNotFused;
template <class... R>
struct WhyNotFused<ops::Types<R...>> {
  static std::optional<std::string> op(const Tensor& query, const Tensor& key,
                                       const Tensor& value, R... rules) {
    return why_not_fused(query, key, value,
                         ops::options_of(ops::Rules{rules...}));
  }
};

int64_t head_width_op(int64_t embed_dim, int64_t num_heads,
                      int64_t num_kv_heads, std::optional<int64_t> head_dim) {
  const AttentionLayer layer{.embed_dim = embed_dim,
                             .num_heads = num_heads,
                             .num_kv_heads = num_kv_heads,
                             .head_dim = head_dim};
  check_layer_sizes(layer);
  return head_width(layer);
}

// Runs of somebody's attention, tensors and facts by name, as explain.h has
// them; the verdict as JSON.
std::string explain_op(
    const c10::List<c10::Dict<std::string, Tensor>>& observations,
    const c10::List<c10::Dict<std::string, std::string>>& metadata) {
  TORCH_CHECK_VALUE(observations.size() == metadata.size(),
                    "explain: metadata must have one entry for each of the ",
                    observations.size(), " observations, got ",
                    metadata.size());
  std::vector<Observation> all(observations.size());
  for (size_t i = 0; i < all.size(); ++i) {
    const auto tensors = observations.get(i);
    const auto facts = metadata.get(i);
    for (const auto& entry : tensors) {
      all[i].tensors[entry.key()] = entry.value();
    }
    for (const auto& entry : facts) {
      all[i].metadata[entry.key()] = entry.value();
    }
  }
  return to_json(explain(all));
}

std::string render_report_op(const std::string& report, std::string_view format,
                             int64_t width) {
  return render_report(report, report_format_from_name(format),
                       static_cast<int>(std::clamp<int64_t>(width, 0, 1000)));
}

template <typename Library>
void implement(Library& m) {
  m.impl("scaled_dot_product_attention", &scaled_dot_product_attention_op);
  m.impl("summarize_attention", &summarize_attention_op);
  m.impl("multi_head_attention_forward", &multi_head_attention_forward_op);
  m.impl("grouped_query_attention_forward",
         &grouped_query_attention_forward_op);
  m.impl("projected_attention_forward", &projected_attention_forward_op);
  m.impl("why_not_fused", &WhyNotFused<ops::RuleTypes>::op);
  m.impl("pool_heads", &pool_heads);
  m.impl("repeat_heads", &repeat_heads);
}

// The kernels. Their derivatives are in autograd.cpp.
void define_fused(torch::Library& m, const std::vector<at::Tag>& tags) {
  const auto define = [&](const std::string& leading,
                          const std::string& results) {
    m.def((leading + ", " + ops::kRulesSchema + ") -> " + results).c_str(),
          tags);
  };
  define("fused_attention(Tensor query, Tensor key, Tensor value",
         "(Tensor out, Tensor logsumexp)");
  // Gradients of Σ out·dout + Σ logsumexp·dlogsumexp; `needs` says of which
  // arguments, in the order of the results. What is not needed is undefined.
  // To a derivative of this, out and logsumexp are functions of the rest.
  define(
      "fused_attention_backward(Tensor dout, Tensor? dlogsumexp, Tensor query, "
      "Tensor key, Tensor value, Tensor out, Tensor logsumexp, bool[6] needs",
      "(Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dattn_mask, "
      "Tensor dalibi_slopes, Tensor dsinks)");
  define(
      "attention_weights(Tensor query, Tensor key, Tensor logsumexp, "
      "bool average_attn_weights",
      "Tensor");
  define("attention_summary(Tensor query, Tensor key, Tensor logsumexp, int k",
         "(Tensor weights, Tensor keys, Tensor entropy)");
}

// About somebody's attention; no kernel of ours has a part in them.
void define_explain(torch::Library& m, const std::vector<at::Tag>& tags) {
  m.def(
      "explain(Dict(str, Tensor)[] observations, Dict(str, str)[] metadata) "
      "-> str",
      tags);
  // What explain says, as text for people; report.h.
  m.def("render_report(str report, str format=\"text\", int width=80) -> str",
        tags);
}

// Attention with its projections, and between them.
void define_layers(torch::Library& m, const std::vector<at::Tag>& tags) {
  m.def(
      "multi_head_attention_forward(Tensor query, Tensor key, Tensor value, "
      "int embed_dim_to_check, int num_heads, Tensor? in_proj_weight, "
      "Tensor? in_proj_bias, Tensor? bias_k, Tensor? bias_v, "
      "bool add_zero_attn, float dropout_p, Tensor? out_proj_weight, "
      "Tensor? out_proj_bias, bool training=True, "
      "Tensor? key_padding_mask=None, bool need_weights=True, "
      "Tensor? attn_mask=None, bool use_separate_proj_weight=False, "
      "Tensor? q_proj_weight=None, Tensor? k_proj_weight=None, "
      "Tensor? v_proj_weight=None, Tensor? static_k=None, "
      "Tensor? static_v=None, bool average_attn_weights=True, "
      "bool is_causal=False, *, bool batch_first=False, bool fast_path=True, "
      "str backend=\"auto\") -> (Tensor out, Tensor? weights)",
      tags);
  m.def(
      "grouped_query_attention_forward(Tensor query, Tensor key, Tensor value, "
      "int num_heads, int num_kv_heads, Tensor q_proj_weight, "
      "Tensor? q_proj_bias, Tensor k_proj_weight, Tensor? k_proj_bias, "
      "Tensor v_proj_weight, Tensor? v_proj_bias, Tensor out_proj_weight, "
      "Tensor? out_proj_bias, float dropout_p=0.0, bool training=True, "
      "Tensor? key_padding_mask=None, bool need_weights=True, "
      "Tensor? attn_mask=None, bool average_attn_weights=True, "
      "bool is_causal=False, *, bool batch_first=False, "
      "str backend=\"auto\") -> (Tensor out, Tensor? weights)",
      tags);
  // Between the projections: query (Lq, B, H·D), key and value (Lk, B, G·D),
  // H and G as many as there are → (Lq, B, H·D).
  m.def(
      "projected_attention_forward(Tensor query, Tensor key, Tensor value, "
      "int head_dim, float dropout_p=0.0, bool training=True, "
      "Tensor? key_padding_mask=None, bool need_weights=True, "
      "Tensor? attn_mask=None, bool average_attn_weights=True, "
      "bool is_causal=False, *, bool batch_first=False, "
      "str backend=\"auto\") -> (Tensor out, Tensor? weights)",
      tags);
  // D of a layer, its sizes checked: for Python's constructors.
  m.def(
      "head_width(int embed_dim, int num_heads, int num_kv_heads, "
      "int? head_dim=None) -> int",
      tags);
  m.def("pool_heads(Tensor rows, int num_heads, int num_kv_heads) -> Tensor",
        tags);
  m.def("repeat_heads(Tensor rows, int num_heads, int num_kv_heads) -> Tensor",
        tags);
}

}  // namespace

TORCH_LIBRARY(multihead, m) {
  m.set_python_module("multihead");
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
      "float? scale=None, bool enable_gqa=False, *, "
      "str causal_alignment=\"top_left\", Tensor? query_offset=None, "
      "int[]? window=None, Tensor? key_lengths=None, Tensor? key_mask=None, "
      "float? softcap=None, "
      "Tensor? alibi_slopes=None, Tensor? sinks=None, bool return_lse=False, "
      "str backend=\"auto\") -> (Tensor out, Tensor? logsumexp)",
      tags);
  m.def(
      "summarize_attention(Tensor query, Tensor key, int k, "
      "Tensor? attn_mask=None, bool is_causal=False, float? scale=None, "
      "bool enable_gqa=False, *, str causal_alignment=\"top_left\", "
      "Tensor? query_offset=None, int[]? window=None, "
      "Tensor? key_lengths=None, Tensor? key_mask=None, float? softcap=None, "
      "Tensor? alibi_slopes=None, Tensor? sinks=None, str backend=\"auto\") "
      "-> (Tensor weights, Tensor keys, Tensor entropy)",
      tags);
  // Implemented by the Python package: warnings.warn.
  m.def("warn(str message) -> ()");
  // None: the kernels can run the call.
  m.def(("why_not_fused(Tensor query, Tensor key, Tensor value, " +
         std::string(ops::kRulesSchema) + ") -> str?")
            .c_str(),
        tags);
  define_layers(m, tags);
  define_fused(m, tags);
  define_explain(m, tags);
}

TORCH_LIBRARY_IMPL(multihead, CompositeImplicitAutograd, m) {
  implement(m);
  m.impl("head_width", &head_width_op);
  m.impl("explain", &explain_op);
  m.impl("render_report", &render_report_op);
}

// vmap: the same operations on tensors with a hidden dimension, no loop.
TORCH_LIBRARY_IMPL(multihead, FuncTorchBatchedDecomposition, m) {
  implement(m);
}

}  // namespace multihead
