// SPDX-License-Identifier: MIT
#include "cli/terminal/format.h"

#include <cstdarg>
#include <cstdio>

namespace cli {

std::string format(const char* pattern, ...) {
  va_list values, again;
  va_start(values, pattern);
  va_copy(again, values);
  std::string text(std::vsnprintf(nullptr, 0, pattern, values), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  va_end(values);
  return text;
}

}  // namespace cli
