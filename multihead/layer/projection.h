// SPDX-License-Identifier: MIT
//
// From sequences to heads and back: what surrounds attention in a layer. In the
// order of torch.nn.functional.multi_head_attention_forward, because the shape
// and layout of each matrix product decide its last bit; and in that of the
// kernels, which read heads where the products left them.
#pragma once

#include <ATen/core/Tensor.h>

#include "multihead/attention/heads.h"
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
int64_t head_dim(const AttentionLayer& layer);
/// G of a layer.
int64_t num_kv_heads(const AttentionLayer& layer);

/// The in-projection, cut into heads, with what bias_k, bias_v and
/// add_zero_attn append to keys and values; static_k and static_v take the
/// place of the projected ones. In PyTorch's order, of sequences as above.
Heads project_in(const Sequences& inputs, const AttentionLayer& layer,
                 const ForwardOptions& options);

/// The out-projection: heads' outputs (B·H, Lq, D) → (Lq, B, E), without one
/// (Lq, B, H·D).
at::Tensor project_out(const at::Tensor& out, const Heads& heads,
                       const AttentionLayer& layer);

/// The same for the kernels: of sequences as the layer was given them (with
/// batch_first (B, L, …)), query (B, H, Lq, D), key and value (B, G, Lk, D).
Sequences project_in_for_kernels(const Sequences& inputs,
                                 const AttentionLayer& layer,
                                 const ForwardOptions& options);

/// (B, H, Lq, D) → (B, Lq, E), or (Lq, B, E): heads are merged by a view, since
/// results lie in memory as queries do.
at::Tensor project_out_of_kernels(const at::Tensor& out,
                                  const AttentionLayer& layer);

/// As many columns as project_in appends to the keys, 0 (visible), appended
/// to a mask (…, Lk); an undefined mask stays undefined.
at::Tensor pad_mask(const at::Tensor& mask, const AttentionLayer& layer);

}  // namespace multihead
