// SPDX-License-Identifier: MIT
#include "multihead/distributed/parts.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>

namespace multihead::distributed {

Whole::Whole(const AttentionOptions& options, const Places& places)
    : options_(options), places_(places) {
  longest_key_ = total(places.key_lengths);
  const at::Tensor lengths = options.key_lengths.defined()
                                 ? options.key_lengths.to(at::kLong)
                                 : at::Tensor();
  if (options.causal_alignment == CausalAlignment::kBottomRight) {
    const at::Tensor keys = lengths.defined()
                                ? lengths
                                : at::scalar_tensor(longest_key_, at::kLong);
    offsets_ = keys - total(places.query_lengths);
  } else if (options.query_offset.defined()) {
    offsets_ = options.query_offset.to(at::kLong);
  }
  if (offsets_.defined() && offsets_.numel() > 0) {
    least_offset_ = offsets_.min().item<int64_t>();
    greatest_offset_ = offsets_.max().item<int64_t>();
  }
  if (lengths.defined() && lengths.numel() > 0) {
    longest_key_ = lengths.max().item<int64_t>();
  }
}

bool Whole::hides(const Span& queries, const Span& keys) const {
  const int64_t first = queries.position + least_offset_;
  const int64_t last = queries.position + queries.length - 1 + greatest_offset_;
  const int64_t first_key = keys.position,
                last_key = keys.position + keys.length - 1;
  if (first_key >= longest_key_) return true;
  if (options_.is_causal && first_key > last) return true;
  if (!options_.window) return false;
  const auto [left, right] = *options_.window;
  return (left >= 0 && last_key < first && first - last_key > left) ||
         (right >= 0 && first_key > last && first_key - last > right);
}

AttentionOptions Whole::of_part(const Span& queries, const Span& keys) const {
  // All of them: an option that a part does not get must not compile.
  const auto& [attn_mask, dropout_p, is_causal, scale, enable_gqa, alignment,
               query_offset, window, key_lengths, key_mask, softcap,
               alibi_slopes, sinks] = options_;
  AttentionOptions part{.dropout_p = dropout_p,
                        .is_causal = is_causal,
                        .scale = scale,
                        .enable_gqa = enable_gqa,
                        .window = window,
                        .softcap = softcap,
                        .alibi_slopes = alibi_slopes};
  part.attn_mask = mask_of_part(attn_mask, queries, keys);
  if (is_causal || window || alibi_slopes.defined()) {
    const int64_t ahead = queries.position - keys.position;
    part.query_offset = offsets_.defined()
                            ? offsets_ + ahead
                            : at::scalar_tensor(ahead, at::kLong);
  }
  if (key_lengths.defined()) {
    part.key_lengths =
        (key_lengths.to(at::kLong) - keys.position).clamp(0, keys.length);
  }
  if (key_mask.defined()) {
    part.key_mask = key_mask.narrow(1, keys.position, keys.length);
  }
  return part;
}

std::optional<at::Tensor> Whole::dropout_state(const Span& queries,
                                               const Span& keys,
                                               int64_t num_heads) const {
  if (options_.dropout_p == 0.0) return std::nullopt;
  return at::tensor({places_.seed, places_.offset, int64_t{0}, int64_t{0},
                     num_heads, queries.position, keys.position},
                    at::kLong);
}

at::Tensor Whole::mask_of_part(const at::Tensor& attn_mask, const Span& queries,
                               const Span& keys) const {
  at::Tensor part = attn_mask;
  if (!part.defined() || part.dim() == 0) return part;
  // Broadcast dimensions are everybody's.
  if (part.size(-1) != 1) part = part.narrow(-1, keys.position, keys.length);
  if (part.dim() > 1 && part.size(-2) != 1) {
    part = part.narrow(-2, queries.row, queries.length);
  }
  return part;
}

}  // namespace multihead::distributed
