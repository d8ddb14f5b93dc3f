// SPDX-License-Identifier: MIT
//
// The ways of a layer's call besides the definition. Arguments and results are
// those of multi_head_attention_forward, checked.
#pragma once

#include <array>
#include <tuple>

#include "multihead/layer/masks.h"
#include "multihead/layer/projection.h"

namespace multihead {

/// On the fused kernels: in-projection, attention, out-projection, and views
/// between them.
std::tuple<at::Tensor, at::Tensor> fused_forward(const at::Tensor& query,
                                                 const at::Tensor& key,
                                                 const at::Tensor& value,
                                                 const AttentionLayer& layer,
                                                 const ForwardOptions& options);

/// All tensors of a call, absent ones among them.
std::array<const at::Tensor*, 19> tensors_of(const at::Tensor& query,
                                             const at::Tensor& key,
                                             const at::Tensor& value,
                                             const AttentionLayer& layer,
                                             const ForwardOptions& options);

/// Attention in the order of torch.nn.functional.multi_head_attention_forward:
/// what backend "exact" runs between the projections. Weights where options ask
/// for them.
HeadResults attend_in_torch_order(Heads heads, LayerMasks masks,
                                  const AttentionLayer& layer,
                                  const ForwardOptions& options,
                                  double dropout_p);

/// Whether PyTorch's inference path, at::_native_multi_head_attention, serves
/// the call. The conditions of torch.nn.MultiheadAttention.forward, and ours:
/// under kAuto masked rows must not turn into NaN, and is_causal must not be
/// forgotten; on the CPU the fused kernels are faster.
bool takes_fast_path(const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const AttentionLayer& layer,
                     const ForwardOptions& options);

/// Self-attention of query, where that takes the path.
std::tuple<at::Tensor, at::Tensor> fast_path(const at::Tensor& query,
                                             const AttentionLayer& layer,
                                             const ForwardOptions& options);

}  // namespace multihead
