// SPDX-License-Identifier: MIT
#include "multihead/distributed/parts.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>

namespace multihead::distributed {

Whole::Whole(const AttentionOptions& options, TokenOrder order,
             const Places& places, std::vector<int64_t> query_starts,
             std::vector<int64_t> key_starts)
    : options_(options),
      order_(order),
      places_(places),
      query_starts_(std::move(query_starts)),
      key_starts_(std::move(key_starts)) {
  if (options.key_lengths.defined()) {
    key_lengths_ = options.key_lengths.to(at::kLong);
  }
  if (!is_ragged()) {
    sequences_.push_back(sequence(key_lengths_, total(places.query_lengths),
                                  total(places.key_lengths)));
    return;
  }
  for (size_t n = 0; n + 1 < query_starts_.size(); ++n) {
    const auto row = static_cast<int64_t>(n);
    sequences_.push_back(sequence(
        key_lengths_.defined() ? key_lengths_.narrow(0, row, 1) : at::Tensor(),
        query_starts_[n + 1] - query_starts_[n],
        key_starts_[n + 1] - key_starts_[n]));
  }
}

Whole::Sequence Whole::sequence(const at::Tensor& key_lengths,
                                int64_t query_length,
                                int64_t key_length) const {
  Sequence s;
  s.longest_key = key_length;
  if (options_.causal_alignment == CausalAlignment::kBottomRight) {
    const at::Tensor keys = key_lengths.defined()
                                ? key_lengths
                                : at::scalar_tensor(key_length, at::kLong);
    s.offsets = keys - query_length;
  } else if (options_.query_offset.defined()) {
    s.offsets = options_.query_offset.to(at::kLong);
  }
  if (s.offsets.defined() && s.offsets.numel() > 0) {
    s.least_offset = s.offsets.min().item<int64_t>();
    s.greatest_offset = s.offsets.max().item<int64_t>();
  }
  if (key_lengths.defined() && key_lengths.numel() > 0) {
    s.longest_key = key_lengths.max().item<int64_t>();
  }
  return s;
}

std::vector<Span> Whole::queries_of(int rank) const {
  const auto spans = spans_of(order_, places_.query_lengths, rank);
  return is_ragged() ? cut(spans, query_starts_) : spans;
}

std::vector<Span> Whole::keys_of(int rank) const {
  const auto spans = spans_of(order_, places_.key_lengths, rank);
  return is_ragged() ? cut(spans, key_starts_) : spans;
}

bool Whole::hides(const Span& queries, const Span& keys) const {
  if (queries.document != keys.document) return true;
  const Sequence& s = sequences_[queries.document];
  const int64_t first = queries.position + s.least_offset;
  const int64_t last =
      queries.position + queries.length - 1 + s.greatest_offset;
  const int64_t first_key = keys.position,
                last_key = keys.position + keys.length - 1;
  if (first_key >= s.longest_key) return true;
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
  AttentionOptions part{.attn_mask = mask_of_part(attn_mask, queries, keys),
                        .dropout_p = dropout_p,
                        .is_causal = is_causal,
                        .scale = scale,
                        .enable_gqa = enable_gqa,
                        .window = window,
                        .softcap = softcap,
                        .alibi_slopes = slopes_of_part(alibi_slopes, queries)};
  if (is_causal || window || alibi_slopes.defined()) {
    const int64_t ahead = queries.position - keys.position;
    const at::Tensor& offsets = sequences_[queries.document].offsets;
    part.query_offset = offsets.defined() ? offsets + ahead
                                          : at::scalar_tensor(ahead, at::kLong);
  }
  if (key_lengths.defined()) {
    const auto row = static_cast<int64_t>(queries.document);
    const at::Tensor lengths =
        is_ragged() ? key_lengths_.narrow(0, row, 1) : key_lengths_;
    part.key_lengths = (lengths - keys.position).clamp(0, keys.length);
  }
  if (key_mask.defined()) {
    part.key_mask = key_mask.narrow(1, keys.position, keys.length);
  }
  return part;
}

std::optional<at::Tensor> Whole::dropout_state(const Span& queries,
                                               const Span& keys) const {
  if (options_.dropout_p == 0.0) return std::nullopt;
  const auto document = static_cast<int64_t>(queries.document);
  const Drawn& drawn = places_.drawn;
  return at::tensor(
      {drawn.seed, drawn.offset, drawn.first_batch + document, drawn.first_head,
       drawn.heads_in_all, queries.position, keys.position},
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

at::Tensor Whole::slopes_of_part(const at::Tensor& slopes,
                                 const Span& queries) const {
  if (!slopes.defined() || slopes.dim() < 2 || !is_ragged()) return slopes;
  return slopes.narrow(0, static_cast<int64_t>(queries.document), 1);
}

}  // namespace multihead::distributed
