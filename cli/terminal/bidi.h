// SPDX-License-Identifier: MIT
//
// The order in which letters stand on a line where some of them are written
// from right to left.
#pragma once

#include <string>
#include <string_view>

namespace cli {

/// The code points of printable text from left to right, brackets turned where
/// they are read from the right: Unicode's algorithm (UAX #9) for a line that
/// as a whole runs from left to right, as SVG's texts do. Pairs of brackets are
/// not matched (rule N0), and printable text has no marks that embed.
std::u32string visual_order(std::string_view text);

}  // namespace cli
