// SPDX-License-Identifier: MIT
#include "multihead/ops/results.h"

#include <ATen/ops/empty.h>

#include "multihead/checks.h"
#include "multihead/layout.h"
#include "multihead/optional_tensor.h"

namespace multihead::ops {

using at::Tensor;

std::tuple<Tensor, Tensor> fused_attention_results(const Tensor& query,
                                                   const Tensor& key,
                                                   const Tensor& value,
                                                   const Rules& rules) {
  check_fused_attention(query, key, value, options_of(rules));
  check_dropout_state(rules.dropout_p, or_undefined(rules.dropout_state));
  auto sizes = query.sym_sizes().vec();
  sizes.back() = value.sym_size(-1);
  return {empty_in_layout_of(query, sizes), empty_logsumexp(query)};
}

Tensor attention_weights_result(const Tensor& query, const Tensor& key,
                                const Tensor& logsumexp, bool average,
                                const Rules& rules) {
  check_from_logsumexp("attention_weights", query, key, logsumexp,
                       options_of(rules));
  check_dropout_state(rules.dropout_p, or_undefined(rules.dropout_state));
  auto sizes = query.sym_sizes().vec();
  sizes.back() = key.sym_size(-2);
  if (average) sizes.erase(sizes.end() - 3);
  return at::empty_symint(sizes, query.options());
}

std::tuple<Tensor, Tensor, Tensor> attention_summary_results(
    const Tensor& query, const Tensor& key, const Tensor& logsumexp,
    int64_t count, const Rules& rules) {
  check_from_logsumexp("attention_summary", query, key, logsumexp,
                       options_of(rules));
  check_dropout_state(rules.dropout_p, or_undefined(rules.dropout_state));
  check_count(count);
  auto sizes = logsumexp.sym_sizes().vec();
  sizes.emplace_back(count);
  return {at::empty_symint(sizes, logsumexp.options()),
          at::empty_symint(sizes, logsumexp.options().dtype(at::kLong)),
          at::empty_symint(logsumexp.sym_sizes(), logsumexp.options())};
}

}  // namespace multihead::ops
