// SPDX-License-Identifier: MIT
//
// Attention in its plain form: as few lines as it takes, and no trick. It is
// attention.py in C++, but here functions are handed their matrices:
// docs/learn.md has the pictures and an example to compute by hand. These forms
// equal PyTorch's attention to rounding; multihead/textbook.h has the same
// forms with PyTorch's bits and with checks of their arguments.
//
// Letters: N batch items, H heads, G key/value heads (groups), Lq queries, Lk
// keys, d_model the width of a token, d = d_model / H the width of a head.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <tuple>

namespace learn {

using torch::Tensor;

// H query heads, G heads of keys and values.
struct Heads {
  int64_t query, key_value;
};

// Matrices (out, in) of query, key, value and output.
struct Weights {
  Tensor query, key, value, output;
};

// q (…, Lq, d), k and v (…, Lk, d); mask: true = blocked. Output, weights.
inline std::tuple<Tensor, Tensor> scaled_dot_product_attention(
    const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& mask = {}) {
  Tensor scores =
      torch::matmul(q, k.transpose(-2, -1)) / std::sqrt(double(q.size(-1)));
  if (mask.defined()) {
    scores =
        scores.masked_fill(mask != 0, -std::numeric_limits<double>::infinity());
  }
  const Tensor weights = torch::softmax(scores, -1);
  return {torch::matmul(weights, v), weights};
}

// (N, L, H·d) → (N, H, L, d): cut the features, then bring the heads forward.
inline Tensor split_heads(const Tensor& x, int64_t num_heads) {
  const int64_t d = x.size(2) / num_heads;
  return x.view({x.size(0), x.size(1), num_heads, d}).transpose(1, 2);
}

// (N, H, L, d) → (N, L, H·d): the way back, in the opposite order.
inline Tensor combine_heads(const Tensor& x) {
  const int64_t width = x.size(1) * x.size(3);
  return x.transpose(1, 2).reshape({x.size(0), x.size(2), width});
}

// A mask for each batch item, (N, Lq, Lk), holds for each of its heads.
inline Tensor per_head(const Tensor& mask) {
  return mask.defined() && mask.dim() == 3 ? mask.unsqueeze(1) : mask;
}

// q (N, Lq, d_model), k and v (N, Lk, d_model); mask: true = blocked.
inline Tensor multi_head_attention(Tensor q, Tensor k, Tensor v,
                                   int64_t num_heads, const Tensor& mask,
                                   const Weights& w) {
  q = split_heads(torch::linear(q, w.query), num_heads);
  k = split_heads(torch::linear(k, w.key), num_heads);
  v = split_heads(torch::linear(v, w.value), num_heads);
  const Tensor found =
      std::get<0>(scaled_dot_product_attention(q, k, v, per_head(mask)));
  return torch::linear(combine_heads(found), w.output);
}

// The same with fewer heads of keys and values, each for H / G query heads.
inline Tensor grouped_query_attention(Tensor q, Tensor k, Tensor v, Heads heads,
                                      const Tensor& mask, const Weights& w) {
  const int64_t copies = heads.query / heads.key_value;
  q = split_heads(torch::linear(q, w.query), heads.query);
  k = split_heads(torch::linear(k, w.key), heads.key_value);
  v = split_heads(torch::linear(v, w.value), heads.key_value);
  k = k.repeat_interleave(copies, 1);
  v = v.repeat_interleave(copies, 1);
  const Tensor found =
      std::get<0>(scaled_dot_product_attention(q, k, v, per_head(mask)));
  return torch::linear(combine_heads(found), w.output);
}

// Q (N, Lq, d_model), K and V (N, Lk, d_model); mask: 0 = blocked.
struct MultiHeadAttentionImpl : torch::nn::Module {
  MultiHeadAttentionImpl(int64_t d_model, int64_t num_heads)
      : num_heads(num_heads), d_k(d_model / num_heads) {
    W_q = register_module("W_q", torch::nn::Linear(d_model, d_model));
    W_k = register_module("W_k", torch::nn::Linear(d_model, d_model));
    W_v = register_module("W_v", torch::nn::Linear(d_model, d_model));
    W_o = register_module("W_o", torch::nn::Linear(d_model, d_model));
  }

  Tensor forward(const Tensor& Q, const Tensor& K, const Tensor& V,
                 const Tensor& mask = {}) {
    const Tensor q = split_heads(W_q(Q), num_heads);
    const Tensor k = split_heads(W_k(K), num_heads);
    const Tensor v = split_heads(W_v(V), num_heads);
    const Tensor scores =
        torch::matmul(q, k.transpose(-2, -1)) / std::sqrt(double(d_k));
    Tensor weights;
    if (!mask.defined()) {
      weights = torch::softmax(scores, -1);
    } else {  // a query that may attend to nothing gets weights 0
      const Tensor blocked = per_head(mask) == 0;
      const double lowest = std::numeric_limits<float>::lowest();
      weights = torch::softmax(scores.masked_fill(blocked, lowest), -1);
      weights = weights.masked_fill(blocked, 0.0);
    }
    return W_o(combine_heads(torch::matmul(weights, v)));
  }

  int64_t num_heads, d_k;
  torch::nn::Linear W_q = nullptr, W_k = nullptr, W_v = nullptr, W_o = nullptr;
};
TORCH_MODULE(MultiHeadAttention);

// x (N, L, dim) attends to itself; dropout on the weights, in training.
struct MultiHeadSelfAttentionImpl : torch::nn::Module {
  explicit MultiHeadSelfAttentionImpl(int64_t dim, int64_t num_heads = 8,
                                      double dropout = 0.1)
      : num_heads(num_heads), dropout(dropout) {
    q_proj = register_module("q_proj", torch::nn::Linear(dim, dim));
    k_proj = register_module("k_proj", torch::nn::Linear(dim, dim));
    v_proj = register_module("v_proj", torch::nn::Linear(dim, dim));
    out_proj = register_module("out_proj", torch::nn::Linear(dim, dim));
  }

  Tensor forward(const Tensor& x) {
    const Tensor q = split_heads(q_proj(x), num_heads);
    const Tensor k = split_heads(k_proj(x), num_heads);
    const Tensor v = split_heads(v_proj(x), num_heads);
    const Tensor scores =
        torch::matmul(q, k.transpose(-2, -1)) / std::sqrt(double(q.size(-1)));
    const Tensor weights =
        torch::dropout(torch::softmax(scores, -1), dropout, is_training());
    return out_proj(combine_heads(torch::matmul(weights, v)));
  }

  int64_t num_heads;
  double dropout;
  torch::nn::Linear q_proj = nullptr, k_proj = nullptr, v_proj = nullptr,
                    out_proj = nullptr;
};
TORCH_MODULE(MultiHeadSelfAttention);

}  // namespace learn
