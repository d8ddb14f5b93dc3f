// SPDX-License-Identifier: MIT
#include <ATen/TensorOperators.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>

#include <cmath>

#include "multihead/layer/ways.h"
#include "multihead/optional_tensor.h"

namespace multihead {
namespace {

// Both masks as one to be added, (1 or B·H, 1 or Lq, Lk).
at::Tensor merge_additive(const LayerMasks& masks, const Heads& heads) {
  if (!masks.padding.defined()) return masks.attn_mask;
  const auto key_length = masks.padding.sym_size(-1);
  const at::Tensor padding =
      masks.padding.view_symint({heads.batch_size, 1, 1, key_length})
          .expand_symint({-1, heads.num_heads, -1, -1})
          .reshape_symint({heads.batch_size * heads.num_heads, 1, key_length});
  return masks.attn_mask.defined() ? masks.attn_mask + padding : padding;
}

// torch.nn.functional.scaled_dot_product_attention on the heads:
// (B·H, Lq, D) from mask (1 or B·H, 1 or Lq, Lk).
at::Tensor attend_fused_by_pytorch(const Heads& heads, const at::Tensor& mask,
                                   double dropout_p, bool is_causal) {
  const auto& [query, key, value, batch_size, num_heads, num_kv_heads] = heads;
  const auto by_head = [&](const at::Tensor& x, const c10::SymInt& n) {
    return x.view_symint({batch_size, n, x.sym_size(1), x.sym_size(2)});
  };
  at::Tensor mask4 = mask;
  if (mask.defined()) {
    mask4 =
        mask.sym_size(0) == 1
            ? mask.unsqueeze(0)
            : mask.view_symint({batch_size, num_heads, -1, mask.sym_size(-1)});
  }
  return at::scaled_dot_product_attention(
             by_head(query, num_heads), by_head(key, num_kv_heads),
             by_head(value, num_kv_heads), optional(mask4), dropout_p,
             is_causal,
             /*scale=*/std::nullopt, /*enable_gqa=*/num_heads != num_kv_heads)
      .flatten(0, 1);
}

// With need_weights. additive_mask (1 or B·H, 1 or Lq, Lk) or undefined; G = H.
HeadResults attend_with_weights(const Heads& heads,
                                const at::Tensor& additive_mask,
                                double dropout_p) {
  const auto head_dim = static_cast<double>(
      heads.query.sym_size(-1).guard_int(__FILE__, __LINE__));
  const at::Tensor query = heads.query * std::sqrt(1.0 / head_dim);
  const at::Tensor keys = heads.key.transpose(-2, -1);
  // baddbmm, not bmm and an addition: the mask enters before the rounding.
  const at::Tensor scores = additive_mask.defined()
                                ? at::baddbmm(additive_mask, query, keys)
                                : at::bmm(query, keys);
  at::Tensor weights = at::softmax(scores, -1);
  if (dropout_p > 0.0) weights = at::dropout(weights, dropout_p, true);
  return {at::bmm(weights, heads.value), weights, {}};
}

}  // namespace

HeadResults attend_in_torch_order(Heads heads, LayerMasks masks,
                                  const AttentionLayer& layer,
                                  const ForwardOptions& options,
                                  double dropout_p) {
  // PyTorch believes the hint, and drops the mask unread, only here.
  const bool trusts_hint =
      masks.is_causal && !masks.padding.defined() && !options.need_weights();
  const auto dtype = heads.query.scalar_type();
  masks.attn_mask = trusts_hint
                        ? at::Tensor()
                        : pad_mask(additive(masks.attn_mask, dtype), layer);
  masks.padding = pad_mask(additive(masks.padding, dtype), layer);
  const at::Tensor mask = merge_additive(masks, heads);
  if (!options.need_weights()) {
    return {
        attend_fused_by_pytorch(heads, mask, dropout_p, trusts_hint), {}, {}};
  }
  heads.key = expand_groups(heads.key, heads);
  heads.value = expand_groups(heads.value, heads);
  return attend_with_weights(heads, mask, dropout_p);
}

}  // namespace multihead
