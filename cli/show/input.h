// SPDX-License-Identifier: MIT
//
// Where `multihead show` finds attention: a dump, or the example built in.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "cli/show/attention_map.h"
#include "multihead/safetensors.h"

namespace cli {

/// A dump with what the options add to it: tensors of --weights, and facts.
multihead::Safetensors read_files(const ShowOptions& options);

/// The weights that a dump holds, (B, H, Lq, Lk), (H, Lq, Lk), (B, Lq, Lk) or
/// (Lq, Lk), with the mask that goes with them.
Attended given_weights(const multihead::Safetensors& dump,
                       const ShowOptions& options);

/// Attention on the heads that a dump holds as `query` and `key`, or projects
/// from sequences: what its weights should be.
Attended computed_weights(const multihead::Safetensors& dump,
                          const ShowOptions& options);

bool holds_weights(const multihead::Safetensors& dump);
bool holds_inputs(const multihead::Safetensors& dump);

/// Four causal heads on two key/value heads that look back 0, 1, 2 and 4
/// tokens.
Attended demonstration();

/// Printable tokens of an option or of metadata: a JSON array of strings, of
/// arrays of strings (one for each item of the batch), or words.
std::vector<std::vector<std::string>> parse_tokens(std::string_view text,
                                                   const std::string& name);

/// The steps from `input` (B, L, E), undefined if heads are all there is, to
/// the output, for heads query (B, H, Lq, D) and key (B, G, Lk, D).
std::vector<Stage> stages_of(const at::Tensor& input, const at::Tensor& query,
                             const at::Tensor& key);

/// (B, L, H·D) → (B, H, L, D)
at::Tensor split_heads(const at::Tensor& rows, int64_t num_heads);

/// Throws std::invalid_argument: "show: ARGUMENT must CONDITION, got VALUE".
[[noreturn]] void refuse(const std::string& argument,
                         const std::string& condition, const std::string& got);

}  // namespace cli
