// SPDX-License-Identifier: MIT
//
// Attention over a sequence whose tokens lie on several processes, and the rule
// by which the results of parts become that of the whole.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <tuple>

#include "multihead/functional.h"

namespace [[gnu::visibility("default")]] multihead {

class Provider;

/// Which tokens of a sequence of L lie on process r of W, row by row.
///   kContiguous  those after the tokens of process r − 1, as many as it has
///   kHeadTail    the sequence is cut into 2·W pieces, of which the first
///                L % (2·W) are one token longer; r has piece r, then piece
///                2·W − 1 − r. Under a causal mask all have the same work.
///                Source: the load balancing of PyTorch's context_parallel.
enum class TokenOrder { kContiguous, kHeadTail };

/// "contiguous" or "head_tail"; throws c10::ValueError for any other name.
TokenOrder token_order_from_name(std::string_view name);

/// scaled_dot_product_attention over a sequence of which this process holds
/// some tokens: query (B, H, Lq, D), key (B, G, Lk, D), value (B, G, Lk, Dv)
/// are its rows → its rows of the output, (B, H, Lq, Dv). Every process of the
/// group calls this, with the same options. Keys and values go round, so no
/// process ever holds more than its own and one other's.
/// Source: "Ring Attention with Blockwise Transformers for Near-Infinite
/// Context".
///
/// Of the options, positions (is_causal, window, query_offset, key_lengths,
/// alibi_slopes, causal_alignment) are those in the whole sequence; attn_mask
/// has this process's queries and all keys, in the order of the sequence;
/// key_mask (B, Lk) goes with the process's keys; alibi_slopes and sinks are
/// the same everywhere, and their gradients are this process's share of a sum.
/// A weight is dropped where one process would drop it, by the seed that the
/// first process draws.
///
/// `group`: the name of a registered c10d::ProcessGroup. Lengths may differ
/// from process to process as `order` allows. Results equal those of one
/// process within rounding; where every score of a row is beyond 1e6 in
/// magnitude, its logsumexp has no room for the number of keys, and shares of
/// processes are wrong. Throws, on every process, what one of them refuses
/// (c10::Error) and where the processes do not agree; and where a process is
/// gone, what the group throws, within its timeout.
at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, const std::string& group,
                          const AttentionOptions& options = {},
                          TokenOrder order = TokenOrder::kContiguous);

/// The same, with logsumexp (B, H, Lq).
std::tuple<at::Tensor, at::Tensor> ring_attention_with_lse(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::string& group, const AttentionOptions& options = {},
    TokenOrder order = TokenOrder::kContiguous);

/// varlen_attention over documents that lie one after the other on the
/// processes, cut where that may be: query (Tq, H, D), key (Tk, G, D), value
/// (Tk, G, Dv) are this process's rows, cu_seqlens those of all →
/// (Tq, H, Dv) and logsumexp (H, Tq). block_table is refused.
std::tuple<at::Tensor, at::Tensor> ring_varlen_attention_with_lse(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
    const std::string& group, const VarlenOptions& options = {},
    TokenOrder order = TokenOrder::kContiguous);

/// The same three by an exchange instead of a ring: every process gets all
/// tokens of a share of the heads, computes those, and gives the rows back.
/// Results and gradients have the bits of one process. Heads of query and of
/// key must be multiples of the number of processes, and attn_mask is refused.
/// Held: as many elements as the process's own query, key, value and output.
/// Source: "DeepSpeed Ulysses: System Optimizations for Enabling Training of
/// Extreme Long Sequence Transformer Models".
at::Tensor ulysses_attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const std::string& group,
                             const AttentionOptions& options = {},
                             TokenOrder order = TokenOrder::kContiguous);
std::tuple<at::Tensor, at::Tensor> ulysses_attention_with_lse(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::string& group, const AttentionOptions& options = {},
    TokenOrder order = TokenOrder::kContiguous);
std::tuple<at::Tensor, at::Tensor> ulysses_varlen_attention_with_lse(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
    const std::string& group, const VarlenOptions& options = {},
    TokenOrder order = TokenOrder::kContiguous);

/// How the processes share the work of a sequence that lies on them.
///   kRing     ring_attention
///   kUlysses  ulysses_attention
///   kAuto     kUlysses where it can be and sends no more than the ring, if
///             there are as many queries as keys: W processes, H heads of
///             query and G of key that W divides, H + G ≤ W·G, no attn_mask;
///             kRing elsewhere, and in graphs of torch.compile, which do not
///             know how many tokens the other processes have.
enum class ContextMethod { kAuto, kRing, kUlysses };

/// "auto", "ring" or "ulysses"; throws c10::ValueError for any other name.
ContextMethod context_method_from_name(std::string_view name);

/// For its own lifetime, all attention of this thread is over tokens of all
/// processes of the group, of which each holds its own, as `order` says:
/// multihead::scaled_dot_product_attention, varlen_attention and the modules,
/// and at::scaled_dot_product_attention. Arguments are those of ring_attention;
/// key_padding_mask of a module goes with this process's keys. What it cannot
/// do is refused: weights of a module, its attn_mask, bias_k, add_zero_attn and
/// caches, backend kExact, other devices. Source:
/// torch.distributed.tensor.experimental.context_parallel.
class ContextParallelGuard {
 public:
  explicit ContextParallelGuard(const std::string& group,
                                TokenOrder order = TokenOrder::kHeadTail,
                                ContextMethod method = ContextMethod::kAuto);
  ~ContextParallelGuard();
  ContextParallelGuard(const ContextParallelGuard&) = delete;
  ContextParallelGuard& operator=(const ContextParallelGuard&) = delete;

 private:
  std::unique_ptr<const Provider> provider_;
  const Provider* previous_;
};

/// Whether a ContextParallelGuard of this thread is alive.
bool is_context_parallel();

/// The positions in a sequence of `length` tokens of those of process `rank`
/// of `processes`, row by row: int64.
at::Tensor token_positions(int64_t length, int rank, int processes,
                           TokenOrder order = TokenOrder::kHeadTail);

/// Attention to some keys and to some others → attention to both.
///   w = sigmoid(other_lse − lse)   out + w·(other_out − out)   ln(eˡˢᵉ +
///   eᵒᵗʰᵉʳ)
/// out and other_out (…, L, Dv), lse and other_lse (…, L) as attention returns
/// them: −inf says that a row has seen no key. Differentiable. Keys must not be
/// in both; a sink must be in one of them alone.
std::tuple<at::Tensor, at::Tensor> merge_attention(const at::Tensor& out,
                                                   const at::Tensor& lse,
                                                   const at::Tensor& other_out,
                                                   const at::Tensor& other_lse);

}  // namespace multihead
