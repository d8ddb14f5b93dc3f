// SPDX-License-Identifier: MIT
//
// Shapes as error messages print them.
#pragma once

#include <ATen/core/Tensor.h>

#include <sstream>
#include <string>

namespace multihead {

// "(2, 3)", as Python prints a tuple.
inline std::string tuple_text(c10::SymIntArrayRef sizes) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

inline std::string shape_text(const at::Tensor& tensor) {
  return tuple_text(tensor.sym_sizes());
}

// " (query.shape=(…), key.shape=(…), value.shape=(…))"
inline std::string shapes_text(const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value) {
  return c10::str(" (query.shape=", shape_text(query),
                  ", key.shape=", shape_text(key),
                  ", value.shape=", shape_text(value), ")");
}

}  // namespace multihead
