// SPDX-License-Identifier: MIT
#include "multihead/attention/fields.h"

namespace multihead::fields {

Window Kind<Window>::unpack(at::OptionalIntArrayRef sizes) {
  if (!sizes) return std::nullopt;
  TORCH_CHECK_VALUE(sizes->size() == 2,
                    "scaled_dot_product_attention: window must be two sizes, "
                    "got ",
                    *sizes);
  return Window({(*sizes)[0], (*sizes)[1]});
}

std::string schema() {
  std::string text;
  size_t number = 0;
  for_each([&]<class T>(const Field<T>& field) {
    if (number > 0) text += ", ";
    if (number++ == kPositional) text += "*, ";
    text += Kind<T>::kSchema;
    text += " ";
    text += field.name;
    text += "=";
    text += field.default_value;
  });
  return text;
}

}  // namespace multihead::fields
