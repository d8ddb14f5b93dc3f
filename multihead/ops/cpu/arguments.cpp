// SPDX-License-Identifier: MIT
#include "multihead/ops/cpu/arguments.h"

#include <ATen/OpMathType.h>

#include <cmath>

namespace multihead::ops {
namespace {

using at::Tensor;

kernels::Dtype dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return kernels::Dtype::kFloat64;
    case at::kBFloat16:
      return kernels::Dtype::kBFloat16;
    case at::kHalf:
      return kernels::Dtype::kFloat16;
    default:
      return kernels::Dtype::kFloat32;
  }
}

// In another dtype, what is repeated by stride 0 staying so.
Tensor cast_keeping_repeats(const Tensor& x, at::ScalarType dtype) {
  if (x.scalar_type() == dtype) return x;
  Tensor once = x;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.stride(d) == 0 && x.size(d) > 1) once = once.narrow(d, 0, 1);
  }
  return once.to(dtype).expand(x.sizes());
}

// What the kernels read of a bias without a copy.
bool read_as_it_is(at::ScalarType dtype, at::ScalarType compute_type) {
  return dtype == compute_type ||
         (compute_type == at::kFloat &&
          (dtype == at::kBFloat16 || dtype == at::kHalf));
}

}  // namespace

Tensor four_dimensional(const Tensor& x) {
  const Tensor batched = x.dim() == 3 ? x.unsqueeze(0) : x;
  return batched.stride(-1) == 1 || batched.size(-1) <= 1
             ? batched
             : batched.contiguous();
}

kernels::StridedRows rows_of(const Tensor& x) {
  return {x.const_data_ptr(), x.size(0) == 1 ? 0 : x.stride(0),
          x.size(1) == 1 ? 0 : x.stride(1), x.stride(2)};
}

kernels::StridedOutRows out_rows_of(const Tensor& x) {
  return {x.mutable_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

kernels::ScoreGradients score_gradients_of(const Tensor& x) {
  int64_t strides[4] = {};
  for (int64_t d = 0; d < x.dim(); ++d) {
    const bool repeats = x.size(d) == 1;
    strides[4 - x.dim() + d] = repeats ? 0 : x.stride(d);
  }
  return {x.mutable_data_ptr(), strides[0], strides[1], strides[2], strides[3]};
}

AttentionArguments::AttentionArguments(const Tensor& query, const Tensor& key,
                                       const Rules& rules)
    : query_(four_dimensional(query)), key_(four_dimensional(key)) {
  kernels::AttentionArgs& a = attention;
  a.dtype = dtype_of(query_);
  a.B = query_.size(0);
  a.H = query_.size(1);
  a.Lq = query_.size(2);
  a.D = query_.size(3);
  a.G = key_.size(1);
  a.Lk = key_.size(2);
  a.query = rows_of(query_);
  a.key = rows_of(key_);
  const auto width = static_cast<double>(a.D);
  a.scale = rules.scale.value_or(width > 0 ? 1 / std::sqrt(width) : 1.0);
  a.softcap = rules.softcap.value_or(0.0);
  a.visibility.is_causal = rules.is_causal;
  if (rules.window) {
    a.visibility.left = (*rules.window)[0];
    a.visibility.right = (*rules.window)[1];
  }
  set_tensors(rules);
  set_offsets(rules);
  set_dropout(rules);
}

void AttentionArguments::set_offsets(const Rules& rules) {
  const bool bottom_right = rules.causal_alignment == "bottom_right";
  if (!bottom_right && !rules.query_offset) return;
  kernels::AttentionArgs& a = attention;
  offsets_.resize(a.B);
  if (bottom_right) {
    const int64_t* lengths = a.visibility.key_lengths;
    for (int64_t b = 0; b < a.B; ++b) {
      offsets_[b] = (lengths ? lengths[b] : a.Lk) - a.Lq;
    }
  } else {
    const Tensor given = rules.query_offset->to(at::kLong).contiguous();
    const auto* offsets = given.const_data_ptr<int64_t>();
    for (int64_t b = 0; b < a.B; ++b) {
      offsets_[b] = offsets[given.dim() == 0 ? 0 : b];
    }
  }
  a.visibility.query_offsets = offsets_.data();
}

void AttentionArguments::set_tensors(const Rules& rules) {
  kernels::AttentionArgs& a = attention;
  if (rules.key_lengths) {
    key_lengths_ = rules.key_lengths->to(at::kLong).contiguous();
    a.visibility.key_lengths = key_lengths_.const_data_ptr<int64_t>();
  }
  if (rules.sinks) {
    sinks_ = rules.sinks->to(at::kDouble).contiguous();
    a.sinks = sinks_.const_data_ptr<double>();
  }
  if (rules.alibi_slopes) {
    slopes_ = rules.alibi_slopes->to(at::kDouble);
    a.alibi_slopes = slopes_.const_data_ptr<double>();
    a.alibi_head = slopes_.stride(-1);
    a.alibi_batch = slopes_.dim() == 2 ? slopes_.stride(0) : 0;
  }
  if (rules.key_mask) {
    key_mask_ = *rules.key_mask;
    a.key_mask = {static_cast<const uint8_t*>(key_mask_.const_data_ptr()),
                  key_mask_.stride(0), key_mask_.stride(1)};
  }
  if (!rules.attn_mask) return;
  using Kind = kernels::ScoreMask::Kind;
  const auto compute_type = at::toOpMathType(query_.scalar_type());
  const bool keep = rules.attn_mask->scalar_type() == at::kBool;
  mask_ = keep || read_as_it_is(rules.attn_mask->scalar_type(), compute_type)
              ? *rules.attn_mask
              : cast_keeping_repeats(*rules.attn_mask, compute_type);
  const Tensor full = mask_.expand({a.B, a.H, a.Lq, a.Lk});
  a.mask = {keep ? Kind::kKeep : Kind::kBias,
            full.const_data_ptr(),
            dtype_of(full),
            full.stride(0),
            full.stride(1),
            full.stride(2),
            full.stride(3)};
}

void AttentionArguments::set_dropout(const Rules& rules) {
  if (rules.dropout_p == 0.0) return;
  const Tensor state = rules.dropout_state->contiguous();
  const auto* words = state.const_data_ptr<int64_t>();
  attention.dropout = {rules.dropout_p, static_cast<uint64_t>(words[0]),
                       static_cast<uint64_t>(words[1])};
}

}  // namespace multihead::ops
