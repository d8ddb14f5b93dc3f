// SPDX-License-Identifier: MIT
//
// What a picture is drawn on, vectors or pixels.
#pragma once

#include <string>

#include "cli/show/heat_map.h"

namespace cli {

struct Point {
  double x = 0, y = 0;
};

struct Box {
  double x = 0, y = 0, width = 0, height = 0;
};

/// Colours of the page, light or dark.
enum class Tone { kText, kDim, kLine, kSurface, kWarning };

enum class Anchor { kStart, kMiddle, kEnd };

struct Lettering {
  double size = 12;  ///< of the letters, in pixels
  Tone tone = Tone::kText;
  Anchor anchor = Anchor::kStart;
  bool bold = false;
  double angle = 0;  ///< degrees upwards
};

class Canvas {
 public:
  virtual ~Canvas() = default;
  /// `at` is where the text stands: its start, middle or end on the baseline.
  virtual void write(Point at, const std::string& text,
                     const Lettering& lettering) = 0;
  /// Letters of any colour, centred: values on the colours of a map.
  virtual void write_on(Point centre, const std::string& text, Rgb colour) = 0;
  virtual void draw_map(const Box& box, const HeatMap& map,
                        const ColourScale& scale) = 0;
  virtual void draw_line(Point from, Point to, Tone tone) = 0;
  virtual void draw_frame(const Box& box) = 0;  ///< filled, with an outline
  virtual void hatch(const Box& box) = 0;       ///< as blocked cells are
};

}  // namespace cli
