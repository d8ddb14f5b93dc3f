// SPDX-License-Identifier: MIT
//
// The fused operators of sequences on the CPU.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "multihead/attention/count.h"
#include "multihead/attention/storage.h"
#include "multihead/ops/cpu/arguments.h"
#include "multihead/ops/cpu/parallel.h"
#include "multihead/ops/results.h"

namespace multihead::ops {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> fused_varlen_attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
    const std::optional<Tensor>& block_table, const AttentionOptions& options,
    const std::optional<Tensor>& dropout_state) {
  auto [out, logsumexp] = fused_varlen_attention_results(
      query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, options,
      dropout_state);
  const AttentionArguments call(
      query, key,
      {cu_seqlens_q, or_undefined(cu_seqlens_k), or_undefined(block_table)},
      options, dropout_state);
  const Tensor values = dense_rows(value);
  kernels::ForwardArgs forward{call.attention, {}, nullptr};
  forward.attention.value = rows_like(forward.attention.key, values);
  forward.attention.Dv = width_of(values).expect_int();
  forward.out = out_rows_like(forward.attention.query, out);
  forward.logsumexp = logsumexp.mutable_data_ptr();
  count_fused();
  run_forward(forward);
  return {out, logsumexp};
}

call::Gradients fused_varlen_attention_backward(
    const Tensor& dout, const std::optional<Tensor>& dlogsumexp,
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& logsumexp, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, call::Needs needs,
    const AttentionOptions& options,
    const std::optional<Tensor>& dropout_state) {
  call::Gradients gradients = fused_varlen_attention_backward_results(
      dout, dlogsumexp, query, key, value, out, logsumexp, cu_seqlens_q,
      cu_seqlens_k, needs, options, dropout_state);
  auto& [dquery, dkey, dvalue, dmask, dslopes, dsinks] = gradients;
  const AttentionArguments call(query, key, {cu_seqlens_q, cu_seqlens_k, {}},
                                options, dropout_state);
  const Tensor values = dense_rows(value), outs = dense_rows(out),
               douts = dense_rows(dout), lse = logsumexp.contiguous(),
               dlse = dlogsumexp ? dlogsumexp->contiguous() : Tensor();
  kernels::BackwardArgs b;
  b.attention = call.attention;
  kernels::AttentionArgs& a = b.attention;
  a.value = rows_like(a.key, values);
  a.Dv = values.size(-1);
  b.out = rows_like(a.query, outs);
  b.dout = rows_like(a.query, douts);
  b.logsumexp = lse.const_data_ptr();
  if (dlse.defined()) b.dlogsumexp = dlse.const_data_ptr();
  const auto rows = [](const kernels::StridedRows& like, const Tensor& x) {
    return x.defined() ? out_rows_like(like, x) : kernels::StridedOutRows();
  };
  b.dquery = rows(a.query, dquery);
  b.dkey = rows(a.key, dkey);
  b.dvalue = rows(a.key, dvalue);
  run_backward(b, dslopes, dsinks);
  return gradients;
}

}  // namespace

TORCH_LIBRARY_IMPL(multihead, CPU, m) {
  using fields::implementation;
  m.impl("fused_varlen_attention", implementation<&fused_varlen_attention>);
  m.impl("fused_varlen_attention_backward",
         implementation<&fused_varlen_attention_backward>);
}

}  // namespace multihead::ops
