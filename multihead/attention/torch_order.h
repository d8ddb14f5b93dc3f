// SPDX-License-Identifier: MIT
//
// PyTorch's own order of operations, for its bits, its NaN rows and its dropout
// stream: what backend "exact" runs.
#pragma once

#include <ATen/core/Tensor.h>

#include "multihead/attention/heads.h"
#include "multihead/functional.h"

namespace multihead {

/// The order of torch.nn.functional.multi_head_attention_forward with
/// need_weights: bits, NaN rows and dropout stream are PyTorch's. additive_mask
/// (1 or B·H, 1 or Lq, Lk) or undefined; G = H.
HeadResults torch_order_attention(const Heads& heads,
                                  const at::Tensor& additive_mask,
                                  double dropout_p);

/// torch.nn.functional.scaled_dot_product_attention, with those options that it
/// has.
at::Tensor pytorch_attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value,
                             const AttentionOptions& options);

}  // namespace multihead
