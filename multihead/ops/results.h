// SPDX-License-Identifier: MIT
//
// What the fused operators return, before it is computed: the arguments are
// checked, the results empty, in their shapes, dtypes and memory layouts. Sizes
// may be symbolic: the Meta kernels return these, the CPU kernels fill them.
#pragma once

#include "multihead/attention/call.h"

namespace multihead::ops {

/// out (B, H, Lq, Dv) in the layout of query, logsumexp (B, H, Lq).
call::FusedAttention::Signature fused_attention_results;

/// Like the arguments, those of query, key and value in their layouts;
/// undefined where not needed.
call::FusedAttentionBackward::Signature fused_attention_backward_results;

/// out (Tq, H, Dv) in the layout of query, logsumexp (H, Tq).
call::FusedVarlenAttention::Signature fused_varlen_attention_results;

/// As fused_attention_backward_results.
call::FusedVarlenAttentionBackward::Signature
    fused_varlen_attention_backward_results;

/// (B, H, Lq, Lk), or (B, Lq, Lk) where averaged over heads.
call::AttentionWeights::Signature attention_weights_result;

/// weights (B, H, Lq, count), keys int64 (B, H, Lq, count), entropy (B, H, Lq).
call::FusedAttentionSummary::Signature fused_attention_summary_results;

}  // namespace multihead::ops
