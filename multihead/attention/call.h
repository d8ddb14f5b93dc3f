// SPDX-License-Identifier: MIT
//
// The fused operators, called from C++: through the dispatcher, so that Python,
// tracing and C++ see one behaviour. Tensors are (B, H, L, D), or all without
// B. Whoever calls has asked for the route.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <optional>
#include <tuple>

#include "multihead/attention/fields.h"
#include "multihead/functional.h"

namespace multihead::call {

/// Gradients of query, key, value, and of the options that can have one, in
/// their order: which are wanted, and what they are (undefined: not wanted).
using Needs = std::array<bool, 3 + fields::kDifferentiableCount>;
template <size_t... i>
auto tensors(std::index_sequence<i...>)
    -> std::tuple<std::enable_if_t<(i >= 0), at::Tensor>...>;
using Gradients =
    decltype(tensors(std::make_index_sequence<std::tuple_size_v<Needs>>{}));

// ---- The operators' signatures --------------------------------------------
// dropout_state: int64 (2), seed and offset of the counter-based generator;
// needed when dropout_p > 0.

/// query, key, value → out (B, H, Lq, Dv) and logsumexp (B, H, Lq).
using FusedAttention = std::tuple<at::Tensor, at::Tensor>(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionOptions&, const std::optional<at::Tensor>& dropout_state);

using FusedAttentionBackward = Gradients(
    const at::Tensor& dout, const std::optional<at::Tensor>& dlogsumexp,
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& logsumexp, Needs,
    const AttentionOptions&, const std::optional<at::Tensor>& dropout_state);

/// The weights of that attention, after dropout: (B, Lq, Lk) averaged over
/// heads, or (B, H, Lq, Lk).
using AttentionWeights = at::Tensor(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& logsumexp,
    bool average, const AttentionOptions&,
    const std::optional<at::Tensor>& dropout_state);

/// Per query row the `count` largest weights, their keys, and the entropy, as
/// functional.h's AttentionSummary has them.
using FusedAttentionSummary = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& logsumexp,
    int64_t count, const AttentionOptions&,
    const std::optional<at::Tensor>& dropout_state);

/// The operator of that name, to be called with all fields of the options.
template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<typename fields::Flat<Signature>::type>();
}

// ---- Calls ----------------------------------------------------------------

FusedAttention fused_attention;
FusedAttentionBackward fused_attention_backward;
AttentionWeights attention_weights;
/// Nothing in a summary is differentiable.
FusedAttentionSummary fused_attention_summary;

using TensorRefs = c10::ArrayRef<const at::Tensor*>;

/// Whether autograd records what is computed from these tensors.
bool is_recorded(TensorRefs tensors);
bool is_recorded(TensorRefs tensors, const AttentionOptions& options);

/// int64 (2): seed and offset for one call, from torch's generator; nothing
/// where nothing is dropped.
std::optional<at::Tensor> draw_dropout_state(double dropout_p);

/// What dropout does to the weights of a call, (B, H, Lq, Lk) in float32,
/// float64 for float64: 0, or 1/(1 − dropout_p). Undefined where nothing drops.
at::Tensor dropout_factors(const at::Tensor& query, const at::Tensor& key,
                           const AttentionOptions& options,
                           const std::optional<at::Tensor>& dropout_state);

}  // namespace multihead::call
