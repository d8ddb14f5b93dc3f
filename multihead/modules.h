// SPDX-License-Identifier: MIT
//
// Attention as modules. MultiheadAttention is torch.nn.MultiheadAttention for
// C++: the same options, parameter names, initialisation, order of random
// draws and results as Python's, with what torch::nn::MultiheadAttention lacks
// (batch_first, is_causal, bool masks, unbatched input). GroupedQueryAttention
// follows the same conventions.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "multihead/functional.h"

namespace [[gnu::visibility("default")]] multihead {

/// A linear layer, weight (out, in) and bias (out), as torch::nn::Linear is,
/// that is made in a given dtype on a given device and draws its values only
/// when it is told to.
class ProjectionImpl : public torch::nn::Cloneable<ProjectionImpl> {
 public:
  ProjectionImpl(int64_t in_features, int64_t out_features, bool bias = true,
                 at::TensorOptions tensor_options = {});
  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  /// Draws weight, then bias, as torch.nn.Linear does.
  void reset_parameters();
  at::Tensor forward(const at::Tensor& input);

  at::Tensor weight, bias;

 private:
  int64_t in_features_, out_features_;
  bool has_bias_;
  at::TensorOptions tensor_options_;
};
TORCH_MODULE(Projection);

/// Options of MultiheadAttention; those of torch.nn.MultiheadAttention.
struct MultiheadAttentionOptions {
  MultiheadAttentionOptions(int64_t embed_dim, int64_t num_heads)
      : embed_dim_(embed_dim), num_heads_(num_heads) {}

  TORCH_ARG(int64_t, embed_dim);
  TORCH_ARG(int64_t, num_heads);
  TORCH_ARG(double, dropout) = 0.0;  ///< on the weights, in training only
  TORCH_ARG(bool, bias) = true;      ///< of the in- and out-projections
  TORCH_ARG(bool, add_bias_kv) = false;
  TORCH_ARG(bool, add_zero_attn) = false;
  TORCH_ARG(std::optional<int64_t>, kdim);  ///< default: embed_dim
  TORCH_ARG(std::optional<int64_t>, vdim);  ///< default: embed_dim
  TORCH_ARG(bool, batch_first) = false;
  TORCH_ARG(std::optional<at::Device>, device);
  TORCH_ARG(std::optional<at::ScalarType>, dtype);
};

/// torch.nn.MultiheadAttention. Parameters, in this order: in_proj_weight
/// (3·E, E), or q_proj_weight (E, E), k_proj_weight (E, kdim), v_proj_weight
/// (E, vdim) when kdim or vdim differ from E; in_proj_bias (3·E); bias_k,
/// bias_v (1, 1, E); out_proj.weight (E, E), out_proj.bias (E).
/// The constructor throws c10::ValueError and AssertionError as Python's does.
class MultiheadAttentionImpl
    : public torch::nn::Cloneable<MultiheadAttentionImpl> {
 public:
  MultiheadAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : MultiheadAttentionImpl(
            MultiheadAttentionOptions(embed_dim, num_heads)) {}
  explicit MultiheadAttentionImpl(const MultiheadAttentionOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Draws all parameters anew, as constructing the module does.
  void reset_parameters();

  /// See multi_head_attention_forward: (output, weights).
  std::tuple<at::Tensor, at::Tensor> forward(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
      const ForwardOptions& options = {});

  /// Projects key and value (B, L, ·), or (L, B, ·), and appends them to the
  /// cache. For cross-attention: once for an encoder's output, to which
  /// forward(query, {}, {}, ForwardOptions().cache(&cache)) then attends.
  /// key_padding_mask (B, L), bool, true = blocked, may block the last tokens
  /// of each row, which are not kept. Throws as forward with a cache does.
  void append_to_cache(KVCache& cache, const at::Tensor& key,
                       const at::Tensor& value,
                       const at::Tensor& key_padding_mask = {});

  MultiheadAttentionOptions options;
  at::Tensor in_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight;
  at::Tensor in_proj_bias, bias_k, bias_v;
  Projection out_proj = nullptr;

 private:
  AttentionLayer layer() const;
};
TORCH_MODULE(MultiheadAttention);

/// Options of GroupedQueryAttention.
struct GroupedQueryAttentionOptions {
  GroupedQueryAttentionOptions(int64_t embed_dim, int64_t num_heads,
                               int64_t num_kv_heads)
      : embed_dim_(embed_dim),
        num_heads_(num_heads),
        num_kv_heads_(num_kv_heads) {}

  TORCH_ARG(int64_t, embed_dim);
  TORCH_ARG(int64_t, num_heads);
  TORCH_ARG(int64_t, num_kv_heads);
  TORCH_ARG(double, dropout) = 0.0;
  TORCH_ARG(bool, bias) = true;
  TORCH_ARG(std::optional<int64_t>, kdim);
  TORCH_ARG(std::optional<int64_t>, vdim);
  TORCH_ARG(std::optional<int64_t>, head_dim);  ///< default: E / H
  TORCH_ARG(bool, batch_first) = false;
  TORCH_ARG(std::optional<at::Device>, device);
  TORCH_ARG(std::optional<at::ScalarType>, dtype);
};

/// Grouped-query attention: H query heads share G key/value heads; query head
/// h reads key/value head h / (H / G). G = H is multi-head, G = 1 multi-query
/// attention. Source: "GQA: Training Generalized Multi-Query Transformer Models
/// from Multi-Head Checkpoints".
/// Parameters: q_proj.{weight (H·D, E), bias}, k_proj.{weight (G·D, kdim),
/// bias}, v_proj.{weight (G·D, vdim), bias}, out_proj.{weight (E, H·D), bias}.
/// Drawn as a torch.nn.MultiheadAttention with separate weights draws them:
/// out_proj, then q, k, v by Xavier, biases 0.
class GroupedQueryAttentionImpl
    : public torch::nn::Cloneable<GroupedQueryAttentionImpl> {
 public:
  GroupedQueryAttentionImpl(int64_t embed_dim, int64_t num_heads,
                            int64_t num_kv_heads)
      : GroupedQueryAttentionImpl(
            GroupedQueryAttentionOptions(embed_dim, num_heads, num_kv_heads)) {}
  explicit GroupedQueryAttentionImpl(
      const GroupedQueryAttentionOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  void reset_parameters();

  /// See multi_head_attention_forward: (output, weights). attn_mask is
  /// (Lq, Lk) or (B·H, Lq, Lk), true = blocked.
  std::tuple<at::Tensor, at::Tensor> forward(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
      const ForwardOptions& options = {});

  /// As MultiheadAttention's; the cache has G heads.
  void append_to_cache(KVCache& cache, const at::Tensor& key,
                       const at::Tensor& value,
                       const at::Tensor& key_padding_mask = {});

  GroupedQueryAttentionOptions options;
  Projection q_proj = nullptr, k_proj = nullptr, v_proj = nullptr,
             out_proj = nullptr;

 private:
  AttentionLayer layer() const;
};
TORCH_MODULE(GroupedQueryAttention);

/// A copy of `mha` whose heads are averaged in groups into num_kv_heads
/// key/value heads (num_kv_heads = num_heads: the same function). Throws
/// c10::ValueError with add_bias_kv or add_zero_attn, which have no grouped
/// counterpart.
GroupedQueryAttention to_grouped_query(const MultiheadAttention& mha,
                                       int64_t num_kv_heads);

/// A copy of `gqa` in which every query head has a key/value head of its own:
/// the same function with more parameters. Throws c10::ValueError unless
/// head_dim·num_heads = embed_dim.
MultiheadAttention to_multihead(const GroupedQueryAttention& gqa);

}  // namespace multihead
