// SPDX-License-Identifier: MIT
//
// Attention as textbooks and exercises write it: short functions and modules
// made of PyTorch operations only, to be read. textbook.cpp is the file to open
// first if you are learning how attention works.
//
// Each form equals torch.nn.MultiheadAttention with the same weights, bit for
// bit, on that module's ordinary path (docs/textbook.md says when PyTorch
// leaves it, and what holds then).
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <optional>
#include <tuple>

#include "multihead/modules.h"

namespace multihead {
namespace [[gnu::visibility("default")]] textbook {

/// The four matrices of an attention layer, each (out, in) as in
/// torch::nn::Linear: output = input · weightᵀ. Biases may be undefined: those
/// of query, key and value all or none.
struct AttentionWeights {
  at::Tensor query, key, value, output;
  at::Tensor query_bias = {}, key_bias = {}, value_bias = {}, output_bias = {};

  AttentionWeights() = default;
  AttentionWeights(at::Tensor query, at::Tensor key, at::Tensor value,
                   at::Tensor output);
  /// The parameters of a module, cut into the four. Throws c10::ValueError for
  /// add_bias_kv and add_zero_attn, which the textbook does not have.
  AttentionWeights(const MultiheadAttention& module);  // NOLINT: by intention
  AttentionWeights(const GroupedQueryAttention& module);  // NOLINT
};

/// Attention itself, softmax(query · keyᵀ / √d) · value: query (…, Lq, d), key
/// (…, Lk, d), value (…, Lk, dv) → output (…, Lq, dv) and weights (…, Lq, Lk).
/// mask: true or non-zero = blocked, any number type, broadcastable to (…, Lq,
/// Lk). A row with every key blocked is NaN, as in PyTorch. Throws
/// c10::ValueError, as everything here does: `<function>: <argument> must
/// <condition>, got <value>`.
std::tuple<at::Tensor, at::Tensor> scaled_dot_product_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& mask = {});

/// Multi-head attention without biases: query (N, Lq, E), key and value
/// (N, Lk, E), E = d_model → (N, Lq, E). mask: true or non-zero = blocked, of
/// any number type, broadcastable to (N, H, Lq, Lk); a 3-D mask is read as
/// (N, 1, Lq, Lk) unless its first size is N·H: then it is PyTorch's
/// (N·H, Lq, Lk), heads innermost. A row with every key blocked is NaN. Biases
/// of `weights` are used where there are any. Without weights they are drawn as
/// torch.nn.MultiheadAttention(d_model, num_heads, bias=False) draws them.
at::Tensor multi_head_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    int64_t num_heads, int64_t d_model, const at::Tensor& mask = {},
    const std::optional<AttentionWeights>& weights = {});

/// Grouped-query attention without biases: num_heads query heads (default: as
/// many as groups) share num_query_groups key/value heads. Shapes and mask as
/// in multi_head_attention; key and value weights are (G·d, E). Without weights
/// they are drawn in the order output, query, key, value, as
/// GroupedQueryAttention draws them.
at::Tensor grouped_query_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    int64_t num_query_groups, int64_t d_model, const at::Tensor& mask = {},
    std::optional<int64_t> num_heads = {},
    const std::optional<AttentionWeights>& weights = {});

/// Multi-head attention as a module with four linear layers and biases.
/// forward: Q (N, Lq, E), K and V (N, Lk, E) → (N, Lq, E); mask broadcastable
/// to (N, H, Lq, Lk), *0 or false = blocked*, 3-D masks as in
/// multi_head_attention; a row with every key blocked gets zero weights: W_o's
/// bias.
class MultiHeadAttentionImpl
    : public torch::nn::Cloneable<MultiHeadAttentionImpl> {
 public:
  MultiHeadAttentionImpl(int64_t d_model, int64_t num_heads);
  void reset() override;
  at::Tensor forward(const at::Tensor& Q, const at::Tensor& K,
                     const at::Tensor& V, const at::Tensor& mask = {});
  at::Tensor split_heads(const at::Tensor& x) const;    ///< (N,L,E) → (N,H,L,d)
  at::Tensor combine_heads(const at::Tensor& x) const;  ///< (N,H,L,d) → (N,L,E)

  int64_t d_model, num_heads, d_k;
  torch::nn::Linear W_q = nullptr, W_k = nullptr, W_v = nullptr, W_o = nullptr;
};
TORCH_MODULE(MultiHeadAttention);

/// Multi-head self-attention: x (N, L, dim) → (N, L, dim). Four linear layers
/// with biases; dropout on the weights after the softmax, in training.
class MultiHeadSelfAttentionImpl
    : public torch::nn::Cloneable<MultiHeadSelfAttentionImpl> {
 public:
  explicit MultiHeadSelfAttentionImpl(int64_t dim, int64_t num_heads = 8,
                                      double dropout = 0.1);
  void reset() override;
  at::Tensor forward(const at::Tensor& x);

  int64_t dim, num_heads;
  double dropout;
  torch::nn::Linear q_proj = nullptr, k_proj = nullptr, v_proj = nullptr,
                    out_proj = nullptr;
};
TORCH_MODULE(MultiHeadSelfAttention);

}  // namespace textbook
}  // namespace multihead
