// SPDX-License-Identifier: MIT
#include "multihead/attention/definition.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/xlogy.h>

#include <algorithm>
#include <cmath>

#include "multihead/attention/exact.h"
#include "multihead/attention/layout.h"
#include "multihead/attention/mask.h"

namespace multihead {
namespace {

double default_scale(const c10::SymInt& head_dim) {
  const auto width =
      static_cast<double>(head_dim.guard_int(__FILE__, __LINE__));
  return width > 0 ? 1.0 / std::sqrt(width) : 1.0;
}

// (H, L, D) → (1, H, L, D)
at::Tensor with_batch(const at::Tensor& x) {
  return x.dim() == 3 ? x.unsqueeze(0) : x;
}

// (B, heads, L, X) → (B·heads', L, X) with heads' = `heads` or, for one head
// that stands for all, repeated.
at::Tensor flatten_heads(const at::Tensor& x, const c10::SymInt& batch_size,
                         const c10::SymInt& heads) {
  const at::Tensor full = x.sym_size(0) == batch_size
                              ? x
                              : x.expand_symint({batch_size, -1, -1, -1});
  if (x.sym_size(1) == heads) return full.flatten(0, 1);
  return full.unsqueeze(2)
      .expand_symint({-1, -1, heads / x.sym_size(1), -1, -1})
      .flatten(0, 2);
}

// Keys and values may be grouped differently; then each query head gets its own
// of both.
exact::Heads heads_of(const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v) {
  const at::Tensor query = with_batch(q), key = with_batch(k),
                   value = with_batch(v);
  const auto batch_size = query.sym_size(0), num_heads = query.sym_size(1);
  const auto kv_heads =
      key.sym_size(1) == value.sym_size(1) ? key.sym_size(1) : num_heads;
  return {flatten_heads(query, batch_size, num_heads),
          flatten_heads(key, batch_size, kv_heads),
          flatten_heads(value, batch_size, kv_heads),
          batch_size,
          num_heads,
          kv_heads};
}

exact::ScoreRules rules_of(const at::Tensor& query, const AttentionOptions& o) {
  exact::ScoreRules rules{.mask = {.is_causal = o.is_causal,
                                   .alignment = o.causal_alignment,
                                   .query_offset = o.query_offset,
                                   .window = o.window,
                                   .key_mask = o.key_mask},
                          .alibi_slopes = o.alibi_slopes,
                          .sinks = o.sinks,
                          .dropout_p = o.dropout_p};
  rules.scale = o.scale.value_or(default_scale(query.sym_size(-1)));
  if (o.softcap.value_or(0.0) != 0.0) rules.softcap = o.softcap;
  if (o.key_lengths.defined()) {
    rules.mask.key_lengths = o.key_lengths.to(at::kLong);
  }
  if (o.attn_mask.defined()) {
    (o.attn_mask.scalar_type() == at::kBool ? rules.mask.keep
                                            : rules.mask.bias) = o.attn_mask;
  }
  return rules;
}

// (B·H, Lq, X) → (B, H, Lq, X), or (H, Lq, X) as query is.
at::Tensor by_head(const at::Tensor& rows, const at::Tensor& query) {
  return query.dim() == 3
             ? rows
             : rows.unflatten_symint(0, {query.sym_size(0), query.sym_size(1)});
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> define_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionOptions& options, bool with_lse,
    const at::Tensor& dropout_factors) {
  exact::ScoreRules rules = rules_of(query, options);
  rules.dropout_factors = dropout_factors;
  const exact::Attention result =
      exact::attention(heads_of(query, key, value), rules, with_lse);
  const bool squeezes = with_lse && query.dim() == 3;
  return {in_layout_of(query, by_head(result.out, query)),
          squeezes ? result.logsumexp.squeeze(0) : result.logsumexp};
}

at::Tensor define_weights(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& logsumexp,
                          const AttentionOptions& options,
                          const at::Tensor& dropout_factors, bool average) {
  exact::ScoreRules rules = rules_of(query, options);
  rules.dropout_factors = dropout_factors;
  const at::Tensor weights =
      by_head(exact::weights_from_logsumexp(heads_of(query, key, key), rules,
                                            logsumexp),
              query);
  return average ? weights.mean(-3) : weights;
}

AttentionSummary define_summary(const at::Tensor& query, const at::Tensor& key,
                                const AttentionOptions& options, int64_t k) {
  const exact::ScoreRules rules = rules_of(query, options);
  const exact::Heads heads = heads_of(query, key, key);
  const at::Tensor visible = visible_keys(
      rules.mask, {query.sym_size(-2), key.sym_size(-2), query.device()});
  const at::Tensor weights =
      exact::attention(heads, rules, false)
          .weights.to(at::toOpMathType(query.scalar_type()))
          .unflatten_symint(0, {heads.batch_size, heads.num_heads});
  // Of equal weights the lower key first; keys that are not seen last.
  const at::Tensor ranked =
      visible.defined() ? weights.masked_fill(visible.logical_not(), -1.0)
                        : weights;
  const auto [sorted, order] =
      ranked.sort(/*stable=*/true, /*dim=*/-1, /*descending=*/true);
  const int64_t missing = std::max<int64_t>(k - key.size(-2), 0);
  const at::Tensor largest =
      at::constant_pad_nd(sorted.slice(-1, 0, k), {0, missing}, -1.0);
  const at::Tensor keys =
      at::constant_pad_nd(order.slice(-1, 0, k), {0, missing}, -1);
  const at::Tensor absent = largest.lt(0);
  const auto as_query = [&](const at::Tensor& x) {
    return query.dim() == 3 ? x.squeeze(0) : x;
  };
  return {as_query(largest.masked_fill(absent, 0.0)),
          as_query(keys.masked_fill(absent, -1)),
          as_query(-at::xlogy(weights, weights).sum(-1))};
}

}  // namespace multihead
