// SPDX-License-Identifier: MIT
//
// Text as ink on pixels, by a font of the system: of the usual ones the first
// that has a letter. Letters are set one by one, in the order in which they
// stand on the line (cli/bidi.h); those that no font has are boxes. Without any
// font, ASCII alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cli {

struct Ink {
  int width = 0, height = 0;
  int baseline = 0;                    ///< rows above it
  std::vector<uint8_t> coverage = {};  ///< 255 is full

  double at(int x, int y) const {
    return x < 0 || y < 0 || x >= width || y >= height
               ? 0.0
               : coverage[static_cast<size_t>(y) * width + x] / 255.0;
  }
};

/// Letters `size` pixels high.
Ink set_in_ink(const std::string& text, double size, bool bold);

}  // namespace cli
