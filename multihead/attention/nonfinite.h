// SPDX-License-Identifier: MIT
//
// The two products of attention, in which NaN and infinity stay with the rows
// that see them: a weight of 0 does not silence a NaN in a matrix product, and
// a mask does not silence it in a gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include "multihead/attention/heads.h"

namespace multihead {

/// q·kᵀ, (B·H, Lq, Lk), of query (B·H, Lq, D) and key (B·G, Lk, D). masked: not
/// every query sees every key. A key that is not finite does not reach the
/// gradients of queries that do not see it.
at::Tensor query_key_product(const Heads& heads, const at::Tensor& query,
                             const at::Tensor& key, bool masked);

/// weights·v, (B·H, Lq, Dv), of weights (B·H, Lq, Lk) and value (B·G, Lk, Dv).
/// visible: bool, broadcastable to (B, H, Lq, Lk); undefined: all.
at::Tensor weights_value_product(const Heads& heads, const at::Tensor& weights,
                                 const at::Tensor& value,
                                 const at::Tensor& visible);

/// query, 0 in rows that see no key where they are not finite: their scores are
/// masked, but in the gradient of the keys they would stand as 0·NaN.
at::Tensor seeing_queries(const Heads& heads, const at::Tensor& query,
                          const at::Tensor& visible);

/// An ordinary tensor: neither traced, vmapped, differentiated by torch.func
/// nor without storage.
bool is_plain(const at::Tensor& tensor);

/// is_plain, and nobody records what happens to it: its values may be read.
bool has_values(const at::Tensor& tensor);

}  // namespace multihead
