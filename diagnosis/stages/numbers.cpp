// SPDX-License-Identifier: MIT
#include "diagnosis/stages/numbers.h"

#include <ATen/TensorOperators.h>

#include <cmath>
#include <limits>

namespace multihead::diagnosis {

using at::Tensor;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double scalar(const Tensor& x) { return x.item<double>(); }

}  // namespace

double largest_finite(const Tensor& x, const Tensor& rows) {
  if (!x.defined() || x.numel() == 0) return 0;
  Tensor size = x.detach().nan_to_num(0.0, 0.0, 0.0).abs();
  if (rows.defined()) {
    size = size.amax(-1).masked_fill(rows.logical_not(), 0.0);
  }
  return scalar(size.max());
}

double largest_difference(const Tensor& x, const Tensor& y,
                          const Tensor& rows) {
  if (x.sizes() != y.sizes()) return kInfinity;
  if (x.numel() == 0) return 0;
  Tensor difference = (x - y).abs();
  if (!std::isfinite(scalar(difference.max()))) {
    const Tensor same = x.eq(y).logical_or(x.isnan().logical_and(y.isnan()));
    difference = difference.nan_to_num(kInfinity, kInfinity, kInfinity)
                     .masked_fill(same, 0.0);
  }
  if (rows.defined()) {
    difference = difference.amax(-1).masked_fill(rows.logical_not(), 0.0);
  }
  return scalar(difference.max());
}

}  // namespace multihead::diagnosis
