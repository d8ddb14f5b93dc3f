// SPDX-License-Identifier: MIT
//
// torch.nn.functional.linear as the fast ways of a layer call it: by oneDNN
// where MKL is the slower one (onednn.h), by PyTorch's own otherwise.
#pragma once

#include <ATen/core/Tensor.h>

namespace multihead {

/// input (…, K), weight (N, K), bias (N) or undefined → (…, N), equal to
/// at::linear within rounding, with gradients of any order. What PyTorch's
/// operators mean more than their values for gets them: traced graphs,
/// transforms, forward-mode derivatives, autocast, modes that watch operators.
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                  const at::Tensor& bias);

}  // namespace multihead
