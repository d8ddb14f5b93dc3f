// SPDX-License-Identifier: MIT
#include "multihead/text/printable.h"

#include <cstdio>

namespace multihead {
namespace {

// The marks that turn the direction of all that follows; of the joiners only
// those that letters need are left in.
bool is_directional(char32_t c) {
  return (c >= 0x202A && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069) ||
         c == 0x200E || c == 0x200F || c == 0x061C;
}

bool is_unprintable(char32_t c) {
  return c < 0x20 || (c >= 0x7F && c < 0xA0) || is_directional(c) ||
         c == 0x2028 || c == 0x2029 || c == 0xFEFF || (c & 0xFFFE) == 0xFFFE ||
         (c >= 0xFDD0 && c <= 0xFDEF);
}

std::string escape(const char* format, unsigned value) {
  char text[16];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string escape(char32_t c) {
  if (c == '\n') return "\\n";
  if (c == '\t') return "\\t";
  if (c == '\r') return "\\r";
  return c < 0x100 ? escape("\\x%02x", c) : escape("\\u%04x", c);
}

}  // namespace

char32_t take_code_point(std::string_view& rest) {
  const auto byte = [&](size_t i) -> unsigned {
    return i < rest.size() ? static_cast<unsigned char>(rest[i]) : 0;
  };
  const unsigned lead = byte(0);
  const size_t length = lead < 0x80   ? 1
                        : lead < 0xC2 ? 0
                        : lead < 0xE0 ? 2
                        : lead < 0xF0 ? 3
                        : lead < 0xF5 ? 4
                                      : 0;
  char32_t c = length > 1 ? lead & (0x7F >> length) : lead;
  bool valid = length > 0;
  // The second byte's range excludes overlong forms, surrogates and code
  // points above U+10FFFF.
  unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < length; ++i, low = 0x80, high = 0xBF) {
    valid = valid && byte(i) >= low && byte(i) <= high;
    c = c << 6 | (byte(i) & 0x3F);
  }
  rest.remove_prefix(valid ? length : 1);
  return valid ? c : kNoCodePoint;
}

std::string to_utf8(char32_t c) {
  const auto tail = [&](int shift) {
    return static_cast<char>(0x80 | (c >> shift & 0x3F));
  };
  if (c < 0x80) return {static_cast<char>(c)};
  if (c < 0x800) return {static_cast<char>(0xC0 | c >> 6), tail(0)};
  if (c < 0x10000) return {static_cast<char>(0xE0 | c >> 12), tail(6), tail(0)};
  return {static_cast<char>(0xF0 | c >> 18), tail(12), tail(6), tail(0)};
}

std::string printable(std::string_view text, std::string_view kept) {
  std::string result;
  while (!text.empty()) {
    const char first = text[0];
    const char32_t c = take_code_point(text);
    if (c == kNoCodePoint)
      result += escape("\\x%02x", static_cast<unsigned char>(first));
    else if (is_unprintable(c) && kept.find(first) == kept.npos)
      result += escape(c);
    else
      result += to_utf8(c);
  }
  return result;
}

}  // namespace multihead
