// SPDX-License-Identifier: MIT
//
// The fused operators, called from C++: through the dispatcher, so that Python,
// tracing and C++ see one behaviour. Tensors are (B, H, L, D), or all without
// B. Whoever calls has asked for the route.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
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

/// The operators by their names and signatures. dropout_state: int64 (2), seed
/// and offset of the counter-based generator; needed when dropout_p > 0. int64
/// (7) for a part of a larger call: then the batch row, the head, the number of
/// heads in all, the query and the key at which the part begins there, and it
/// drops what the whole would drop.
/// query, key, value → out (B, H, Lq, Dv) and logsumexp (B, H, Lq).
struct FusedAttention {
  static constexpr auto* kName = "multihead::fused_attention";
  using Signature = std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
      const AttentionOptions&, const std::optional<at::Tensor>& dropout_state);
};

struct FusedAttentionBackward {
  static constexpr auto* kName = "multihead::fused_attention_backward";
  using Signature = Gradients(const at::Tensor& dout,
                              const std::optional<at::Tensor>& dlogsumexp,
                              const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const at::Tensor& out,
                              const at::Tensor& logsumexp, Needs,
                              const AttentionOptions&,
                              const std::optional<at::Tensor>& dropout_state,
                              bool is_part);
};

/// The weights of that attention, after dropout: (B, Lq, Lk) averaged over
/// heads, or (B, H, Lq, Lk).
struct AttentionWeights {
  static constexpr auto* kName = "multihead::attention_weights";
  using Signature = at::Tensor(const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& logsumexp, bool average,
                               const AttentionOptions&,
                               const std::optional<at::Tensor>& dropout_state);
};

/// Per query row the `count` largest weights, their keys, and the entropy, as
/// functional.h's AttentionSummary has them. Nothing of it is differentiable.
struct FusedAttentionSummary {
  static constexpr auto* kName = "multihead::fused_attention_summary";
  using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor& query, const at::Tensor& key,
      const at::Tensor& logsumexp, int64_t count, const AttentionOptions&,
      const std::optional<at::Tensor>& dropout_state);
};

/// Of sequences (attention/varlen.h): query (Tq, H, D) → out (Tq, H, Dv) and
/// logsumexp (H, Tq). attn_mask, query_offset and key_mask are refused.
struct FusedVarlenAttention {
  static constexpr auto* kName = "multihead::fused_varlen_attention";
  using Signature = std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
      const at::Tensor& cu_seqlens_q,
      const std::optional<at::Tensor>& cu_seqlens_k,
      const std::optional<at::Tensor>& block_table, const AttentionOptions&,
      const std::optional<at::Tensor>& dropout_state);
};

/// Of rows, not of pages.
struct FusedVarlenAttentionBackward {
  static constexpr auto* kName = "multihead::fused_varlen_attention_backward";
  using Signature = Gradients(
      const at::Tensor& dout, const std::optional<at::Tensor>& dlogsumexp,
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
      const at::Tensor& out, const at::Tensor& logsumexp,
      const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, Needs,
      const AttentionOptions&, const std::optional<at::Tensor>& dropout_state);
};

/// The operator, with the arguments that the dispatcher takes.
template <class Operator>
const auto& handle() {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(Operator::kName, "")
          .template typed<
              typename fields::Flat<typename Operator::Signature>::type>();
  return op;
}

/// Whether autograd records what is computed from an argument.
bool is_recorded(const at::Tensor& x);
bool is_recorded(const AttentionOptions& options);
inline bool is_recorded(const std::optional<at::Tensor>& x) {
  return x && is_recorded(*x);
}
inline bool is_recorded(int64_t /*number*/) { return false; }
inline bool is_recorded(bool /*flag*/) { return false; }
inline bool is_recorded(std::string_view /*name*/) { return false; }
inline bool is_recorded(const Needs& /*needs*/) { return false; }

/// Calls the operator, whose signature `arguments` follow.
template <class Operator, class... P>
auto run(const P&... arguments) {
  // Straight to the kernels where autograd has nothing to record.
  std::optional<at::AutoDispatchBelowADInplaceOrView> past_autograd;
  if (!(is_recorded(arguments) || ...)) past_autograd.emplace();
  return std::apply(
      [](const auto&... flat) { return handle<Operator>().call(flat...); },
      std::tuple_cat(fields::pack(arguments)...));
}

/// What autocast does to the tensors of PyTorch's function.
at::Tensor autocast(const at::Tensor& x);

/// int64 (2): seed and offset for one call, from torch's generator; nothing
/// where nothing is dropped.
std::optional<at::Tensor> draw_dropout_state(double dropout_p);

/// What dropout does to the weights of a call, (B, H, Lq, Lk) in float32,
/// float64 for float64: 0, or 1/(1 − dropout_p). Undefined where nothing drops.
at::Tensor dropout_factors(const at::Tensor& query, const at::Tensor& key,
                           const AttentionOptions& options,
                           const std::optional<at::Tensor>& dropout_state);

}  // namespace multihead::call
