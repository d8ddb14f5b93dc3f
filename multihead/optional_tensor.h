// SPDX-License-Identifier: MIT
//
// An absent argument is an undefined tensor here, nullopt in ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace multihead {

inline std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

inline at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

}  // namespace multihead
