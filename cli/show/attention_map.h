// SPDX-License-Identifier: MIT
//
// One call of attention whose weights are to be shown: the weights themselves,
// or the heads from which the library computes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "cli/show/picture.h"
#include "multihead/functional.h"

namespace cli {

struct AttentionSource {
  std::string title;
  at::Tensor weights = {};          ///< (B, H, Lq, Lk); or undefined, and then
  at::Tensor query = {}, key = {};  ///< (B, H, Lq, D), (B, G, Lk, D)
  int64_t mean_of = 0;  ///< heads, if weights are their mean, (B, 1, Lq, Lk)
  /// The mask; scale and the like are only looked at with query and key.
  multihead::AttentionOptions options = {};
  int64_t num_kv_heads = 1;
  std::vector<Stage> stages = {};
  /// Printable tokens of an item's keys and queries; one list is for all items,
  /// none at all means numbers.
  std::vector<std::vector<std::string>> keys = {}, queries = {};

  int64_t batch_size() const;
  int64_t num_heads() const;
  int64_t query_length() const;
  int64_t key_length() const;
};

/// Which part of a source is to be shown.
struct MapRequest {
  std::vector<int64_t> items;        ///< of the batch
  std::optional<int64_t> head = {};  ///< this one alone
  bool mean_only = false;
  int cells = 256;  ///< along each side; longer sequences are pooled
};

/// Measures it, item by item and head by head: maps of at most request.cells²
/// cells, entropies, strongest links. Of long sequences no L×L page is made:
/// cells are attention to one-hot values, the rest is attention_summary.
Picture measure(const AttentionSource& source, const MapRequest& request);

/// The first less the second, which was measured by the same request and has
/// the same sizes.
Picture difference(Picture yours, const Picture& reference);

}  // namespace cli
