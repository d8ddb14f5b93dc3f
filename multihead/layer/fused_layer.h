// SPDX-License-Identifier: MIT
//
// multi_head_attention_forward on the fused kernels: in-projection, attention,
// out-projection, and views between them.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <tuple>

#include "multihead/functional.h"

namespace multihead {

/// All tensors of a call, absent ones among them.
std::array<const at::Tensor*, 19> tensors_of(const at::Tensor& query,
                                             const at::Tensor& key,
                                             const at::Tensor& value,
                                             const AttentionLayer& layer,
                                             const ForwardOptions& options);

/// Arguments and results are those of multi_head_attention_forward, checked;
/// route says kFused.
std::tuple<at::Tensor, at::Tensor> fused_forward(const at::Tensor& query,
                                                 const at::Tensor& key,
                                                 const at::Tensor& value,
                                                 const AttentionLayer& layer,
                                                 const ForwardOptions& options);

}  // namespace multihead
