// SPDX-License-Identifier: MIT
//
// The definition in docs/parity.md, in ATen operations: on any device and
// dtype, differentiable to any order. What runs where no kernel does, and what
// autograd differentiates where no kernel is the derivative. Rows that see no
// key give 0, NaN in keys and values that are not seen has no effect, 16-bit
// types are computed in float32. Whoever calls has checked the arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "multihead/attention/heads.h"
#include "multihead/attention/mask.h"
#include "multihead/functional.h"

namespace multihead::definition {

// ---- On tensors (B, H, L, D) or (H, L, D) ---------------------------------

/// out (B, H, Lq, Dv) in the layout of query, and logsumexp (B, H, Lq),
/// undefined unless with_lse. dropout_factors (B, H, Lq, Lk), 0 or
/// 1/(1 − dropout_p), where the draw is made already; undefined: torch's
/// generator draws.
std::tuple<at::Tensor, at::Tensor> attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionOptions& options, bool with_lse,
    const at::Tensor& dropout_factors = {});

/// exp(scores − logsumexp), times dropout_factors where there are any:
/// (B, H, Lq, Lk), or (B, Lq, Lk) averaged over heads.
at::Tensor weights(const at::Tensor& query, const at::Tensor& key,
                   const at::Tensor& logsumexp, const AttentionOptions& options,
                   const at::Tensor& dropout_factors, bool average);

/// The k largest weights of each query, from all of them at once.
AttentionSummary summary(const at::Tensor& query, const at::Tensor& key,
                         const AttentionOptions& options, int64_t k);

// ---- On heads -------------------------------------------------------------

/// With a mask, a scale and dropout alone, as layers have them. Without a mask
/// the operations are those of layer/torch_order.cpp.
HeadResults attention(const Heads& heads, double scale, const Mask& mask,
                      double dropout_p);

}  // namespace multihead::definition
