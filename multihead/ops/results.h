// SPDX-License-Identifier: MIT
//
// What the fused operators return, before it is computed: the arguments are
// checked, the results empty, in their shapes, dtypes and memory layouts. Sizes
// may be symbolic: the Meta kernels return these, the CPU kernels fill them.
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "multihead/ops/rules.h"

namespace multihead::ops {

/// out (B, H, Lq, Dv) in the layout of query, logsumexp (B, H, Lq).
std::tuple<at::Tensor, at::Tensor> fused_attention_results(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const Rules& rules);

/// Which gradients are wanted: of query, key, value, attn_mask, alibi_slopes,
/// sinks.
using Needs = std::array<bool, 6>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                             at::Tensor, at::Tensor>;

/// Like the arguments, those of query, key and value in their layouts;
/// undefined where not needed.
Gradients fused_attention_backward_results(
    const at::Tensor& dout, const std::optional<at::Tensor>& dlogsumexp,
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& logsumexp, const Needs& needs,
    const Rules& rules);

/// (B, H, Lq, Lk), or (B, Lq, Lk) where averaged over heads.
at::Tensor attention_weights_result(const at::Tensor& query,
                                    const at::Tensor& key,
                                    const at::Tensor& logsumexp, bool average,
                                    const Rules& rules);

/// weights (B, H, Lq, count), keys int64 (B, H, Lq, count), entropy (B, H, Lq).
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_summary_results(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& logsumexp,
    int64_t count, const Rules& rules);

}  // namespace multihead::ops
