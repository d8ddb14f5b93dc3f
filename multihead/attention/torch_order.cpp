// SPDX-License-Identifier: MIT
#include "multihead/attention/torch_order.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>

#include <cmath>

#include "multihead/optional_tensor.h"

namespace multihead {

HeadResults torch_order_attention(const Heads& heads,
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

at::Tensor pytorch_attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value,
                             const AttentionOptions& o) {
  return at::scaled_dot_product_attention(query, key, value,
                                          optional(o.attn_mask), o.dropout_p,
                                          o.is_causal, o.scale, o.enable_gqa);
}

}  // namespace multihead
