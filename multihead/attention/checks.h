// SPDX-License-Identifier: MIT
//
// The only layer that judges arguments. Everything below may rely on it.
#pragma once

#include <ATen/core/Tensor.h>

#include "multihead/functional.h"

namespace multihead {

/// C++ callers can hand over tensors that do not exist.
void check_defined(const char* function, const at::Tensor& query,
                   const at::Tensor& key, const at::Tensor& value);

/// As many values as keys.
void check_lengths(const at::Tensor& key, const at::Tensor& value);

/// What PyTorch's own function does not survive: lengths of key and value that
/// differ, it reads beyond the end of the shorter one; and, to be grouped,
/// values with heads beside keys without any, by whose number it divides.
void check_for_pytorch(const at::Tensor& key, const at::Tensor& value,
                       bool enable_gqa);

/// Domains of scaled_dot_product_attention's scalars.
void check_domains(const AttentionOptions& options);

/// Shapes, dtypes and devices of scaled_dot_product_attention, ranks 3 and 4.
void check_attention(const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const AttentionOptions& options);

/// float32, float64, bfloat16, float16: what kernels exist for.
bool is_fused_dtype(at::ScalarType dtype);

/// check_domains and check_attention, and what the kernels ask beyond: as many
/// value heads as key heads.
void check_fused_attention(const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value,
                           const AttentionOptions& options);

/// The same without values; logsumexp must fit query.
void check_from_logsumexp(const char* function, const at::Tensor& query,
                          const at::Tensor& key, const at::Tensor& logsumexp,
                          const AttentionOptions& options);

/// int64 (2), there when dropout_p > 0.
void check_dropout_state(double dropout_p, const at::Tensor& state);

/// A number of keys to keep per row: not negative.
void check_count(int64_t count);

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
