// SPDX-License-Identifier: MIT
#include "diagnosis/stages/windows.h"

#include <ATen/TensorOperators.h>

namespace multihead::diagnosis {

using at::Tensor;

std::array<int64_t, 2> sides_of(const GivenWindow& window,
                                WindowReading reading, bool is_causal) {
  const int64_t size = window.left + 1;
  switch (reading) {
    case WindowReading::kOwnLast:
    case WindowReading::kElsewhere:
      break;
    case WindowReading::kOwnToo:
      return {size, 0};
    case WindowReading::kBothSides:
      return {size, size};
    case WindowReading::kNearer:
      return {size - 1, size - 1};
    case WindowReading::kHalves:
      return {size / 2, size / 2};
    case WindowReading::kHalvesOrEarlier:
      if (!is_causal) return {size / 2, size / 2};
      break;
  }
  return {window.left, window.right};
}

Tensor window_as_given(const Tensor& distance, int64_t left, int64_t right) {
  if (left < 0) return right < 0 ? Tensor() : distance.gt(right);
  const Tensor before = distance.lt(-left);
  return right < 0 ? before : before | distance.gt(right);
}

}  // namespace multihead::diagnosis
