// SPDX-License-Identifier: MIT
//
// The fused operators without values.
#include <torch/library.h>

#include "multihead/ops/results.h"

namespace multihead::ops {
namespace {

using at::Tensor;

template <class RuleTypes>
struct Operators;
template <class... R>
struct Operators<Types<R...>> {
  static auto fused_attention(const Tensor& query, const Tensor& key,
                              const Tensor& value, R... r) {
    return fused_attention_results(query, key, value, Rules{r...});
  }
  static auto fused_attention_backward(const Tensor& dout,
                                       const std::optional<Tensor>& dlogsumexp,
                                       const Tensor& query, const Tensor& key,
                                       const Tensor& value, const Tensor& out,
                                       const Tensor& logsumexp, Needs needs,
                                       R... r) {
    return fused_attention_backward_results(dout, dlogsumexp, query, key, value,
                                            out, logsumexp, needs, Rules{r...});
  }
  static auto attention_weights(const Tensor& query, const Tensor& key,
                                const Tensor& logsumexp, bool average, R... r) {
    return attention_weights_result(query, key, logsumexp, average,
                                    Rules{r...});
  }
  static auto attention_summary(const Tensor& query, const Tensor& key,
                                const Tensor& logsumexp, int64_t count,
                                R... r) {
    return attention_summary_results(query, key, logsumexp, count, Rules{r...});
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(multihead, Meta, m) {
  m.impl("fused_attention", &Operators<RuleTypes>::fused_attention);
  m.impl("fused_attention_backward",
         &Operators<RuleTypes>::fused_attention_backward);
  m.impl("attention_weights", &Operators<RuleTypes>::attention_weights);
  m.impl("attention_summary", &Operators<RuleTypes>::attention_summary);
}

}  // namespace multihead::ops
