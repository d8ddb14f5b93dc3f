// SPDX-License-Identifier: MIT
//
// Where `multihead show` finds attention: a dump, or the example built in.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/show/attention_map.h"
#include "multihead/safetensors.h"

namespace cli {

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

/// A dump with what the options add to it: tensors of --weights, and facts.
multihead::Safetensors read_files(const ShowOptions& options);

/// The weights that a dump holds, (B, H, Lq, Lk), (H, Lq, Lk), (B, Lq, Lk) or
/// (Lq, Lk), with the mask that goes with them.
AttentionSource given_weights(const multihead::Safetensors& dump,
                              const ShowOptions& options);

/// Attention on the heads that a dump holds as `query` and `key`, or projects
/// from sequences: what its weights should be.
AttentionSource computed_weights(const multihead::Safetensors& dump,
                                 const ShowOptions& options);

bool holds_weights(const multihead::Safetensors& dump);
bool holds_inputs(const multihead::Safetensors& dump);

/// Four causal heads on two key/value heads that look back 0, 1, 2 and 4
/// tokens.
AttentionSource demonstration();

/// Printable tokens of an option or of metadata: a JSON array of strings, of
/// arrays of strings (one for each item of the batch), or words.
std::vector<std::vector<std::string>> parse_tokens(std::string_view text,
                                                   const std::string& name);

/// The steps from `input` (B, L, E), undefined if heads are all there is, to
/// the output, for heads query (B, H, Lq, D) and key (B, G, Lk, D).
std::vector<Stage> stages_of(const at::Tensor& input, const at::Tensor& query,
                             const at::Tensor& key);

/// Throws std::invalid_argument: "show: ARGUMENT must CONDITION, got VALUE".
[[noreturn]] void refuse(const std::string& argument,
                         const std::string& condition, const std::string& got);

}  // namespace cli
