// SPDX-License-Identifier: MIT
#pragma once

#include <c10/util/Exception.h>

namespace [[gnu::visibility("default")]] multihead {

/// Thrown where torch.nn.MultiheadAttention raises Python's AssertionError.
/// Its text begins with "AssertionError: ", by which the Python package, which
/// sees every c10::Error as a RuntimeError, knows it and restores the type.
class AssertionError : public c10::Error {
  using Error::Error;
};

}  // namespace multihead

// A macro, as TORCH_CHECK is one: the message is only built when it is needed.
#define MULTIHEAD_ASSERT(condition, ...)                       \
  if (!(condition)) [[unlikely]] {                             \
    throw ::multihead::AssertionError(                         \
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, \
        ::c10::str("AssertionError: ", __VA_ARGS__));          \
  }                                                            \
  static_assert(true)
