// SPDX-License-Identifier: MIT
//
// One call of attention whose weights are to be shown: the weights themselves,
// or the heads from which the library computes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "multihead/functional.h"
#include "pictures/picture.h"

namespace multihead::pictures {

struct AttentionSource {
  std::string title = {};
  at::Tensor weights = {};          ///< (B, H, Lq, Lk); or undefined, and then
  at::Tensor query = {}, key = {};  ///< (B, H, Lq, D), (B, G, Lk, D)
  int64_t mean_of = 0;  ///< heads, if weights are their mean, (B, 1, Lq, Lk)
  /// The mask; scale and the like are only looked at with query and key.
  AttentionOptions options = {};
  int64_t num_kv_heads = 1;
  std::vector<Stage> stages = {};
  /// Printable tokens of an item's keys and queries; one list is for all items,
  /// none at all means numbers.
  std::vector<std::vector<std::string>> keys = {}, queries = {};
  std::vector<std::string> remarks = {};  ///< what was done to it beforehand

  const at::Tensor& rows() const { return weights.defined() ? weights : query; }
  int64_t batch_size() const { return rows().size(0); }
  int64_t num_heads() const { return mean_of > 0 ? mean_of : rows().size(1); }
  int64_t query_length() const { return rows().size(2); }
  int64_t key_length() const {
    return weights.defined() ? weights.size(3) : key.size(2);
  }
};

/// One item of a batch alone.
AttentionSource item_of(const AttentionSource& source, int64_t item);

/// (B, H, Lq, Lk): the given weights, or those of query and key. As large as
/// that, so for short sequences.
at::Tensor weights_of(const AttentionSource& source);

/// The options that say which keys a query sees, for one item and head: masks
/// of bools, nothing that becomes of scores.
AttentionOptions visibility(const AttentionOptions& options, int64_t item,
                            int64_t head);

/// Without the queries and keys whose tokens are among `names`; where `scaled`,
/// rows are divided by what is left of their sum. The source has one item.
AttentionSource without(const AttentionSource& source,
                        const std::vector<std::string>& names, bool scaled);

/// "words between spaces", a JSON array of strings, or of such an array for
/// each item: printable tokens. `name` is what refusals call it.
using TokenLists = std::vector<std::vector<std::string>>;
TokenLists parse_tokens(std::string_view given, const std::string& name);

/// Refuses lists that do not fit so many items of that length.
void check_tokens(const TokenLists& lists, const std::string& name,
                  int64_t items, int64_t length);

/// Throws c10::ValueError: "show: ARGUMENT must CONDITION, got VALUE".
[[noreturn]] void refuse(const std::string& argument,
                         const std::string& condition, const std::string& got);

/// Which part of a source is to be shown.
struct MapRequest {
  std::vector<int64_t> items;        ///< of the batch
  std::optional<int64_t> head = {};  ///< this one alone
  bool mean_only = false;
  int cells = 256;        ///< along each side; longer sequences are pooled
  bool features = false;  ///< queries and keys too, where they are few
};

/// Measures it, item by item and head by head: maps of at most request.cells²
/// cells, entropies, strongest links. For long sequences no L×L page is made:
/// cells are attention to one-hot values, the rest is attention_summary.
Picture measure(const AttentionSource& source, const MapRequest& request);

/// The first less the second, which was measured by the same request and has
/// the same sizes.
Picture difference(Picture yours, const Picture& reference);

}  // namespace multihead::pictures
