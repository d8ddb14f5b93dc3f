// SPDX-License-Identifier: MIT
//
// What the pictures of one layer and of all share: maps as paths, words that
// fit.
#pragma once

#include <string>

#include "pictures/canvas.h"
#include "pictures/picture.h"

namespace multihead::pictures {

/// Two digits.
std::string percent(double value);

/// "4.2 keys", "" where the entropy is not known.
std::string keys_text(const Panel& panel);

/// As much of a text as takes at most so many columns and pixels.
std::string fitted(const std::string& text, int most, double width,
                   double size = 12);

/// How many cells of at least `smallest` pixels a side has room for.
int most_cells(double side, double smallest);

/// Cells of queries that are as large as those of the keys.
Axis matching(const Axis& queries, const Axis& keys, int most);

/// Runs of one colour are strokes as thick as a row of cells.
void draw_map(Svg& canvas, const Box& box, const HeatMap& map,
              const ColourScale& scale);

/// A bar of the colours with the values that they stand for, and what hatching
/// means where there is any.
void draw_scale(Svg& canvas, Point at, const ColourScale& scale,
                const std::string& name, bool has_blocked);

/// All heads of several layers, a row for each layer.
std::string model_svg(const Album& album);

}  // namespace multihead::pictures
