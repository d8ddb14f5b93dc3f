// SPDX-License-Identifier: MIT
//
// From sequences to heads and back: what surrounds attention in a layer. The
// order of operations is torch.nn.functional.multi_head_attention_forward's,
// because the shape and layout of each matrix product decide its last bit.
#pragma once

#include <ATen/core/Tensor.h>

#include "multihead/attention/exact.h"
#include "multihead/functional.h"

namespace multihead {

/// query (Lq, B, E), key (Lk, B, kdim), value (Lk, B, vdim). Which of them are
/// one and the same tensor decides how many products project them.
struct Sequences {
  at::Tensor query, key, value;
};

/// The three sequences with `f` applied, tensors that were one staying one.
template <typename F>
Sequences map_shared(const Sequences& s, F f) {
  const at::Tensor query = f(s.query);
  const at::Tensor key = s.key.is_same(s.query) ? query : f(s.key);
  return {query, key, s.value.is_same(s.key) ? key : f(s.value)};
}

/// D of a layer.
int64_t head_width(const AttentionLayer& layer);
/// G of a layer.
int64_t kv_heads(const AttentionLayer& layer);

/// The in-projection, cut into heads, with what bias_k, bias_v and
/// add_zero_attn append to keys and values; static_k and static_v take the
/// place of the projected ones.
exact::Heads project_in(const Sequences& inputs, const AttentionLayer& layer,
                        const ForwardOptions& options);

/// The out-projection: heads' outputs (B·H, Lq, D) → (Lq, B, E), without one
/// (Lq, B, H·D).
at::Tensor project_out(const at::Tensor& out, const exact::Heads& heads,
                       const AttentionLayer& layer);

/// As many columns as project_in appends to the keys, 0 (visible), appended
/// to a mask (…, Lk); an undefined mask stays undefined.
at::Tensor pad_mask(const at::Tensor& mask, const AttentionLayer& layer);

}  // namespace multihead
