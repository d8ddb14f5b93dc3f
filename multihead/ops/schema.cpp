// SPDX-License-Identifier: MIT
//
// The operators, torch.ops.multihead.*: the library's table of contents, and
// what Python and exported graphs call. Most are composites (composite.cpp);
// the fused operators are implemented in the files of their dispatch keys.
#include <torch/library.h>

#include "multihead/attention/call.h"

namespace multihead {
namespace {

using Tags = std::vector<at::Tag>;

// `leading`, all fields of AttentionOptions, `trailing`.
void define(torch::Library& m, const Tags& tags, const std::string& leading,
            const std::string& trailing) {
  m.def((leading + ", " + fields::schema() + ", " + trailing).c_str(), tags);
}

// "(Tensor dquery, …, Tensor dsinks": what can have a gradient.
std::string gradients() {
  std::string all = "(Tensor dquery, Tensor dkey, Tensor dvalue";
  fields::for_each([&](const auto& field) {
    if (!field.is_differentiable) return;
    all += ", Tensor d";
    all += field.name;
  });
  return all;
}

// Attention as a function, and what can be asked about it.
void define_functions(torch::Library& m, const Tags& tags) {
  // PyTorch's arguments alone: each argument costs a call from Python time.
  m.def(
      "scaled_dot_product_attention.plain(Tensor query, Tensor key, "
      "Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
      "bool is_causal=False, float? scale=None, bool enable_gqa=False) "
      "-> Tensor",
      tags);
  define(m, tags,
         "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value",
         "bool return_lse=False, str backend=\"auto\") "
         "-> (Tensor out, Tensor? logsumexp)");
  define(m, tags, "attention_summary(Tensor query, Tensor key, int k",
         "str backend=\"auto\") "
         "-> (Tensor weights, Tensor keys, Tensor entropy)");
  m.def(
      "varlen_attention(Tensor query, Tensor key, Tensor value, "
      "Tensor cu_seqlens_q, Tensor? cu_seqlens_k=None, float dropout_p=0.0, "
      "bool is_causal=False, float? scale=None, *, "
      "str causal_alignment=\"bottom_right\", int[]? window=None, "
      "Tensor? key_lengths=None, float? softcap=None, "
      "Tensor? alibi_slopes=None, Tensor? sinks=None, "
      "Tensor? block_table=None, bool return_lse=False, "
      "str backend=\"auto\") -> (Tensor out, Tensor? logsumexp)",
      tags);
  define(m, tags, "route(Tensor query, Tensor key, Tensor value",
         "bool return_lse=False, str backend=\"auto\") "
         "-> (str way, str reason)");
}

// The kernels. Their derivatives are in autograd.cpp.
void define_fused(torch::Library& m, const Tags& tags) {
  const std::string state = "Tensor? dropout_state=None) -> ";
  define(m, tags, "fused_attention(Tensor query, Tensor key, Tensor value",
         state + "(Tensor out, Tensor logsumexp)");
  // Gradients of Σ out·dout + Σ logsumexp·dlogsumexp; `needs` says of which
  // arguments, in the order of the results. What is not needed is undefined.
  // A derivative of this takes out and logsumexp as functions of the rest.
  // is_part: key and value are some of the keys and values that out and
  // logsumexp are of; dquery is then a summand.
  define(m, tags,
         "fused_attention_backward(Tensor dout, Tensor? dlogsumexp, "
         "Tensor query, Tensor key, Tensor value, Tensor out, "
         "Tensor logsumexp, bool[" +
             std::to_string(std::tuple_size_v<call::Needs>) + "] needs",
         "Tensor? dropout_state=None, bool is_part=False) -> " + gradients() +
             ")");
  define(m, tags,
         "fused_varlen_attention(Tensor query, Tensor key, Tensor value, "
         "Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? block_table",
         state + "(Tensor out, Tensor logsumexp)");
  define(m, tags,
         "fused_varlen_attention_backward(Tensor dout, Tensor? dlogsumexp, "
         "Tensor query, Tensor key, Tensor value, Tensor out, "
         "Tensor logsumexp, Tensor cu_seqlens_q, Tensor cu_seqlens_k, bool[" +
             std::to_string(std::tuple_size_v<call::Needs>) + "] needs",
         state + gradients() + ")");
  define(m, tags,
         "attention_weights(Tensor query, Tensor key, Tensor logsumexp, "
         "bool average_attn_weights",
         state + "Tensor");
  define(m, tags,
         "fused_attention_summary(Tensor query, Tensor key, "
         "Tensor logsumexp, int k",
         state + "(Tensor weights, Tensor keys, Tensor entropy)");
}

// The same over tokens of several processes (distributed.h). places: what the
// processes have told each other.
void define_distributed(torch::Library& m, const Tags& tags) {
  const std::string three = "(Tensor query, Tensor key, Tensor value";
  for (const char* name : {"ring_attention", "ulysses_attention"}) {
    define(m, tags, name + three,
           "str group, str order=\"contiguous\", bool return_lse=False) "
           "-> (Tensor out, Tensor? logsumexp)");
  }
  define(m, tags, "fused_ring_attention" + three,
         "str group, str order=\"contiguous\", Tensor? cu_seqlens_q=None, "
         "Tensor? cu_seqlens_k=None, Tensor? dropout_state=None) "
         "-> (Tensor out, Tensor logsumexp, Tensor places)");
  define(m, tags,
         "fused_ring_attention_backward(Tensor dout, Tensor? dlogsumexp, "
         "Tensor query, Tensor key, Tensor value, Tensor out, "
         "Tensor logsumexp, Tensor places, bool[" +
             std::to_string(std::tuple_size_v<call::Needs>) + "] needs",
         "str group, str order=\"contiguous\", Tensor? cu_seqlens_q=None, "
         "Tensor? cu_seqlens_k=None) -> " +
             gradients() + ")");
  for (const std::string name :
       {"ring_varlen_attention", "ulysses_varlen_attention"}) {
    const std::string schema =
        name +
        "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, "
        "Tensor cu_seqlens_k, float dropout_p=0.0, bool is_causal=False, "
        "float? scale=None, *, str causal_alignment=\"bottom_right\", "
        "int[]? window=None, Tensor? key_lengths=None, float? softcap=None, "
        "Tensor? alibi_slopes=None, Tensor? sinks=None, str group, "
        "str order=\"contiguous\", bool return_lse=False) "
        "-> (Tensor out, Tensor? logsumexp)";
    m.def(schema.c_str(), tags);
  }
  // lengths: how many tokens each process has, for each tensor
  // (distributed/ulysses.h).
  for (const std::string name : {"tokens_to_heads", "heads_to_tokens"}) {
    const std::string schema =
        name +
        "(Tensor[] tensors, str group, str order, int[] lengths) -> Tensor[]";
    m.def(schema.c_str(), tags);
  }
  m.def(
      "token_positions(int length, int rank, int processes, str order) -> "
      "Tensor");
  m.def("enter_context_parallel(str group, str order, str method) -> ()");
  m.def("leave_context_parallel() -> ()");
  m.def("is_context_parallel() -> bool");
  m.def(
      "merge_attention(Tensor out, Tensor lse, Tensor other_out, "
      "Tensor other_lse) -> (Tensor out, Tensor lse)",
      tags);
}

// What Python calls of install.h and stats.h.
void define_process(torch::Library& m) {
  m.def("install(bool linear=False, bool varlen=False) -> ()");
  m.def("uninstall() -> ()");
  m.def("is_installed() -> bool");
  m.def("enter_installed(bool linear=False, bool varlen=False) -> ()");
  m.def("leave_installed(bool linear=False, bool varlen=False) -> ()");
  m.def("enter_varlen() -> ()");
  m.def("leave_varlen() -> ()");
  m.def("why_not_linear() -> str");
  m.def("stats() -> (str[] source, str[] way, str[] reason, int[] calls)");
  m.def("reset_stats() -> ()");
}

// Attention with its projections, and between them.
void define_layers(torch::Library& m, const Tags& tags) {
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
  // H and G as many as there are → (Lq, B, H·D). heads_in_all: they are heads
  // first_head, first_head + 1, … of so many, as dropout counts.
  m.def(
      "projected_attention_forward(Tensor query, Tensor key, Tensor value, "
      "int head_dim, float dropout_p=0.0, bool training=True, "
      "Tensor? key_padding_mask=None, bool need_weights=True, "
      "Tensor? attn_mask=None, bool average_attn_weights=True, "
      "bool is_causal=False, *, bool batch_first=False, "
      "int? heads_in_all=None, int first_head=0, "
      "str backend=\"auto\") -> (Tensor out, Tensor? weights)",
      tags);
  // aten::_native_multi_head_attention of nested tensors, for modules.
  m.def(
      "nested_multi_head_attention(Tensor query, Tensor key, Tensor value, "
      "int embed_dim, int num_head, Tensor qkv_weight, Tensor qkv_bias, "
      "Tensor proj_weight, Tensor proj_bias, Tensor? mask=None, "
      "bool need_weights=True, bool average_attn_weights=True, "
      "int? mask_type=None) -> (Tensor, Tensor)",
      tags);
  // D of a layer, its sizes checked: for Python's constructors.
  m.def(
      "head_dim(int embed_dim, int num_heads, int num_kv_heads, "
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
  const Tags tags{at::Tag::pt2_compliant_tag};
  // Implemented by the Python package: warnings.warn, and why a call with
  // tensors that Python handles stays PyTorch's; empty: it need not.
  m.def("warn(str message) -> ()");
  m.def("refusal_in_python(Tensor[] tensors) -> str");
  define_functions(m, tags);
  define_layers(m, tags);
  define_fused(m, tags);
  define_distributed(m, tags);
  define_process(m);
}

}  // namespace multihead
