// SPDX-License-Identifier: MIT
#include "multihead/attention/mask.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

namespace multihead {
namespace {

at::Tensor index_range(const c10::SymInt& end, at::Device device) {
  return at::arange(at::Scalar(end),
                    at::TensorOptions(at::kLong).device(device));
}

// a & b, either of which may be undefined (true everywhere).
at::Tensor both(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined()) return b;
  if (!b.defined()) return a;
  return a.logical_and(b);
}

}  // namespace

at::Tensor query_positions(const Mask& mask, const ScoreShape& shape) {
  at::Tensor positions =
      index_range(shape.query_length, shape.device).unsqueeze(-1);
  if (mask.query_offset.defined()) {
    return positions + mask.query_offset.view({-1, 1, 1, 1});
  }
  if (mask.alignment == CausalAlignment::kTopLeft) return positions;
  if (mask.key_lengths.defined()) {
    return positions + mask.key_lengths.view({-1, 1, 1, 1}) -
           at::Scalar(shape.query_length);
  }
  return positions + at::Scalar(shape.key_length - shape.query_length);
}

at::Tensor visible_keys(const Mask& mask, const ScoreShape& shape) {
  at::Tensor visible = mask.keep;
  if (mask.bias.defined()) visible = both(visible, mask.bias.ne(-kInfinity));
  if (mask.key_mask.defined()) {
    visible = both(visible, mask.key_mask.unsqueeze(1).unsqueeze(1));
  }
  if (!mask.is_causal && !mask.window && !mask.key_lengths.defined()) {
    return visible;
  }
  const at::Tensor keys = index_range(shape.key_length, shape.device);
  if (mask.key_lengths.defined()) {
    visible = both(visible, keys < mask.key_lengths.view({-1, 1, 1, 1}));
  }
  const auto [left, right] =
      mask.window.value_or(std::array<int64_t, 2>{-1, -1});
  if (!mask.is_causal && left < 0 && right < 0) return visible;

  // Distance of the key from the query's own position: 0 on the diagonal.
  const at::Tensor distance = keys - query_positions(mask, shape);
  if (mask.is_causal) visible = both(visible, distance <= 0);
  if (left >= 0) visible = both(visible, distance >= -left);
  if (right >= 0) visible = both(visible, distance <= right);
  return visible;
}

}  // namespace multihead
