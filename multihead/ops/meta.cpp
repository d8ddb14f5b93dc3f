// SPDX-License-Identifier: MIT
//
// Shapes, dtypes and memory layouts of the fused operators, without values: the
// same checks, the same results, on symbolic sizes.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "multihead/checks.h"
#include "multihead/layout.h"
#include "multihead/ops/rules.h"
#include "multihead/optional_tensor.h"

namespace multihead::ops {
namespace {

using at::Tensor;

template <class RuleTypes>
struct Operators;
template <class... R>
struct Operators<Types<R...>> {
  static std::tuple<Tensor, Tensor> fused_attention(const Tensor& query,
                                                    const Tensor& key,
                                                    const Tensor& value,
                                                    R... r) {
    const Rules rules{r...};
    check_fused_attention(query, key, value, options_of(rules));
    check_dropout_state(rules.dropout_p, or_undefined(rules.dropout_state));
    auto sizes = query.sym_sizes().vec();
    sizes.back() = value.sym_size(-1);
    return {empty_in_layout_of(query, sizes), empty_logsumexp(query)};
  }

  static Tensor attention_weights(const Tensor& query, const Tensor& key,
                                  const Tensor& logsumexp, bool average,
                                  R... r) {
    const Rules rules{r...};
    check_from_logsumexp("attention_weights", query, key, logsumexp,
                         options_of(rules));
    check_dropout_state(rules.dropout_p, or_undefined(rules.dropout_state));
    auto sizes = query.sym_sizes().vec();
    sizes.back() = key.sym_size(-2);
    if (average) sizes.erase(sizes.end() - 3);
    return at::empty_symint(sizes, query.options());
  }

  static std::tuple<Tensor, Tensor, Tensor> attention_summary(
      const Tensor& query, const Tensor& key, const Tensor& logsumexp,
      int64_t count, R... r) {
    const Rules rules{r...};
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
};

}  // namespace

TORCH_LIBRARY_IMPL(multihead, Meta, m) {
  m.impl("fused_attention", &Operators<RuleTypes>::fused_attention);
  m.impl("attention_weights", &Operators<RuleTypes>::attention_weights);
  m.impl("attention_summary", &Operators<RuleTypes>::attention_summary);
}

}  // namespace multihead::ops
