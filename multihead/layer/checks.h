// SPDX-License-Identifier: MIT
//
// What a layer asks of its arguments: what torch.nn.MultiheadAttention asserts,
// in its words.
#pragma once

#include <ATen/core/Tensor.h>

#include "multihead/functional.h"

namespace multihead {

/// Mask dtypes: torch.nn.MultiheadAttention asks for these before all else.
void check_mask_dtypes(const ForwardOptions& options);

/// Everything about multi_head_attention_forward that does not depend on
/// values, in the order in which torch.nn.MultiheadAttention finds out.
void check_forward(const at::Tensor& query, const at::Tensor& key,
                   const at::Tensor& value, const AttentionLayer& layer,
                   const ForwardOptions& options);

/// Sizes of a layer: ValueError unless positive, AssertionError unless
/// num_heads divides embed_dim (a layer with its own head_dim aside),
/// ValueError unless num_kv_heads divides num_heads.
void check_layer_sizes(const AttentionLayer& layer);

/// rows must consist of row_heads heads, num_kv_heads must divide num_heads.
void check_groups(const char* function, const at::Tensor& rows,
                  int64_t row_heads, int64_t num_heads, int64_t num_kv_heads);

}  // namespace multihead
