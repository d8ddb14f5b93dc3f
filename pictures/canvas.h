// SPDX-License-Identifier: MIT
//
// Pictures of vectors, for documents: no fonts or scripts from elsewhere, and
// the colours of the page by the reader's choice of light or dark.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace multihead::pictures {

struct Point {
  double x = 0, y = 0;
};

struct Box {
  double x = 0, y = 0, width = 0, height = 0;
};

enum class Anchor { kStart, kMiddle, kEnd };

struct Lettering {
  double size = 12;       ///< of the letters, in pixels
  const char* tone = "";  ///< "dim", "warning"; "w" or "b": small, on a colour
  Anchor anchor = Anchor::kStart;
  bool bold = false;
  double angle = 0;  ///< degrees upwards
};

/// Text of letters of that size, about: fonts are as wide as DejaVu or less.
double text_width(const std::string& text, double size);

class Svg {
 public:
  using Attributes = std::vector<std::pair<const char*, std::string>>;

  /// `at` is where the text stands: its start, middle or end on the baseline.
  void write(Point at, const std::string& text,
             const Lettering& lettering = {});
  /// `classes` name what the style sheet in svg.cpp has: "line", "grid".
  void line(Point from, Point to, const char* classes = "line");
  /// "surface" (with an outline), "ours", "slower", "theirs"
  void rectangle(const Box& box, const char* classes);
  /// The hatching of blocked cells.
  void hatch(std::span<const Box> boxes);
  void path(const Attributes& attributes);
  /// What is drawn until the group ends has its attributes.
  void begin_group(const Attributes& attributes);
  void end_group();

  /// The file, of a page as large as that.
  std::string page(double width, double height, const std::string& title) const;

 private:
  void element(std::string_view name, const Attributes& attributes,
               std::string_view content = "");

  std::string body_;
};

/// "12.5": at most two digits after the point.
std::string svg_number(double value);

// Pixels of an SVG are drawn by librsvg, which is looked for when a PNG is
// asked for: whoever wants none needs it neither to build nor to run.

/// Throws std::runtime_error, which begins with `option`, where this machine
/// has no librsvg, or no font.
void require_png(const std::string& option);

/// The bytes of a PNG file, twice as many pixels each way as the SVG has units.
std::string png_of(const std::string& svg);

}  // namespace multihead::pictures
