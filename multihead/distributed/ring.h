// SPDX-License-Identifier: MIT
//
// Ring attention as operators: below autograd, with the group by its name.
#pragma once

#include "multihead/attention/call.h"
#include "multihead/distributed.h"

namespace multihead::call {

/// query, key, value (B, heads, L, D): this process's tokens, with cu_seqlens
/// those of documents one after the other and B = 1 → out (B, H, Lq, Dv) and
/// logsumexp (B, H, Lq), both of the compute type, and places, which
/// the backward asks for: int64, see Places.
struct FusedRingAttention {
  static constexpr auto* kName = "multihead::fused_ring_attention";
  using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
      const AttentionOptions&, std::string_view group, std::string_view order,
      const std::optional<at::Tensor>& cu_seqlens_q,
      const std::optional<at::Tensor>& cu_seqlens_k,
      const std::optional<at::Tensor>& dropout_state);
};

/// As FusedAttentionBackward; dout has the compute type too. What is not needed
/// is computed all the same where another process may need it.
struct FusedRingAttentionBackward {
  static constexpr auto* kName = "multihead::fused_ring_attention_backward";
  using Signature = Gradients(const at::Tensor& dout,
                              const std::optional<at::Tensor>& dlogsumexp,
                              const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const at::Tensor& out,
                              const at::Tensor& logsumexp,
                              const at::Tensor& places, Needs,
                              const AttentionOptions&, std::string_view group,
                              std::string_view order,
                              const std::optional<at::Tensor>& cu_seqlens_q,
                              const std::optional<at::Tensor>& cu_seqlens_k);
};

}  // namespace multihead::call
