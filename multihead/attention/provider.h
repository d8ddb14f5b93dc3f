// SPDX-License-Identifier: MIT
//
// Somebody else who computes the attention of this thread, in place of the
// fused operators: distributed.h's ContextParallelGuard is one. While there is
// one, no call goes any other way: what it refuses is an error.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include "multihead/functional.h"

namespace multihead {

class Provider {
 public:
  virtual ~Provider() = default;
  /// With what the errors of calls that it has no way for begin.
  virtual std::string name() const = 0;

  /// A mask (…, Lk) of this call's keys, made one of all keys that the
  /// provider's attention has. Not differentiable.
  virtual at::Tensor mask_of_all_keys(const at::Tensor& mask) const = 0;

  /// As call::FusedAttention, and call::FusedVarlenAttention without pages.
  virtual std::tuple<at::Tensor, at::Tensor> attention(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
      const AttentionOptions& options,
      const std::optional<at::Tensor>& dropout_state) const = 0;
  virtual std::tuple<at::Tensor, at::Tensor> varlen_attention(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
      const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
      const AttentionOptions& options,
      const std::optional<at::Tensor>& dropout_state) const = 0;
};

/// That of this thread; nullptr: none.
const Provider* current_provider();

/// Returns the one before.
const Provider* set_provider(const Provider* provider);

/// Throws where there is one, which has no such calls: `what` says which.
void check_no_provider(const char* function, const char* what);

}  // namespace multihead
