// SPDX-License-Identifier: MIT
//
// Attention as functions: what a call means, for every caller. Python's
// operators, the modules and the command all end here.
//
// Letters: B batch, H query heads, G key/value heads, Lq and Lk lengths, D head
// width, Dv value head width, E embedding width. An undefined tensor is an
// absent argument. Mask polarity differs by form, as PyTorch's does:
// scaled_dot_product_attention takes *keep* masks (true = may attend),
// multi_head_attention_forward takes *blocked* masks (true = may not attend).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "multihead/backend.h"

namespace [[gnu::visibility("default")]] multihead {

class KVCache;

/// Where the diagonal of causal masks, windows and ALiBi lies when Lq ≠ Lk:
/// query i stands at key i (kTopLeft, PyTorch's meaning) or at key
/// i + length − Lq, so that the last query stands at the last key
/// (kBottomRight). AttentionOptions::query_offset names any other key.
enum class CausalAlignment { kTopLeft, kBottomRight };

/// "top_left" or "bottom_right"; throws c10::ValueError for any other name.
CausalAlignment causal_alignment_from_name(std::string_view name);

/// The arguments of scaled_dot_product_attention beside query, key and value.
/// The first six are those of torch.nn.functional.scaled_dot_product_attention.
struct AttentionOptions {
  /// Broadcastable to (B, H, Lq, Lk). bool: true = may attend. Float: added to
  /// the scores; −inf blocks.
  at::Tensor attn_mask = {};
  /// Applied to the weights whenever > 0; there is no training flag.
  double dropout_p = 0.0;
  /// Query i sees keys j ≤ i + offset, see CausalAlignment and query_offset.
  /// With attn_mask, both apply (under kExact PyTorch decides).
  bool is_causal = false;
  /// Factor of q·k; default 1/√D. Any finite number.
  std::optional<double> scale = {};
  /// Allows fewer key/value heads: query head h reads head h / (H / G).
  bool enable_gqa = false;

  CausalAlignment causal_alignment = CausalAlignment::kTopLeft;
  /// Integers, () or (B), from −2^62 to 2^62: query i of batch row b stands at
  /// key i + query_offset[b]. Instead of kBottomRight, not beside it.
  at::Tensor query_offset = {};
  /// (left, right): query i sees keys from i + offset − left to
  /// i + offset + right; −1 = no limit on that side.
  std::optional<std::array<int64_t, 2>> window = {};
  /// Integers (B): keys from key_lengths[b] on do not exist for batch row b.
  at::Tensor key_lengths = {};
  /// bool (B, Lk): true = may be attended to. With attn_mask, both apply, and
  /// nothing of the size (Lq, Lk) is formed.
  at::Tensor key_mask = {};
  /// scores become softcap·tanh(scores / softcap), before the mask is added;
  /// 0: they stay as they are.
  std::optional<double> softcap = {};
  /// (H) or (B, H): scores lose slope·|i + offset − j|.
  at::Tensor alibi_slopes = {};
  /// (H): one more logit per head in the denominator of the softmax.
  at::Tensor sinks = {};
};

/// softmax(scale·query·keyᵀ + mask)·value, with everything in `options`.
/// Source: torch.nn.functional.scaled_dot_product_attention, extended.
///
/// query (B, H, Lq, D), key (B, G, Lk, D), value (B, G, Lk, Dv), floating and
/// of one dtype → (B, H, Lq, Dv). Key and value may be stored narrower:
/// bfloat16 under float32, or rows of to_mxint8 (mxint8.h). 3-D tensors are (H,
/// L, D) with B = 1. Other ranks go to PyTorch and take PyTorch's arguments
/// only. A row that sees no key gives 0; NaN in keys and values that a row does
/// not see changes nothing for it (kExact: what PyTorch does). Throws
/// c10::ValueError where an argument is outside its domain and c10::Error where
/// shapes, dtypes or devices do not fit together.
at::Tensor scaled_dot_product_attention(const at::Tensor& query,
                                        const at::Tensor& key,
                                        const at::Tensor& value,
                                        const AttentionOptions& options = {});

/// The same, with logsumexp (B, H, Lq) of the scores each row sees, sink
/// included; −inf where a row sees nothing. float32, float64 for float64.
std::tuple<at::Tensor, at::Tensor> scaled_dot_product_attention_with_lse(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionOptions& options = {});

/// The arguments of varlen_attention beside the tensors: those of
/// AttentionOptions, with these differences.
struct VarlenOptions {
  double dropout_p = 0.0;
  bool is_causal = false;
  std::optional<double> scale = {};
  /// The last query of a sequence stands at its last key.
  CausalAlignment causal_alignment = CausalAlignment::kBottomRight;
  std::optional<std::array<int64_t, 2>> window = {};
  /// Integers (N) of int32 or int64: of the keys of sequence n, those from
  /// key_lengths[n] on are not read.
  at::Tensor key_lengths = {};
  std::optional<double> softcap = {};
  at::Tensor alibi_slopes = {};  ///< (H) or (N, H)
  at::Tensor sinks = {};         ///< (H)
  /// int32 (N, pages): key and value are pages (P, page, G, D), and key j of
  /// sequence n is row j % page of page block_table[n][j / page]. Wants
  /// key_lengths, and no cu_seqlens_k. Entries beyond a length are not read.
  at::Tensor block_table = {};
};

/// Attention of N sequences that lie one after the other, without padding: only
/// rows that exist are computed. Source: flash_attn_varlen_func of
/// FlashAttention.
///
/// query (Tq, H, D), key (Tk, G, D), value (Tk, G, Dv), H a multiple of G
/// → (Tq, H, Dv). cu_seqlens_q and cu_seqlens_k (N + 1) are int32 or int64 on
/// the CPU: sequence n has the rows from cu_seqlens[n] to cu_seqlens[n + 1]; so
/// they begin with 0, ascend and end with Tq and Tk. Sequences may be empty.
/// The bits of a sequence are those that it has alone, and in a padded batch;
/// dropout is that of batch row n.
/// Throws c10::ValueError where an argument is outside its domain and
/// c10::Error where shapes, dtypes or devices do not fit together.
at::Tensor varlen_attention(const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value,
                            const at::Tensor& cu_seqlens_q,
                            const at::Tensor& cu_seqlens_k,
                            const VarlenOptions& options = {});

/// The same, with logsumexp (H, Tq).
std::tuple<at::Tensor, at::Tensor> varlen_attention_with_lse(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
    const VarlenOptions& options = {});

/// What each query attends to, per head. Memory O(Lq·k).
struct AttentionSummary {
  at::Tensor weights;  ///< (B, H, Lq, k), the largest, descending
  at::Tensor keys;     ///< int64, likewise; −1 where fewer keys are seen
  at::Tensor entropy;  ///< (B, H, Lq), −Σ w·ln w over all keys
};

/// The k largest weights of each query (of equal ones the lower key first),
/// their keys, and the entropy, without ever forming the weights: two passes
/// over query·key. query (B, H, Lq, D), key (B, G, Lk, D), or without B;
/// `options` as for scaled_dot_product_attention, dropout_p 0. Numbers are
/// float32, float64 for float64; nothing is differentiable.
AttentionSummary attention_summary(const at::Tensor& query,
                                   const at::Tensor& key, int64_t k,
                                   const AttentionOptions& options = {});

/// The ways that a call can go.
///  kFused       the fused kernels
///  kDefinition  the definition of docs/parity.md, in ATen operations
///  kTorchOrder  PyTorch's own order of operations, in ATen operations
///  kPyTorch     PyTorch's own function, or its inference path
///  kRefused     none: under kFused, the call throws the reason
enum class Way { kFused, kDefinition, kTorchOrder, kPyTorch, kRefused };

/// "fused", "definition", "torch_order", "pytorch" or "refused".
const char* name_of(Way way);

struct Route {
  Way way = Way::kFused;
  std::string reason = {};  ///< why not kFused; empty where it is
};

/// Which way a call would go under this thread's backend. Nothing is computed,
/// and the arguments are not checked: calls that throw have a route too.
Route route(const at::Tensor& query, const at::Tensor& key,
            const at::Tensor& value, const AttentionOptions& options = {},
            bool with_lse = false);

/// Parameters and configuration of one attention layer, as the modules hold
/// them: the members of torch.nn.MultiheadAttention by their names, plus what
/// grouped heads need.
struct AttentionLayer {
  int64_t embed_dim = 0;
  int64_t num_heads = 0;
  std::optional<int64_t> num_kv_heads = {};  ///< G; default num_heads
  std::optional<int64_t> head_dim = {};  ///< D; default embed_dim / num_heads

  /// (3·E, E), rows in q, k, v order; undefined: the three below.
  at::Tensor in_proj_weight = {};
  at::Tensor q_proj_weight = {};  ///< (H·D, E)
  at::Tensor k_proj_weight = {};  ///< (G·D, kdim)
  at::Tensor v_proj_weight = {};  ///< (G·D, vdim)
  /// (3·E), also with separate weights; undefined: the three below, if any.
  at::Tensor in_proj_bias = {};
  at::Tensor q_proj_bias = {};  ///< (H·D)
  at::Tensor k_proj_bias = {};  ///< (G·D)
  at::Tensor v_proj_bias = {};  ///< (G·D)
  /// (E, H·D); undefined: the output is (Lq, B, H·D), head beside head.
  at::Tensor out_proj_weight = {};
  at::Tensor out_proj_bias = {};  ///< (E)
  /// query (Lq, B, H·D), key and value (Lk, B, G·D) are projected already, and
  /// embed_dim is H·D. There are no weights of projections then.
  bool is_projected = false;

  at::Tensor bias_k = {};      ///< (1, 1, G·D), appended after the last key
  at::Tensor bias_v = {};      ///< (1, 1, G·D), both or none
  bool add_zero_attn = false;  ///< appends a zero key and value, last

  double dropout_p = 0.0;  ///< on the weights, in training only
  bool training = false;
  bool batch_first = false;
  /// Where these are heads first_head, first_head + 1, … of so many in all,
  /// they drop on the kernels what those would drop together.
  std::optional<int64_t> heads_in_all = {};
  int64_t first_head = 0;
};

/// The arguments of a layer's forward beside query, key and value: those of
/// torch.nn.MultiheadAttention.forward, then those of its functional.
class ForwardOptions {
  using CachePointer = KVCache*;

  /// (B, Lk), unbatched (Lk). bool: true = key blocked. Float: added.
  TORCH_ARG(at::Tensor, key_padding_mask);
  TORCH_ARG(bool, need_weights) = true;
  /// (Lq, Lk) or (B·H, Lq, Lk), head index innermost. bool: true = blocked.
  /// Float: added to the scores.
  TORCH_ARG(at::Tensor, attn_mask);
  TORCH_ARG(bool, average_attn_weights) = true;
  /// Query i sees keys j ≤ i. Without attn_mask it means just that. With
  /// attn_mask both apply; under kExact it is PyTorch's hint that attn_mask is
  /// the causal mask.
  TORCH_ARG(bool, is_causal) = false;
  /// (B·G, Lk, D), take the place of the projected keys and values.
  TORCH_ARG(at::Tensor, static_k);
  TORCH_ARG(at::Tensor, static_v);
  /// Allows at::_native_multi_head_attention, PyTorch's inference path, where
  /// PyTorch would take it (torch.backends.mha.set_fastpath_enabled).
  TORCH_ARG(bool, fast_path) = true;
  /// Self-attention with what came before (cache.h): the new tokens, query, key
  /// and value, go into the cache, and query i of row b sees all tokens that
  /// the row had and its new ones up to i, with and without is_causal.
  /// key_padding_mask (B, L), bool, may block the last of the new tokens: they
  /// are not kept, and what comes out for them means nothing.
  /// Undefined key and value: every query sees all that its row of the cache
  /// holds, and nothing is appended; so a decoder attends to an encoder's
  /// output, which the modules' append_to_cache has put there. Nothing is
  /// differentiated. The weights are (B, …, L, longest length). attn_mask,
  /// dropout, bias_k, add_zero_attn and unbatched inputs throw c10::ValueError
  /// or c10::Error, before anything is written.
  TORCH_ARG(CachePointer, cache) = nullptr;
};

/// Multi-head attention: projections, attention per head, output projection.
/// Source: "Attention Is All You Need", section 3.2.2;
/// torch.nn.functional.multi_head_attention_forward.
///
/// query (Lq, B, E), key (Lk, B, kdim), value (Lk, B, vdim), the first two
/// dimensions exchanged with batch_first, or without the batch dimension.
/// Returns the output, shaped like query, and the weights: (B, Lq, Lk'), per
/// head (B, H, Lq, Lk'), without the batch dimension for unbatched input,
/// undefined without need_weights. Lk' counts the columns that bias_k and
/// add_zero_attn append. Weights are those after dropout.
/// Throws AssertionError, c10::ValueError and c10::Error where
/// torch.nn.MultiheadAttention raises AssertionError, ValueError, RuntimeError.
std::tuple<at::Tensor, at::Tensor> multi_head_attention_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionLayer& layer, const ForwardOptions& options = {});

/// Which way a call would go, as above.
Route route(const at::Tensor& query, const at::Tensor& key,
            const at::Tensor& value, const AttentionLayer& layer,
            const ForwardOptions& options = {});

/// Key or value rows of all heads, averaged over groups of heads: rows
/// (H·D, …) → (G·D, …). Source: "GQA: Training Generalized Multi-Query
/// Transformer Models from Multi-Head Checkpoints", section 2.1.
at::Tensor pool_heads(const at::Tensor& rows, int64_t num_heads,
                      int64_t num_kv_heads);

/// The inverse for equal heads: rows (G·D, …) → (H·D, …), each head repeated
/// H / G times. Multi-head attention with repeated heads equals grouped-query
/// attention.
at::Tensor repeat_heads(const at::Tensor& rows, int64_t num_heads,
                        int64_t num_kv_heads);

}  // namespace multihead
