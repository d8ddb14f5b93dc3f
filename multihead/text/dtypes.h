// SPDX-License-Identifier: MIT
//
// Dtypes as torch names them, and as tables do.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace multihead {

/// "float32", or C++'s name where PyTorch's differs little: "Int".
inline std::string dtype_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Double:
      return "float64";
    case c10::ScalarType::Float:
      return "float32";
    case c10::ScalarType::BFloat16:
      return "bfloat16";
    case c10::ScalarType::Half:
      return "float16";
    case c10::ScalarType::Char:
      return "int8";
    default:
      return c10::toString(dtype);
  }
}

/// "f32" for "float32" or "torch.float32", "bf16" for "bfloat16".
inline std::string short_dtype(std::string name) {
  if (name.starts_with("torch.")) name.erase(0, 6);
  const size_t width = name.find("float");
  return width == std::string::npos ? name : name.erase(width + 1, 4);
}

}  // namespace multihead
