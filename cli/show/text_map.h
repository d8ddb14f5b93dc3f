// SPDX-License-Identifier: MIT
//
// A heat map in characters: coloured cells, or shades of ink.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/show/heat_map.h"
#include "cli/show/picture.h"
#include "cli/terminal/table.h"

namespace cli {

/// How a cell is made of characters.
struct CellStyle {
  int columns = 2;
  bool halves = false;   ///< two rows of cells on a line; needs colours, UTF-8
  bool numbers = false;  ///< the value in percent; needs four columns
};

/// The lines of a map, each map.columns·style.columns wide.
std::vector<std::string> map_lines(const HeatMap& map, const ColourScale& scale,
                                   const CellStyle& style,
                                   const Screen& screen);

/// All colours, from the least value's to the greatest's.
std::string colour_bar(const ColourScale& scale, int width,
                       const Screen& screen);

/// What a blocked cell looks like: "╱".
std::string blocked_sign(const Screen& screen);

std::string styled(const std::string& text, Style style, const Screen& screen);

/// Text in the characters that the screen has, exactly or at most `width`
/// columns of it.
std::string exactly(std::string_view text, int width, const Screen& screen,
                    bool right = false);
std::string at_most(std::string_view text, int width, const Screen& screen);

}  // namespace cli
