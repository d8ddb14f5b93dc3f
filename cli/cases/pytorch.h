// SPDX-License-Identifier: MIT
//
// PyTorch's own answers, by three routes that share no code with this library.
// Arguments are ours; each function says what it can express.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "cli/cases/layer_call.h"
#include "multihead/functional.h"

namespace cli::pytorch {

/// torch::nn::MultiheadAttention with the layer's parameters, which always
/// computes weights. Blocked bool masks become −inf, because it would add them
/// as 0 and 1. Not: 3-D masks, float padding, unbatched input, kdim ≠ vdim.
Module make_nn_module(const multihead::AttentionLayer& layer);

/// One call of it.
std::tuple<at::Tensor, at::Tensor> nn_module(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const multihead::AttentionLayer& layer,
    const multihead::ForwardOptions& options);

/// The same with the masks as they are: what its users get.
at::Tensor nn_module_unaided(const at::Tensor& query,
                             const multihead::AttentionLayer& layer,
                             const multihead::ForwardOptions& options);

/// The parameters that torch::nn::MultiheadAttention draws, without biases,
/// batch first.
multihead::AttentionLayer draw_layer(int64_t embed_dim, int64_t num_heads);

/// torch.nn.MultiheadAttention of Python, written out in ATen operations: those
/// that it runs, in its order, on operands that lie in memory as its own do.
/// (output, weights); no weights without need_weights. Not: unbatched input,
/// the native inference path.
std::tuple<at::Tensor, at::Tensor> python_module(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const multihead::AttentionLayer& layer,
    const multihead::ForwardOptions& options);

/// at::_native_multi_head_attention, PyTorch's inference path. Self-attention,
/// batch first, bool masks.
std::tuple<at::Tensor, at::Tensor> native(
    const at::Tensor& query, const multihead::AttentionLayer& layer,
    const multihead::ForwardOptions& options);

/// Whether attn_mask is floating point: added to the scores.
bool has_bias(const multihead::AttentionOptions& options);

/// The keys that each query sees by every rule but a float mask, bool (true =
/// visible), of as few dimensions' sizes as broadcast to (B, H, Lq, Lk).
at::Tensor keep_mask(const at::Tensor& query, const at::Tensor& key,
                     const multihead::AttentionOptions& options);

/// at::scaled_dot_product_attention with every rule it lacks written into one
/// float mask and keys repeated for grouped heads. Not: softcap, sinks.
at::Tensor attention_with_mask(const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value,
                               const multihead::AttentionOptions& options);

/// The same call as it is: the arguments PyTorch has.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value,
                     const multihead::AttentionOptions& options);

/// bool (true = blocked) → 0 or −inf; float and undefined stay.
at::Tensor additive(const at::Tensor& mask, at::ScalarType dtype);

}  // namespace cli::pytorch
