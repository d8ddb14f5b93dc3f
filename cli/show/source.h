// SPDX-License-Identifier: MIT
//
// One call of attention whose weights are to be shown: the weights themselves,
// or the heads from which the library computes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
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

  const at::Tensor& rows() const { return weights.defined() ? weights : query; }
  int64_t batch_size() const { return rows().size(0); }
  int64_t num_heads() const { return mean_of > 0 ? mean_of : rows().size(1); }
  int64_t query_length() const { return rows().size(2); }
  int64_t key_length() const {
    return weights.defined() ? weights.size(3) : key.size(2);
  }
};

/// Which part of a source is to be shown.
struct MapRequest {
  std::vector<int64_t> items;        ///< of the batch
  std::optional<int64_t> head = {};  ///< this one alone
  bool mean_only = false;
  int cells = 256;  ///< along each side; longer sequences are pooled
};

/// Measures it, item by item and head by head: maps of at most request.cells²
/// cells, entropies, strongest links. For long sequences no L×L page is made:
/// cells are attention to one-hot values, the rest is attention_summary.
Picture measure(const AttentionSource& source, const MapRequest& request);

/// The first less the second, which was measured by the same request and has
/// the same sizes.
Picture difference(Picture yours, const Picture& reference);

struct ShowOptions {
  std::string dump;                  ///< a file of tensors; empty: the example
  std::string weights;               ///< a file with a layer's parameters
  std::string tokens, query_tokens;  ///< words, or a JSON array
  std::string mask;                  ///< blocked, keep, additive; "": the dump
  std::optional<int64_t> num_heads;
  std::optional<int64_t> batch;  ///< this item; else the first, HTML: all
  std::string head = "all";      ///< a number, "mean" or "all"
  std::optional<std::string> difference;  ///< a dump; "": what it should be
  std::string colour = "auto";
  int64_t width = 0;  ///< columns; 0: the terminal's
  std::string png, svg, html;
};

/// What a dump holds, or the example built in.
AttentionSource find_attention(const ShowOptions& options);

/// What its weights are compared with: another dump's, or attention itself on
/// the inputs that the dump holds.
AttentionSource find_reference(const ShowOptions& options);

/// Throws std::invalid_argument: "show: ARGUMENT must CONDITION, got VALUE".
[[noreturn]] void refuse(const std::string& argument,
                         const std::string& condition, const std::string& got);

}  // namespace cli
