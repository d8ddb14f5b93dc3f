// SPDX-License-Identifier: MIT
//
// Arguments of the textbook forms: weights that are drawn when none are given,
// and what must hold. Kept apart from textbook.cpp, which is about attention.
// `name` is the form that asks; errors are c10::ValueError and read
// "<name>: <argument> must <condition>, got <value>".
#pragma once

#include <array>

#include "multihead/textbook.h"

namespace multihead::textbook {

/// As torch.nn.MultiheadAttention(bias=False) draws: output, then query, key
/// and value as one matrix. dtype and device are those of `like`.
AttentionWeights draw_packed(int64_t width, const at::Tensor& like);

/// Output, query, key, value, each on its own: key and value may be narrower.
AttentionWeights draw_separate(int64_t width, int64_t kv_width,
                               const at::Tensor& like);

/// Matrices (E, E), (kv_width, E), (kv_width, E), (E, E); biases that fit, for
/// all of query, key and value or for none.
void check_weights(const char* name, const AttentionWeights& weights,
                   int64_t width, int64_t kv_width);

/// `size` features or heads must fall into `count` equal parts.
void check_heads(const char* name, const char* whole, int64_t size,
                 const char* part, int64_t count);

void check_share(const char* name, const char* argument, double share);

/// q (N, Lq, E), k and v (N, Lk, E), called `names` in the message.
void check_inputs(const char* name, const std::array<at::Tensor, 3>& inputs,
                  int64_t width,
                  const std::array<const char*, 3>& names = {"q", "k", "v"});

/// q (…, Lq, d), k (…, Lk, d), v (…, Lk, dv), mask broadcastable to
/// (…, Lq, Lk).
void check_attention_inputs(const char* name, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& mask);

/// The mask in a shape that broadcasts to (N, H, Lq, Lk); q, k (N, H, L, d).
at::Tensor mask_per_head(const char* name, const at::Tensor& mask,
                         const at::Tensor& q, const at::Tensor& k);

}  // namespace multihead::textbook
