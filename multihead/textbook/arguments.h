// SPDX-License-Identifier: MIT
//
// Arguments of the textbook forms: weights that are drawn when none are given,
// and what must hold. Kept apart from textbook.cpp, which is about attention.
// `name` is the form that asks; errors are c10::ValueError and read
// "<name>: <argument> must <condition>, got <value>".
#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include <array>
#include <cmath>

#include "multihead/textbook.h"

namespace multihead::textbook {

inline at::Tensor parameter(int64_t rows, int64_t columns,
                            const at::Tensor& like) {
  return at::empty({rows, columns}, like.options()).set_requires_grad(true);
}

// As torch.nn.Linear draws its weight.
inline at::Tensor draw_output(int64_t width, const at::Tensor& like) {
  return torch::nn::init::kaiming_uniform_(parameter(width, width, like),
                                           std::sqrt(5));
}

// ±√(6 / (rows + columns)) keeps the variance of activations the same from
// layer to layer, forward and backward.
inline at::Tensor draw_xavier(int64_t rows, int64_t width,
                              const at::Tensor& like) {
  return torch::nn::init::xavier_uniform_(parameter(rows, width, like));
}

inline void check_matrix(const char* name, const char* role,
                         const at::Tensor& weight, const at::Tensor& bias,
                         at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(weight.defined() && weight.sizes() == shape, name,
                    ": weights must have the ", role, " matrix of shape ",
                    shape, ", got ",
                    weight.defined() ? c10::str(weight.sizes()) : "none");
  TORCH_CHECK_VALUE(!bias.defined() || bias.sizes() == shape.slice(0, 1), name,
                    ": weights must have the ", role, " bias of shape ",
                    shape.slice(0, 1), ", got ", bias.sizes());
}

inline void check_mask(const char* name, const at::Tensor& mask,
                       at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(at::is_expandable_to(mask.sizes(), shape), name,
                    ": mask must broadcast to ", shape, ", got ", mask.sizes());
}

/// As torch.nn.MultiheadAttention(bias=False) draws: output, then query, key
/// and value as one matrix. dtype and device are those of `like`.
inline AttentionWeights draw_packed(int64_t width, const at::Tensor& like) {
  at::Tensor output = draw_output(width, like);
  const auto rows = draw_xavier(3 * width, width, like).chunk(3);
  return {rows[0], rows[1], rows[2], std::move(output)};
}

/// Output, query, key, value, each on its own: key and value may be narrower.
inline AttentionWeights draw_separate(int64_t width, int64_t kv_width,
                                      const at::Tensor& like) {
  AttentionWeights weights;
  weights.output = draw_output(width, like);
  weights.query = draw_xavier(width, width, like);
  weights.key = draw_xavier(kv_width, width, like);
  weights.value = draw_xavier(kv_width, width, like);
  return weights;
}

/// Matrices (E, E), (kv_width, E), (kv_width, E), (E, E); biases that fit, for
/// all of query, key and value or for none.
inline void check_weights(const char* name, const AttentionWeights& w,
                          int64_t width, int64_t kv_width) {
  check_matrix(name, "query", w.query, w.query_bias, {width, width});
  check_matrix(name, "key", w.key, w.key_bias, {kv_width, width});
  check_matrix(name, "value", w.value, w.value_bias, {kv_width, width});
  check_matrix(name, "output", w.output, w.output_bias, {width, width});
  const int biases =
      w.query_bias.defined() + w.key_bias.defined() + w.value_bias.defined();
  TORCH_CHECK_VALUE(biases == 0 || biases == 3, name,
                    ": weights must have biases for query, key and value, or "
                    "for none of them, got ",
                    biases);
}

/// `size` features or heads must fall into `count` equal parts.
inline void check_heads(const char* name, const char* whole, int64_t size,
                        const char* part, int64_t count) {
  TORCH_CHECK_VALUE(count > 0, name, ": ", part, " must be positive, got ",
                    count);
  TORCH_CHECK_VALUE(size > 0 && size % count == 0, name, ": ", whole,
                    " must be a positive multiple of ", part, ", got ", size,
                    " (", part, "=", count, ")");
}

/// q (N, Lq, E), k and v (N, Lk, E), called `names` in the message.
inline void check_inputs(const char* name,
                         const std::array<at::Tensor, 3>& inputs, int64_t width,
                         const std::array<const char*, 3>& names = {"q", "k",
                                                                    "v"}) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& x = inputs[i];
    TORCH_CHECK_VALUE(x.dim() == 3 && x.size(-1) == width, name, ": ", names[i],
                      " must have the shape (N, L, ", width, "), got ",
                      x.sizes());
  }
  const auto& [q, k, v] = inputs;
  TORCH_CHECK_VALUE(k.size(0) == q.size(0), name, ": ", names[1],
                    " must have the batch size of ", names[0], ", got ",
                    k.sizes(), " (", names[0], ".shape=", q.sizes(), ")");
  TORCH_CHECK_VALUE(v.sizes() == k.sizes(), name, ": ", names[2],
                    " must have the shape of ", names[1], ", got ", v.sizes(),
                    " (", names[1], ".shape=", k.sizes(), ")");
}

/// q (…, Lq, d), k (…, Lk, d), v (…, Lk, dv), mask broadcastable to
/// (…, Lq, Lk).
inline void check_attention_inputs(const char* name, const at::Tensor& q,
                                   const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& mask) {
  TORCH_CHECK_VALUE(q.dim() >= 2 && q.size(-1) > 0, name,
                    ": q must have the shape (…, Lq, d), d > 0, got ",
                    q.sizes());
  const auto lead = [](const at::Tensor& x) {
    return x.sizes().slice(0, x.dim() - 2);
  };
  TORCH_CHECK_VALUE(
      k.dim() == q.dim() && lead(k) == lead(q) && k.size(-1) == q.size(-1),
      name, ": k must have the shape (…, Lk, d) of q, got ", k.sizes(),
      " (q.shape=", q.sizes(), ")");
  TORCH_CHECK_VALUE(
      v.dim() == k.dim() && lead(v) == lead(k) && v.size(-2) == k.size(-2),
      name, ": v must have the shape (…, Lk, dv) of k, got ", v.sizes(),
      " (k.shape=", k.sizes(), ")");
  if (!mask.defined()) return;
  auto scores = q.sizes().vec();
  scores.back() = k.size(-2);
  check_mask(name, mask, scores);
}

/// The mask in a shape that broadcasts to (N, H, Lq, Lk); q, k (N, H, L, d).
inline at::Tensor mask_per_head(const char* name, const at::Tensor& mask,
                                const at::Tensor& q, const at::Tensor& k) {
  const int64_t batch = q.size(0), heads = q.size(1);
  at::Tensor per_head = mask;
  if (mask.dim() == 3) {
    per_head = mask.size(0) == batch * heads ? mask.unflatten(0, {batch, heads})
                                             : mask.unsqueeze(1);
  }
  check_mask(name, per_head, {batch, heads, q.size(-2), k.size(-2)});
  return per_head;
}

}  // namespace multihead::textbook
