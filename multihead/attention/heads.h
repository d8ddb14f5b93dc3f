// SPDX-License-Identifier: MIT
//
// Attention per head: batch and heads as one dimension, as at::bmm takes them.
#pragma once

#include <ATen/core/Tensor.h>

namespace multihead {

/// The heads of one call, batch and heads in one dimension.
struct Heads {
  at::Tensor query;  ///< (B·H, Lq, D)
  at::Tensor key;    ///< (B·G, Lk, D)
  at::Tensor value;  ///< (B·G, Lk, Dv)
  c10::SymInt batch_size, num_heads, num_kv_heads;
};

struct HeadResults {
  at::Tensor out;        ///< (B·H, Lq, Dv)
  at::Tensor weights;    ///< (B·H, Lq, Lk), after dropout
  at::Tensor logsumexp;  ///< (B, H, Lq), when asked for
};

/// (B·H, …) from (B·G, …): each key/value head repeated for its query heads.
inline at::Tensor expand_groups(const at::Tensor& rows, const Heads& heads) {
  if (heads.num_heads == heads.num_kv_heads) return rows;
  return rows.unsqueeze(1)
      .expand_symint({-1, heads.num_heads / heads.num_kv_heads, -1, -1})
      .flatten(0, 1);
}

/// (B·H, Lq, X) → (B, H, Lq, X)
inline at::Tensor by_head(const at::Tensor& rows, const Heads& heads) {
  return rows.unflatten_symint(0, {heads.batch_size, heads.num_heads});
}

}  // namespace multihead
