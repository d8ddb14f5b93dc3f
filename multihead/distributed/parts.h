// SPDX-License-Identifier: MIT
//
// A call over whole sequences, seen from a part: some queries and some keys of
// one of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "multihead/distributed/agreement.h"
#include "multihead/distributed/tokens.h"

namespace multihead::distributed {

/// What the processes hold: a batch of sequences of one length, B rows that are
/// cut alike, or documents one after the other, cut where that may be.
class Whole {
 public:
  /// `options`: those of this process's call, but key_mask of all keys.
  /// `documents`: cu_seqlens of queries and keys as numbers; empty: a batch.
  Whole(const AttentionOptions& options, TokenOrder order, const Places& places,
        std::vector<int64_t> query_starts, std::vector<int64_t> key_starts);

  /// Of what a process holds.
  std::vector<Span> queries_of(int rank) const;
  std::vector<Span> keys_of(int rank) const;

  /// Whether no query of these sees one of these keys.
  bool hides(const Span& queries, const Span& keys) const;

  /// What the part is called with: positions from its first key on, and no
  /// sinks, which are no key's.
  AttentionOptions of_part(const Span& queries, const Span& keys) const;

  /// Where the part draws its dropout, if any.
  std::optional<at::Tensor> dropout_state(const Span& queries,
                                          const Span& keys) const;

  /// attn_mask of the part, a view of the one of the call; undefined: none.
  at::Tensor mask_of_part(const at::Tensor& attn_mask, const Span& queries,
                          const Span& keys) const;

  /// alibi_slopes of the part, a view as well.
  at::Tensor slopes_of_part(const at::Tensor& slopes,
                            const Span& queries) const;

 private:
  // Of one document, or of the batch.
  struct Sequence {
    at::Tensor offsets;  ///< (), (B), or undefined: 0
    int64_t least_offset = 0, greatest_offset = 0, longest_key = 0;
  };
  Sequence sequence(const at::Tensor& key_lengths, int64_t query_length,
                    int64_t key_length) const;
  bool is_ragged() const { return !query_starts_.empty(); }

  const AttentionOptions options_;
  const TokenOrder order_;
  const Places places_;
  const std::vector<int64_t> query_starts_, key_starts_;
  at::Tensor key_lengths_;  ///< int64
  std::vector<Sequence> sequences_;
};

}  // namespace multihead::distributed
