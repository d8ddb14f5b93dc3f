// SPDX-License-Identifier: MIT
#pragma once

#include <string>
#include <string_view>

namespace multihead {

/// Text between the tags of XML or HTML, or in a quoted attribute.
inline std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

}  // namespace multihead
