// SPDX-License-Identifier: MIT
//
// VarlenRows of different lengths, one after the other: what varlen_attention
// asks of them, where they lie, and the definition, sequence by sequence.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "multihead/functional.h"

namespace multihead {

/// Which rows of query, key and value belong to which sequence, as
/// varlen_attention takes it; undefined: absent. Lengths of keys are
/// AttentionOptions::key_lengths.
struct VarlenRows {
  at::Tensor cu_seqlens_q;
  at::Tensor cu_seqlens_k;
  at::Tensor block_table;
};

/// The same as numbers, for N sequences.
struct VarlenPlaces {
  std::vector<int64_t> query_starts;  ///< (N + 1)
  std::vector<int64_t> key_starts;    ///< (N + 1); empty: in pages
  std::vector<int64_t> key_lengths;   ///< (N)
  at::Tensor block_table;             ///< (N, pages) int32, dense, or undefined

  int64_t count() const {
    return static_cast<int64_t>(query_starts.size()) - 1;
  }
  int64_t query_length(int64_t n) const {
    return query_starts[n + 1] - query_starts[n];
  }
  int64_t longest_query() const;
  /// Of the rows that have a place, or of the lengths in pages.
  int64_t longest_key() const;
};

/// Shapes, dtypes and devices, and which arguments come together. Sizes may be
/// symbolic; no value is read.
void check_varlen(const at::Tensor& query, const at::Tensor& key,
                  const at::Tensor& value, const VarlenRows& sequences,
                  const AttentionOptions& options);

/// Reads and checks the numbers; after check_varlen.
VarlenPlaces places_of(const at::Tensor& query, const at::Tensor& key,
                       const VarlenRows& sequences,
                       const AttentionOptions& options);

namespace definition {

/// out (Tq, H, Dv) and logsumexp (H, Tq), undefined unless with_lse: one call
/// of `attention` (definition.h) for each sequence. dropout_factors
/// (N, H, Lq, Lk), of the longest sequence, or undefined.
std::tuple<at::Tensor, at::Tensor> varlen_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const VarlenRows& sequences, const AttentionOptions& options, bool with_lse,
    const at::Tensor& dropout_factors = {});

}  // namespace definition
}  // namespace multihead
