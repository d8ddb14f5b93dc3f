// SPDX-License-Identifier: MIT
#include "multihead/attention/call.h"

#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace multihead::call {

using at::Tensor;

bool is_recorded(const Tensor& x) {
  return x.defined() && x.requires_grad() && at::GradMode::is_enabled();
}

bool is_recorded(const AttentionOptions& options) {
  bool recorded = false;
  fields::for_each_differentiable(
      options, [&](const Tensor& x) { recorded = recorded || is_recorded(x); });
  return recorded;
}

Tensor autocast(const Tensor& x) {
  const auto device = x.device().type();
  if (!at::autocast::is_autocast_available(device) ||
      !at::autocast::is_autocast_enabled(device)) {
    return x;
  }
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), x,
                                   device);
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
  return run<AttentionWeights>(
      q, without_width(key), at::zeros_symint(rows, q.options()),
      /*average=*/false,
      AttentionOptions{.dropout_p = options.dropout_p,
                       .enable_gqa = options.enable_gqa},
      dropout_state);
}

}  // namespace multihead::call
