// SPDX-License-Identifier: MIT
#include "multihead/attention/call.h"

#include <ATen/OpMathType.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

namespace multihead::call {
namespace {

using at::Tensor;

// Calls an operator with its arguments, the options among them.
template <class Operator, class... P>
auto call(const Operator& op, bool recorded, const P&... arguments) {
  // Straight to the kernels where autograd has nothing to record.
  std::optional<at::AutoDispatchBelowADInplaceOrView> past_autograd;
  if (!recorded) past_autograd.emplace();
  return std::apply([&](const auto&... flat) { return op.call(flat...); },
                    std::tuple_cat(fields::pack(arguments)...));
}

}  // namespace

std::tuple<Tensor, Tensor> fused_attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const AttentionOptions& options,
    const std::optional<Tensor>& dropout_state) {
  static const auto op = find<FusedAttention>("multihead::fused_attention");
  return call(op, is_recorded({&query, &key, &value}, options), query, key,
              value, options, dropout_state);
}

Gradients fused_attention_backward(const Tensor& dout,
                                   const std::optional<Tensor>& dlogsumexp,
                                   const Tensor& query, const Tensor& key,
                                   const Tensor& value, const Tensor& out,
                                   const Tensor& logsumexp, Needs needs,
                                   const AttentionOptions& options,
                                   const std::optional<Tensor>& dropout_state) {
  static const auto op =
      find<FusedAttentionBackward>("multihead::fused_attention_backward");
  const bool recorded = is_recorded({&dout, &query, &key, &value}, options) ||
                        (dlogsumexp && is_recorded({&*dlogsumexp}));
  return call(op, recorded, dout, dlogsumexp, query, key, value, out, logsumexp,
              needs, options, dropout_state);
}

Tensor attention_weights(const Tensor& query, const Tensor& key,
                         const Tensor& logsumexp, bool average,
                         const AttentionOptions& options,
                         const std::optional<Tensor>& dropout_state) {
  static const auto op = find<AttentionWeights>("multihead::attention_weights");
  return call(op, is_recorded({&query, &key, &logsumexp}, options), query, key,
              logsumexp, average, options, dropout_state);
}

std::tuple<Tensor, Tensor, Tensor> fused_attention_summary(
    const Tensor& query, const Tensor& key, const Tensor& logsumexp,
    int64_t count, const AttentionOptions& options,
    const std::optional<Tensor>& dropout_state) {
  static const auto op =
      find<FusedAttentionSummary>("multihead::fused_attention_summary");
  return call(op, /*recorded=*/false, query, key, logsumexp, count, options,
              dropout_state);
}

bool is_recorded(TensorRefs tensors) {
  if (!at::GradMode::is_enabled()) return false;
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor* x) {
    return x->defined() && x->requires_grad();
  });
}

bool is_recorded(TensorRefs tensors, const AttentionOptions& options) {
  bool recorded = is_recorded(tensors);
  fields::for_each_differentiable(options, [&](const Tensor& x) {
    recorded = recorded || is_recorded({&x});
  });
  return recorded;
}

std::optional<Tensor> draw_dropout_state(double dropout_p) {
  if (dropout_p == 0.0) return std::nullopt;
  return at::randint(std::numeric_limits<int64_t>::max(), {2}, at::kLong);
}

Tensor dropout_factors(const Tensor& query, const Tensor& key,
                       const AttentionOptions& options,
                       const std::optional<Tensor>& dropout_state) {
  if (options.dropout_p == 0.0) return {};
  // Where scores and logsumexp are 0, every weight is 1 before dropout.
  const auto dtype = at::toOpMathType(query.scalar_type());
  const auto without_width = [&](const Tensor& x) {
    return x.detach().narrow(-1, 0, 0).to(dtype);
  };
  const Tensor q = without_width(query);
  auto rows = q.sym_sizes().vec();
  rows.pop_back();
  return attention_weights(
      q, without_width(key), at::zeros_symint(rows, q.options()),
      /*average=*/false,
      {.dropout_p = options.dropout_p, .enable_gqa = options.enable_gqa},
      dropout_state);
}

}  // namespace multihead::call
