// SPDX-License-Identifier: MIT
//
// Pixels of an SVG, drawn by librsvg. The library is looked for when a picture
// is asked for: whoever wants none needs it neither to build nor to run.
#pragma once

#include <string>

namespace cli {

/// Throws std::runtime_error, which begins with `option`, where this machine
/// has no librsvg, or no font.
void require_png(const std::string& option);

/// The bytes of a PNG file, twice as many pixels each way as the SVG has units.
std::string png_of(const std::string& svg);

}  // namespace cli
