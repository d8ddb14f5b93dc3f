// SPDX-License-Identifier: MIT
#include "multihead/ops/results.h"

#include <ATen/ops/empty.h>

#include "multihead/attention/checks.h"
#include "multihead/attention/layout.h"
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
  check_logsumexp(function, query, logsumexp);
  check_dropout_state(options.dropout_p, dropout_state);
}

}  // namespace

std::tuple<Tensor, Tensor> fused_attention_results(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const AttentionOptions& options,
    const std::optional<Tensor>& dropout_state) {
  check_fused_attention(query, key, value, options);
  check_dropout_state(options.dropout_p, dropout_state);
  auto sizes = query.sym_sizes().vec();
  sizes.back() = value.sym_size(-1);
  return {empty_in_layout_of(query, sizes), empty_logsumexp(query)};
}

call::Gradients fused_attention_backward_results(
    const Tensor& dout, const std::optional<Tensor>& dlogsumexp,
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& logsumexp, call::Needs needs,
    const AttentionOptions& options,
    const std::optional<Tensor>& dropout_state) {
  constexpr auto* name = "fused_attention_backward";
  check_fused_attention(query, key, value, options);
  check_logsumexp(name, query, logsumexp);
  check_dropout_state(options.dropout_p, dropout_state);
  auto sizes = query.sym_sizes().vec();
  sizes.back() = value.sym_size(-1);
  for (const auto& [argument, x] : {std::pair("out", &out), {"dout", &dout}}) {
    TORCH_CHECK(
        x->sym_sizes().equals(sizes) && x->scalar_type() == query.scalar_type(),
        name, ": ", argument, " must be ", query.scalar_type(), " ",
        c10::SymIntArrayRef(sizes), ", got ", x->scalar_type(), " ",
        shape_text(*x));
  }
  if (dlogsumexp) {
    TORCH_CHECK(dlogsumexp->sym_sizes() == logsumexp.sym_sizes() &&
                    dlogsumexp->scalar_type() == logsumexp.scalar_type(),
                name, ": dlogsumexp must be ", logsumexp.scalar_type(), " ",
                shape_text(logsumexp), ", got ", dlogsumexp->scalar_type(), " ",
                shape_text(*dlogsumexp));
  }
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
