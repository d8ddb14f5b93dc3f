// SPDX-License-Identifier: MIT
#include "multihead/layer/masks.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>

#include "multihead/layer/projection.h"

namespace multihead {
namespace {

// (Lq, Lk), true above the diagonal.
at::Tensor causal_blocked(const CallSizes& sizes) {
  return at::ones_symint({sizes.query_length, sizes.key_length},
                         at::TensorOptions(at::kBool).device(sizes.device))
      .triu(1);
}

bool appends_keys(const AttentionLayer& layer) {
  return layer.bias_k.defined() || layer.add_zero_attn;
}

void add_to(Mask& mask, const at::Tensor& blocked_or_bias) {
  if (is_bool(blocked_or_bias)) {
    const at::Tensor keep = blocked_or_bias.logical_not();
    mask.keep = mask.keep.defined() ? mask.keep.logical_and(keep) : keep;
  } else {
    // In float32 at least: two masks full of float16's lowest number must not
    // sum to −inf. (Those of bfloat16's or float32's do, and then block.)
    const at::Tensor bias =
        blocked_or_bias.to(at::toOpMathType(blocked_or_bias.scalar_type()));
    mask.bias = mask.bias.defined() ? mask.bias + bias : bias;
  }
}

}  // namespace

at::Tensor additive(const at::Tensor& mask, at::ScalarType dtype) {
  if (!mask.defined() || !is_bool(mask)) return mask;
  return at::zeros_like(mask, mask.options().dtype(dtype))
      .masked_fill_(mask, -kInfinity);
}

LayerMasks layer_masks(const CallSizes& sizes, const AttentionLayer& layer,
                       const ForwardOptions& options) {
  LayerMasks masks{options.attn_mask(), options.key_padding_mask(),
                   options.is_causal()};
  if (masks.is_causal && !masks.attn_mask.defined() &&
      current_backend() == Backend::kExact) {
    // PyTorch has no such call: it is the call with the mask written out. The
    // hint would hide appended keys.
    masks.attn_mask = causal_blocked(sizes);
    masks.is_causal = !appends_keys(layer);
  }
  if (masks.attn_mask.defined() && masks.attn_mask.dim() == 2) {
    masks.attn_mask = masks.attn_mask.unsqueeze(0);
  }
  if (masks.padding.defined() && !sizes.is_batched) {
    masks.padding = masks.padding.unsqueeze(0);
  }
  return masks;
}

Mask merge(const LayerMasks& masks, const CallSizes& sizes,
           const AttentionLayer& layer) {
  Mask merged;
  merged.is_causal = masks.is_causal && !appends_keys(layer);
  if (masks.is_causal && !merged.is_causal) {
    add_to(merged, pad_mask(causal_blocked(sizes), layer));
  }
  if (masks.attn_mask.defined()) {
    const at::Tensor mask = pad_mask(masks.attn_mask, layer);
    add_to(merged,
           mask.sym_size(0) == 1
               ? mask
               : mask.unflatten_symint(
                     0, {sizes.batch_size, c10::SymInt(layer.num_heads)}));
  }
  if (masks.padding.defined()) {
    const at::Tensor padding = pad_mask(masks.padding, layer);
    if (is_bool(padding)) {
      merged.key_mask = padding.logical_not();
    } else {
      add_to(merged, padding.unsqueeze(1).unsqueeze(1));
    }
  }
  return merged;
}

at::Tensor attention_mask(const Mask& mask) {
  if (!mask.bias.defined()) return mask.keep;
  if (!mask.keep.defined()) return mask.bias;
  return mask.bias.masked_fill(mask.keep.logical_not(), -kInfinity);
}

}  // namespace multihead
