// SPDX-License-Identifier: MIT
//
// Both maps are lines in Oklab, in which distances are those that people see
// (Björn Ottosson, "A perceptual color space for image processing", 2020).
#include "cli/show/colour_map.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "cli/terminal/format.h"

namespace cli {
namespace {

using Channels = std::array<double, 3>;

struct OkLch {
  double lightness, chroma, degrees;
};

Channels linear_rgb(const OkLch& colour) {
  const double hue = colour.degrees * std::numbers::pi / 180;
  const double a = colour.chroma * std::cos(hue);
  const double b = colour.chroma * std::sin(hue);
  const double l =
      std::pow(colour.lightness + 0.3963377774 * a + 0.2158037573 * b, 3);
  const double m =
      std::pow(colour.lightness - 0.1055613458 * a - 0.0638541728 * b, 3);
  const double s =
      std::pow(colour.lightness - 0.0894841775 * a - 1.2914855480 * b, 3);
  return {4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
          -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
          -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s};
}

bool can_be_shown(const OkLch& colour) {
  const auto [low, high] = std::ranges::minmax(linear_rgb(colour));
  return low >= 0 && high <= 1;
}

// The colour, greyer where a screen has none that is so colourful.
Rgb to_rgb(OkLch colour) {
  double low = 0, high = colour.chroma;
  if (!can_be_shown(colour)) {
    for (int step = 0; step < 20; ++step) {
      colour.chroma = (low + high) / 2;
      (can_be_shown(colour) ? low : high) = colour.chroma;
    }
    colour.chroma = low;
  }
  const auto encode = [](double x) {
    x = std::clamp(x, 0.0, 1.0);
    const double y =
        x <= 0.0031308 ? 12.92 * x : 1.055 * std::pow(x, 1 / 2.4) - 0.055;
    return static_cast<uint8_t>(std::lround(255 * y));
  };
  const Channels linear = linear_rgb(colour);
  return {encode(linear[0]), encode(linear[1]), encode(linear[2])};
}

double within(double share, double low) {
  return std::isnan(share) ? low : std::clamp(share, low, 1.0);
}

int distance(Rgb a, Rgb b) {
  const int red = a.red - b.red, green = a.green - b.green,
            blue = a.blue - b.blue;
  return red * red + green * green + blue * blue;
}

}  // namespace

Rgb sequential(double share) {
  const double t = within(share, 0);
  return to_rgb({.lightness = 0.19 + 0.77 * t,
                 .chroma = 0.165,
                 .degrees = 285 + 170 * t});
}

Rgb diverging(double share) {
  const double t = within(share, -1), far = std::abs(t);
  return to_rgb({.lightness = 0.97 - 0.5 * far,
                 .chroma = 0.17 * far,
                 .degrees = t < 0 ? 255.0 : 35.0});
}

bool is_light(Rgb colour) {
  return 0.299 * colour.red + 0.587 * colour.green + 0.114 * colour.blue > 140;
}

int nearest_of_256(Rgb colour) {
  const auto level = [](int step) { return step == 0 ? 0 : 55 + 40 * step; };
  const auto nearest_step = [&](int value) {
    return value < 48 ? 0 : value < 115 ? 1 : (value - 35) / 40;
  };
  const int r = nearest_step(colour.red), g = nearest_step(colour.green),
            b = nearest_step(colour.blue);
  const auto byte = [](int value) { return static_cast<uint8_t>(value); };
  const Rgb cube{byte(level(r)), byte(level(g)), byte(level(b))};
  const int mean = (colour.red + colour.green + colour.blue) / 3;
  const int grey = std::clamp((mean - 3) / 10, 0, 23);
  const Rgb greyish{byte(8 + 10 * grey), byte(8 + 10 * grey),
                    byte(8 + 10 * grey)};
  return distance(greyish, colour) < distance(cube, colour)
             ? 232 + grey
             : 16 + 36 * r + 6 * g + b;
}

std::string hex(Rgb colour) {
  return format("#%02x%02x%02x", colour.red, colour.green, colour.blue);
}

}  // namespace cli
