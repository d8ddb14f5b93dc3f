// SPDX-License-Identifier: MIT
//
// Text of any origin: its code points, and what of them may be shown.
#pragma once

#include <string>
#include <string_view>

namespace multihead {

inline constexpr char32_t kNoCodePoint = 0xFFFFFFFF;

/// Takes one code point of UTF-8 (RFC 3629) off the front of `rest`, which is
/// not empty; kNoCodePoint for a byte that does not begin one.
char32_t take_code_point(std::string_view& rest);

std::string to_utf8(char32_t code_point);

/// Valid UTF-8 on one line, which commands no terminal: control characters but
/// those in `kept`, marks that turn the direction of writing, and bytes that
/// are no UTF-8 are written as escapes ("\n", "\u202e", "\xff").
std::string printable(std::string_view text, std::string_view kept = "");

}  // namespace multihead
