// SPDX-License-Identifier: MIT
//
// A layer's forward with a cache.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "multihead/functional.h"

namespace multihead {

/// The tensors of a KVCache, and of one call.
struct CacheTensors {
  at::Tensor keys, values, lengths;
  at::Tensor counts = {};  ///< (B): new tokens of each row; undefined: all
  /// Keys from here on are no row's, once the new tokens are there. Without it
  /// all of the room is looked at, up to each row's length.
  std::optional<c10::SymInt> end = {};
};

/// How many tokens each row has, (B), where key_padding_mask (B, L), bool, true
/// = blocked, blocks the last ones of key. Throws where it blocks others.
at::Tensor right_padded_counts(const at::Tensor& key_padding_mask,
                               const at::Tensor& key, bool batch_first,
                               std::string_view function);

/// multi_head_attention_forward over the cache, which has room already. Without
/// key and value, undefined, nothing is appended; without query, nothing
/// attends, and the output has no tokens.
std::tuple<at::Tensor, at::Tensor> attend_cached(const at::Tensor& query,
                                                 const at::Tensor& key,
                                                 const at::Tensor& value,
                                                 const AttentionLayer& layer,
                                                 const ForwardOptions& options,
                                                 const CacheTensors& cache);

/// The same with options.cache(), which grows. Without query, undefined, it is
/// append_to_cache of a module.
std::tuple<at::Tensor, at::Tensor> cached_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const AttentionLayer& layer, const ForwardOptions& options);

}  // namespace multihead
