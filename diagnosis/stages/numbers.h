// SPDX-License-Identifier: MIT
//
// How large tensors are, and how far apart.
#pragma once

#include <ATen/core/Tensor.h>

namespace multihead::diagnosis {

/// Largest |x|, infinities and NaN left out; 0 of nothing.
/// rows: bool, leading dimensions of x, those that count; undefined: all.
double largest_finite(const at::Tensor& x, const at::Tensor& rows = {});

/// Largest |x − y|: 0 for two NaN or the same infinity, infinite for one NaN.
double largest_difference(const at::Tensor& x, const at::Tensor& y,
                          const at::Tensor& rows = {});

}  // namespace multihead::diagnosis
