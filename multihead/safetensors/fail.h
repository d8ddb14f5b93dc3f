// SPDX-License-Identifier: MIT
#pragma once

#include <sstream>
#include <string>

#include "multihead/safetensors_error.h"

namespace multihead::safetensors {

/// Throws a SafetensorsError: `where`, a colon, and the parts as they print.
template <typename... Parts>
[[noreturn]] void fail(SafetensorsFault fault, const std::string& where,
                       const Parts&... parts) {
  std::ostringstream message;
  message << where << ": ";
  (message << ... << parts);
  throw SafetensorsError(fault, message.str());
}

}  // namespace multihead::safetensors
