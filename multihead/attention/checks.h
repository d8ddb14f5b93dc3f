// SPDX-License-Identifier: MIT
//
// What attention as a function asks of its arguments. Whatever computes relies
// on it: entries check first, operators check what they were given. (Sizes of
// windows and names are judged where they are read, in fields.cpp.)
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

/// Domains of scaled_dot_product_attention's scalars. `fn` begins an error.
void check_domains(const AttentionOptions& options,
                   const char* fn = "scaled_dot_product_attention: ");

/// Those of slopes, (H) or (B, H), and sinks, (H).
void check_slopes_and_sinks(const AttentionOptions& options,
                            const c10::SymInt& batch_size,
                            const c10::SymInt& num_heads, const char* fn);

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

/// What attention of query returned: it must fit.
void check_logsumexp(const char* function, const at::Tensor& query,
                     const at::Tensor& logsumexp);

/// int64 (2), there when dropout_p > 0.
void check_dropout_state(double dropout_p,
                         const std::optional<at::Tensor>& state);

/// A number of keys to keep per row: not negative.
void check_count(int64_t count);

}  // namespace multihead
