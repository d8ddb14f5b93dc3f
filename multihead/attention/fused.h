// SPDX-License-Identifier: MIT
//
// The fused operators, called from C++: through the dispatcher, so that Python,
// tracing and C++ see one behaviour. Tensors are (B, H, L, D); scores follow
// AttentionOptions. Whoever calls has asked why_not_fused.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "multihead/functional.h"
#include "multihead/kernels/kernels.h"

namespace multihead::fused {

/// The kernels' instruction set; throws where MULTIHEAD_ISA is wrong.
kernels::Isa isa();

using TensorRefs = c10::ArrayRef<const at::Tensor*>;

/// What keeps these tensors, whatever is computed from them, from the kernels.
/// Undefined tensors keep nothing from anything.
std::optional<std::string> why_not(TensorRefs tensors);

/// Whether autograd records what is computed from these tensors.
bool is_recorded(TensorRefs tensors);

/// The same for the dtype of a query.
std::optional<std::string> why_not_dtype(at::ScalarType dtype);

/// Whether this thread's backend and the reason, if there is one, say fused.
/// Throws where the backend is kFused and there is a reason.
template <typename WhyNot>
bool chosen(const char* function, WhyNot why_not) {
  const Backend backend = current_backend();
  if (backend == Backend::kExact) return false;
  const std::optional<std::string> reason = why_not();
  TORCH_CHECK(!reason || backend != Backend::kFused, function,
              ": backend \"fused\" cannot run this call: ", *reason);
  return !reason;
}

/// Warns that a call of `function` forms all weights because of `reason`, once
/// per process and kind of reason.
void warn_once_of_all_weights(const char* function, const std::string& reason);

/// The same under kAuto, where nobody asked for that. The kernels are for the
/// CPU, so elsewhere it is no news.
template <typename WhyNot>
void warn_of_all_weights(const char* function, const at::Tensor& query,
                         WhyNot why_not) {
  if (current_backend() != Backend::kAuto || !query.is_cpu()) return;
  if (const std::optional<std::string> reason = why_not()) {
    warn_once_of_all_weights(function, *reason);
  }
}

/// int64 (2): seed and offset for one call, from torch's generator; undefined
/// when nothing is dropped.
at::Tensor draw_dropout_state(double dropout_p);

/// out (B, H, Lq, Dv) and logsumexp (B, H, Lq).
std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& query,
                                             const at::Tensor& key,
                                             const at::Tensor& value,
                                             const AttentionOptions& options,
                                             const at::Tensor& dropout_state);

/// What a call of attention took and returned.
struct AttentionCall {
  const at::Tensor &query, &key, &value, &out, &logsumexp;
};

/// Gradients of query, key, value, attn_mask, alibi_slopes and sinks, undefined
/// where not needed; dlogsumexp may be undefined.
std::vector<at::Tensor> attention_backward(const at::Tensor& dout,
                                           const at::Tensor& dlogsumexp,
                                           const AttentionCall& call,
                                           const std::array<bool, 6>& needs,
                                           const AttentionOptions& options,
                                           const at::Tensor& dropout_state);

/// What dropout does to the weights of that call, (B, H, Lq, Lk) in float32,
/// float64 for float64: 0, or 1/(1 − dropout_p). Undefined where nothing drops.
at::Tensor dropout_factors(const at::Tensor& query, const at::Tensor& key,
                           const AttentionOptions& options,
                           const at::Tensor& dropout_state);

/// The weights of that call, after dropout: (B, Lq, Lk) averaged over heads, or
/// (B, H, Lq, Lk).
at::Tensor attention_weights(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& logsumexp,
                             const AttentionOptions& options,
                             const at::Tensor& dropout_state, bool average);

/// Per query row the `count` largest weights, their keys, and the entropy, as
/// functional.h's AttentionSummary has them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_summary(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& logsumexp,
    const AttentionOptions& options, int64_t count);

}  // namespace multihead::fused
