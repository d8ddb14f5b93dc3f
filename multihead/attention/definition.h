// SPDX-License-Identifier: MIT
//
// The definition (exact.h) as the arguments of scaled_dot_product_attention
// state it, on tensors (B, H, L, D) or (H, L, D): what runs where no kernel
// does, and what autograd differentiates where no kernel is the derivative.
// Whoever calls has checked the arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "multihead/functional.h"

namespace multihead {

/// out (B, H, Lq, Dv) in the layout of query, and logsumexp (B, H, Lq),
/// undefined unless with_lse. dropout_factors (B, H, Lq, Lk), 0 or
/// 1/(1 − dropout_p), where the draw is made already; undefined: torch's
/// generator draws.
std::tuple<at::Tensor, at::Tensor> define_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionOptions& options, bool with_lse,
    const at::Tensor& dropout_factors = {});

/// exp(scores − logsumexp), times dropout_factors where there are any:
/// (B, H, Lq, Lk), or (B, Lq, Lk) averaged over heads.
at::Tensor define_weights(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& logsumexp,
                          const AttentionOptions& options,
                          const at::Tensor& dropout_factors, bool average);

/// The k largest weights of each query, from all of them at once.
AttentionSummary define_summary(const at::Tensor& query, const at::Tensor& key,
                                const AttentionOptions& options, int64_t k);

}  // namespace multihead
