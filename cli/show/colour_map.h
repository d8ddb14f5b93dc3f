// SPDX-License-Identifier: MIT
//
// Numbers as colours: two maps along which equal steps of the number look
// equally large, and the nearest colour that a terminal of 256 colours has.
#pragma once

#include <cstdint>
#include <string>

namespace cli {

struct Rgb {
  uint8_t red = 0, green = 0, blue = 0;
  bool operator==(const Rgb&) const = default;
};

/// From dark violet (0) over red to pale yellow (1); NaN and what lies outside
/// is taken for the nearer end.
Rgb sequential(double share);

/// From blue (-1) over white (0) to red (1).
Rgb diverging(double share);

/// A number that is not finite, in either map.
inline constexpr Rgb kNotFinite{0, 200, 120};

/// Whether black text is easier to read on it than white.
bool is_light(Rgb colour);

/// The nearest of xterm's colours 16 to 255.
int nearest_of_256(Rgb colour);

/// "#1f2328"
std::string hex(Rgb colour);

}  // namespace cli
