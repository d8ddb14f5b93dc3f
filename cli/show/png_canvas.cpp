// SPDX-License-Identifier: MIT
//
// A picture as pixels, twice as many each way as the drawing has units.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <stdexcept>
#include <vector>

#include "cli/show/drawing.h"
#include "cli/show/letters.h"

#define STB_IMAGE_WRITE_STATIC
#define STB_IMAGE_WRITE_IMPLEMENTATION
#include <stb/stb_image_write.h>

namespace cli {
namespace {

constexpr double kDensity = 2;

Rgb colour_of(Tone tone) {
  switch (tone) {
    case Tone::kText:
      return {0x1f, 0x23, 0x28};
    case Tone::kDim:
      return {0x65, 0x6d, 0x76};
    case Tone::kLine:
      return {0x8c, 0x95, 0x9f};
    case Tone::kSurface:
      return {0xf6, 0xf8, 0xfa};
    case Tone::kWarning:
      return {0x9a, 0x67, 0x00};
  }
  return {};
}

class PngCanvas : public Canvas {
 public:
  PngCanvas(double width, double height)
      : width_(static_cast<int>(std::ceil(width * kDensity))),
        height_(static_cast<int>(std::ceil(height * kDensity))),
        pixels_(static_cast<size_t>(width_) * height_, {255, 255, 255}) {}

  void write(Point at, const std::string& text,
             const Lettering& style) override {
    const Ink ink = set_in_ink(text, style.size * kDensity, style.bold);
    const double share = style.anchor == Anchor::kMiddle ? 0.5
                         : style.anchor == Anchor::kEnd  ? 1.0
                                                         : 0.0;
    stamp(ink, at, share * ink.width, style.angle, colour_of(style.tone));
  }

  void write_on(Point centre, const std::string& text, Rgb colour) override {
    const Ink ink = set_in_ink(text, 11 * kDensity, false);
    stamp(ink, {centre.x, centre.y + 4}, ink.width / 2.0, 0, colour);
  }

  void draw_map(const Box& box, const HeatMap& map,
                const ColourScale& scale) override {
    for (int row = 0; row < map.rows; ++row)
      for (int column = 0; column < map.columns; ++column) {
        const Box cell{box.x + box.width * column / map.columns,
                       box.y + box.height * row / map.rows,
                       box.width / map.columns, box.height / map.rows};
        const float value = map.at(row, column);
        const bool blocked = map.is_blocked(row, column);
        if (!blocked || value != 0) fill(cell, scale(value));
        if (blocked) hatch(cell);
      }
  }

  void draw_line(Point from, Point to, Tone tone) override {
    const double dx = (to.x - from.x) * kDensity,
                 dy = (to.y - from.y) * kDensity;
    const int steps = static_cast<int>(std::ceil(std::hypot(dx, dy)));
    for (int i = 0; i <= steps; ++i) {
      const double x = from.x * kDensity + dx * i / steps,
                   y = from.y * kDensity + dy * i / steps;
      // A point between pixels belongs to both.
      const int left = static_cast<int>(std::floor(x));
      blend(left, static_cast<int>(y), colour_of(tone), left + 1 - x);
      blend(left + 1, static_cast<int>(y), colour_of(tone), x - left);
    }
  }

  void draw_frame(const Box& box) override {
    constexpr double kLine = 1;
    fill(box, colour_of(Tone::kLine));
    fill({box.x + kLine, box.y + kLine, box.width - 2 * kLine,
          box.height - 2 * kLine},
         colour_of(Tone::kSurface));
  }

  void hatch(const Box& box) override {
    each_pixel(box, [&](int x, int y) {
      if ((x + y) % 12 < 2) blend(x, y, colour_of(Tone::kLine), 1);
    });
  }

  std::string encode() const {
    std::string bytes;
    const auto append = [](void* to, void* data, int size) {
      static_cast<std::string*>(to)->append(static_cast<char*>(data), size);
    };
    if (!stbi_write_png_to_func(append, &bytes, width_, height_, 3,
                                pixels_.data(), 3 * width_))
      throw std::runtime_error("show: --png: out of memory");
    return bytes;
  }

 private:
  static_assert(sizeof(Rgb) == 3, "pixels are written as they are");

  void blend(int x, int y, Rgb colour, double share) {
    if (x < 0 || y < 0 || x >= width_ || y >= height_) return;
    Rgb& pixel = pixels_[static_cast<size_t>(y) * width_ + x];
    const auto mix = [&](uint8_t& channel, uint8_t with) {
      channel =
          static_cast<uint8_t>(std::lround(channel + share * (with - channel)));
    };
    mix(pixel.red, colour.red);
    mix(pixel.green, colour.green);
    mix(pixel.blue, colour.blue);
  }

  template <typename F>
  void each_pixel(const Box& box, F f) {
    const auto pixel = [](double at) {
      return static_cast<int>(std::lround(at * kDensity));
    };
    for (int y = pixel(box.y); y < pixel(box.y + box.height); ++y)
      for (int x = pixel(box.x); x < pixel(box.x + box.width); ++x) f(x, y);
  }

  void fill(const Box& box, Rgb colour) {
    each_pixel(box, [&](int x, int y) { blend(x, y, colour, 1); });
  }

  // The ink with its column `origin` and its baseline at `at`, turned about
  // that point.
  void stamp(const Ink& ink, Point at, double origin, double degrees,
             Rgb colour) {
    const double angle = degrees * std::numbers::pi / 180;
    const double cosine = std::cos(angle), sine = std::sin(angle);
    const double x0 = std::round(at.x * kDensity),
                 y0 = std::round(at.y * kDensity);
    const int reach = ink.width + ink.height;
    const auto from = [&](double centre) {
      return std::max(0, static_cast<int>(centre) - reach);
    };
    for (int y = from(y0); y <= std::min(height_ - 1.0, y0 + reach); ++y)
      for (int x = from(x0); x <= std::min(width_ - 1.0, x0 + reach); ++x) {
        const double dx = x - x0, dy = y - y0;
        const double share = sample(ink, origin + dx * cosine - dy * sine,
                                    ink.baseline + dx * sine + dy * cosine);
        if (share > 0) blend(x, y, colour, share);
      }
  }

  // Between four pixels of the ink.
  static double sample(const Ink& ink, double x, double y) {
    const int left = static_cast<int>(std::floor(x)),
              top = static_cast<int>(std::floor(y));
    const double right = x - left, below = y - top;
    const auto row = [&](int at) {
      return (1 - right) * ink.at(left, at) + right * ink.at(left + 1, at);
    };
    return (1 - below) * row(top) + below * row(top + 1);
  }

  int width_, height_;
  std::vector<Rgb> pixels_;
};

}  // namespace

std::string to_png(const Picture& picture) {
  const Drawing drawing(picture);
  PngCanvas canvas(drawing.width(), drawing.height());
  drawing.draw(canvas);
  return canvas.encode();
}

}  // namespace cli
