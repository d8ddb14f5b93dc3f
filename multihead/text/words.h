// SPDX-License-Identifier: MIT
//
// Words and tokens for people, in columns that line up.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace multihead {

/// What printf would print.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

/// "1 thread", "2 threads"
std::string plural(int64_t count, const std::string& noun);

/// The words with `between` between them.
std::string joined(const std::vector<std::string>& words,
                   const std::string& between = " ");

/// The printable form of a token, "" in quotes where it has no letters.
std::string label(std::string_view text);

/// The longest beginning that takes at most `width` columns, with "…" as its
/// last where something was left out.
std::string shortened(std::string_view text, int width);

/// The same without the sign.
std::string beginning(std::string_view text, int width);

/// shortened() with spaces up to `width` columns.
std::string padded(std::string_view text, int width, bool right = false);

/// Known signs become ASCII ones, "×" an "x", other letters question marks.
std::string in_ascii(std::string_view text);

/// Whether it has letters that are written from right to left.
bool is_right_to_left(std::string_view text);

}  // namespace multihead
