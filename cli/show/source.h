// SPDX-License-Identifier: MIT
//
// What `multihead show` is asked for, and the attention that it finds in files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "pictures/attention.h"

namespace cli {

using namespace multihead::pictures;

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

}  // namespace cli
