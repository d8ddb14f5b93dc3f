// SPDX-License-Identifier: MIT
//
// Text of any origin and script, made fit to be shown: columns of a terminal,
// and nothing in it that would move the cursor or end the picture.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "multihead/text/escaped.h"
#include "multihead/text/printable.h"
#include "multihead/text/width.h"

namespace cli {

using multihead::clusters;
using multihead::columns;
using multihead::escaped;
using multihead::printable;
using multihead::to_utf8;

/// The code points of UTF-8 text; a byte that is none gives U+FFFD.
std::u32string code_points(std::string_view utf8);

/// The printable form of a token, "" in quotes where it has no letters.
std::string label(std::string_view text);

/// The longest beginning that takes at most `width` columns, with "…" as its
/// last where something was left out.
std::string shortened(std::string_view text, int width);

/// The same without the sign.
std::string beginning(std::string_view text, int width);

/// shortened() with spaces up to `width` columns.
std::string padded(std::string_view text, int width, bool right = false);

/// Whether it has letters that are written from right to left.
bool is_right_to_left(std::string_view text);

}  // namespace cli
