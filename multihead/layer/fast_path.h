// SPDX-License-Identifier: MIT
//
// PyTorch's inference path, at::_native_multi_head_attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "multihead/functional.h"

namespace multihead {

/// The conditions of torch.nn.MultiheadAttention.forward, and ours: under kAuto
/// masked rows must not turn into NaN, and is_causal must not be forgotten; on
/// the CPU the fused kernels are faster.
bool takes_fast_path(const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const AttentionLayer& layer,
                     const ForwardOptions& options);

/// Self-attention of query, where that takes the path.
std::tuple<at::Tensor, at::Tensor> fast_path(const at::Tensor& query,
                                             const AttentionLayer& layer,
                                             const ForwardOptions& options);

}  // namespace multihead
