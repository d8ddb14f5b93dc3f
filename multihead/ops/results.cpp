// SPDX-License-Identifier: MIT
#include "multihead/ops/results.h"

#include <ATen/ops/empty.h>

#include "multihead/attention/checks.h"
#include "multihead/attention/layout.h"
#include "multihead/attention/storage.h"
#include "multihead/attention/varlen.h"
#include "multihead/text/shapes.h"

namespace multihead::ops {
namespace {

using at::Tensor;

// Checks an operator that computes from a call's query, key and logsumexp.
void check_from_logsumexp(const char* function, const Tensor& query,
                          const Tensor& key, const Tensor& logsumexp,
                          const AttentionOptions& options,
                          const std::optional<Tensor>& dropout_state) {
  check_fused_attention(query, key, key, options);
  check_not_stored(function, query, key, key);
  check_logsumexp(function, query, logsumexp);
  check_dropout_state(options.dropout_p, dropout_state);
}

void check_like(const char* function, const char* argument, const Tensor& x,
                c10::SymIntArrayRef sizes, at::ScalarType dtype) {
  TORCH_CHECK(x.sym_sizes().equals(sizes) && x.scalar_type() == dtype, function,
              ": ", argument, " must be ", dtype, " ", tuple_text(sizes),
              ", got ", x.scalar_type(), " ", shape_text(x));
}

// Empty ones of what is needed.
call::Gradients gradients_like(const Tensor& query, const Tensor& key,
                               const Tensor& value, const call::Needs& needs,
                               const AttentionOptions& options) {
  const auto like = [](bool needed, const Tensor& x) {
    return needed ? empty_in_layout_of(x, x.sym_sizes()) : Tensor();
  };
  std::array<Tensor, std::tuple_size_v<call::Needs>> gradients{
      like(needs[0], query), like(needs[1], key), like(needs[2], value)};
  size_t i = 3;
  fields::for_each_differentiable(options, [&](const Tensor& x) {
    if (needs[i] && x.defined() && x.is_floating_point()) {
      gradients[i] = at::empty_symint(x.sym_sizes(), x.options());
    }
    ++i;
  });
  return std::tuple_cat(std::move(gradients));
}

void check_fused_varlen(const Tensor& query, const Tensor& key,
                        const Tensor& value, const VarlenRows& sequences,
                        const AttentionOptions& options,
                        const std::optional<Tensor>& dropout_state) {
  check_varlen(query, key, value, sequences, options);
  TORCH_CHECK(is_fused_dtype(query.scalar_type()),
              "fused_varlen_attention: query must be float32, float64, "
              "bfloat16 or float16, got ",
              query.scalar_type());
  check_dropout_state(options.dropout_p, dropout_state);
}

at::ScalarType logsumexp_dtype(const Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace

std::tuple<Tensor, Tensor> fused_attention_results(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const AttentionOptions& options,
    const std::optional<Tensor>& dropout_state) {
  check_fused_attention(query, key, value, options);
  check_dropout_state(options.dropout_p, dropout_state);
  auto sizes = query.sym_sizes().vec();
  sizes.back() = width_of(value);
  return {empty_in_layout_of(query, sizes), empty_logsumexp(query)};
}

call::Gradients fused_attention_backward_results(
    const Tensor& dout, const std::optional<Tensor>& dlogsumexp,
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& logsumexp, call::Needs needs,
    const AttentionOptions& options, const std::optional<Tensor>& dropout_state,
    bool /*is_part*/) {
  constexpr auto* name = "fused_attention_backward";
  check_fused_attention(query, key, value, options);
  check_not_stored(name, query, key, value);
  check_logsumexp(name, query, logsumexp);
  check_dropout_state(options.dropout_p, dropout_state);
  auto sizes = query.sym_sizes().vec();
  sizes.back() = value.sym_size(-1);
  check_like(name, "out", out, sizes, query.scalar_type());
  check_like(name, "dout", dout, sizes, query.scalar_type());
  if (dlogsumexp) {
    check_like(name, "dlogsumexp", *dlogsumexp, logsumexp.sym_sizes(),
               logsumexp.scalar_type());
  }
  return gradients_like(query, key, value, needs, options);
}

std::tuple<Tensor, Tensor> fused_varlen_attention_results(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
    const std::optional<Tensor>& block_table, const AttentionOptions& options,
    const std::optional<Tensor>& dropout_state) {
  check_fused_varlen(
      query, key, value,
      {cu_seqlens_q, or_undefined(cu_seqlens_k), or_undefined(block_table)},
      options, dropout_state);
  auto sizes = query.sym_sizes().vec();
  sizes.back() = width_of(value);
  return {empty_in_layout_of(query, sizes),
          at::empty_symint({query.sym_size(1), query.sym_size(0)},
                           query.options().dtype(logsumexp_dtype(query)))};
}

call::Gradients fused_varlen_attention_backward_results(
    const Tensor& dout, const std::optional<Tensor>& dlogsumexp,
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& logsumexp, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, call::Needs needs,
    const AttentionOptions& options,
    const std::optional<Tensor>& dropout_state) {
  check_fused_varlen(query, key, value, {cu_seqlens_q, cu_seqlens_k, {}},
                     options, dropout_state);
  auto sizes = query.sym_sizes().vec();
  sizes.back() = value.sym_size(-1);
  constexpr auto* name = "fused_varlen_attention_backward";
  check_not_stored(name, query, key, value);
  check_like(name, "out", out, sizes, query.scalar_type());
  check_like(name, "dout", dout, sizes, query.scalar_type());
  const c10::SymDimVector rows{query.sym_size(1), query.sym_size(0)};
  check_like(name, "logsumexp", logsumexp, rows, logsumexp_dtype(query));
  if (dlogsumexp) {
    check_like(name, "dlogsumexp", *dlogsumexp, rows, logsumexp_dtype(query));
  }
  return gradients_like(query, key, value, needs, options);
}

Tensor attention_weights_result(const Tensor& query, const Tensor& key,
                                const Tensor& logsumexp, bool average,
                                const AttentionOptions& options,
                                const std::optional<Tensor>& dropout_state) {
  check_from_logsumexp("attention_weights", query, key, logsumexp, options,
                       dropout_state);
  auto sizes = query.sym_sizes().vec();
  sizes.back() = key.sym_size(-2);
  if (average) sizes.erase(sizes.end() - 3);
  return at::empty_symint(sizes, query.options());
}

std::tuple<Tensor, Tensor, Tensor> fused_attention_summary_results(
    const Tensor& query, const Tensor& key, const Tensor& logsumexp,
    int64_t count, const AttentionOptions& options,
    const std::optional<Tensor>& dropout_state) {
  check_from_logsumexp("attention_summary", query, key, logsumexp, options,
                       dropout_state);
  check_count(count);
  auto sizes = logsumexp.sym_sizes().vec();
  sizes.emplace_back(count);
  return {at::empty_symint(sizes, logsumexp.options()),
          at::empty_symint(sizes, logsumexp.options().dtype(at::kLong)),
          at::empty_symint(logsumexp.sym_sizes(), logsumexp.options())};
}

}  // namespace multihead::ops
