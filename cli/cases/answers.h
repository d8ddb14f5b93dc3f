// SPDX-License-Identifier: MIT
//
// What this library answers to a call, and what PyTorch does, by three routes.
// They compute nothing with this library's code: modules are filled and masks
// written alike. Each function says what it can express.
#pragma once

#include <functional>
#include <tuple>

#include "cli/cases/calls.h"

namespace cli {

/// (output, weights); weights only where they are asked for.
using Answer = std::tuple<at::Tensor, at::Tensor>;
/// A module of the parameters of one layer; those of its inputs do not count.
using LayerForm = std::function<Answer(const LayerInputs&)>;

namespace ours {

/// MultiheadAttention, or GroupedQueryAttention where num_kv_heads is set.
LayerForm make_module(const AttentionLayer& layer);
/// One call of it.
Answer module(const LayerInputs& inputs);

at::Tensor attention(const AttentionInputs& inputs);

}  // namespace ours

namespace pytorch {

/// torch::nn::MultiheadAttention with the layer's parameters, which always
/// computes weights. Blocked bool masks become −inf, because it would add them
/// as 0 and 1. Not: 3-D masks, float padding, unbatched input, kdim ≠ vdim.
LayerForm make_nn_module(const AttentionLayer& layer);
/// One call of it.
Answer nn_module(const LayerInputs& inputs);
/// The same with the masks as they are, sequence first: what its users get.
at::Tensor nn_module_unaided(const LayerInputs& inputs);

/// The parameters that torch::nn::MultiheadAttention draws, without biases,
/// batch first.
AttentionLayer draw_layer(int64_t embed_dim, int64_t num_heads);

/// torch.nn.MultiheadAttention of Python, written out in ATen operations: those
/// that it runs, in its order, on operands that lie in memory as its own do.
/// Not: unbatched input, the native inference path.
Answer python_module(const LayerInputs& inputs);

/// at::_native_multi_head_attention, PyTorch's inference path. Self-attention,
/// batch first, bool masks.
Answer native(const LayerInputs& inputs);

/// Whether attn_mask is floating point: added to the scores.
bool has_bias(const AttentionOptions& options);

/// The keys that each query sees by every rule but a float mask, bool (true =
/// visible), of as few dimensions' sizes as broadcast to (B, H, Lq, Lk).
at::Tensor keep_mask(const AttentionInputs& inputs);

/// at::scaled_dot_product_attention with every rule it lacks written into one
/// float mask and keys repeated for grouped heads. Not: softcap, sinks.
at::Tensor attention_with_mask(const AttentionInputs& inputs);

/// The same call as it is: the arguments PyTorch has.
at::Tensor attention(const AttentionInputs& inputs);

/// bool (true = blocked) → 0 or −inf; float and undefined stay.
at::Tensor additive(const at::Tensor& mask, at::ScalarType dtype);

}  // namespace pytorch
}  // namespace cli
