// SPDX-License-Identifier: MIT
//
// The masks of a layer's call, blocked-polarity and of several shapes, as one
// Mask.
#pragma once

#include <ATen/core/Tensor.h>

#include "multihead/attention/mask.h"
#include "multihead/functional.h"

namespace multihead {

/// Sizes of a layer's call, before the layer appends keys.
struct CallSizes {
  c10::SymInt batch_size, query_length, key_length;
  bool is_batched = true;
  at::Device device = at::kCPU;
};

/// attn_mask (1 or B·H, Lq, Lk), padding (B, Lk); bool: true = blocked. Float:
/// added.
struct LayerMasks {
  at::Tensor attn_mask, padding;
  bool is_causal = false;
};

inline bool is_bool(const at::Tensor& mask) {
  return mask.scalar_type() == at::kBool;
}

/// 0 and −inf for false and true; a float mask as it is.
at::Tensor additive(const at::Tensor& mask, at::ScalarType dtype);

/// The masks as they came, with a batch dimension. Under kExact, is_causal
/// without a mask is written out.
LayerMasks layer_masks(const CallSizes& sizes, const AttentionLayer& layer,
                       const ForwardOptions& options);

/// All of them over (B, H, Lq, Lk'). A causal interval would hide the keys that
/// the layer appends, so there it becomes a tensor.
Mask merge(const LayerMasks& masks, const CallSizes& sizes,
           const AttentionLayer& layer);

/// keep and bias of a Mask, but not its key_mask, as one tensor for
/// scaled_dot_product_attention: bool, true = may attend, or float; undefined
/// if there is neither.
at::Tensor attention_mask(const Mask& mask);

}  // namespace multihead
