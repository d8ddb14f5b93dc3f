// SPDX-License-Identifier: MIT
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace multihead {

/// An absent argument is an undefined tensor here, nullopt in ATen.
inline std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace multihead
