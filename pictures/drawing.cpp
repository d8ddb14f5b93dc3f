// SPDX-License-Identifier: MIT
#include "pictures/drawing.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "multihead/text/width.h"
#include "multihead/text/words.h"

namespace multihead::pictures {
namespace {

// Colours of a map are rounded to these: cells of one are one path.
constexpr int kLevels = 96;

// Which of the colours; the last is that of numbers that are not finite, -1
// that of the page: a blocked cell without weight.
int level_of(const HeatMap& map, const ColourScale& scale, int row,
             int column) {
  const double value = map.at(row, column);
  if (map.is_blocked(row, column) && value == 0) return -1;
  if (!std::isfinite(value)) return kLevels;
  const double share = std::clamp(scale.share(value), -1.0, 1.0);
  const double t = scale.is_signed() ? (share + 1) / 2 : std::max(share, 0.0);
  return static_cast<int>(std::lround(t * (kLevels - 1)));
}

Rgb colour_of(int level, const ColourScale& scale) {
  if (level == kLevels) return kNotFinite;
  const double t = static_cast<double>(level) / (kLevels - 1);
  return scale.is_signed() ? diverging(2 * t - 1) : sequential(t);
}

// Calls run(row, begin, end) for the longest stretches of cells in a row for
// which key(row, column) is one and the same.
void for_each_run(const HeatMap& map, auto key, auto run) {
  for (int row = 0; row < map.rows; ++row)
    for (int begin = 0, end; begin < map.columns; begin = end) {
      const int first = key(row, begin);
      for (end = begin + 1; end < map.columns && key(row, end) == first;) ++end;
      run(row, begin, end, first);
    }
}

}  // namespace

std::string percent(double value) {
  return format(std::abs(value) < 0.095 ? "%.2g" : "%.0f", 100 * value);
}

int most_cells(double side, double smallest) {
  return static_cast<int>(side / smallest);
}

Axis matching(const Axis& queries, const Axis& keys, int most) {
  const int64_t each = keys.count(0);
  const int64_t cells = (queries.length() + each - 1) / each;
  return coarser(queries,
                 static_cast<int>(std::clamp<int64_t>(cells, 1, most)));
}

std::string fitted(const std::string& text, int most, double width,
                   double size) {
  std::string part = shortened(text, most);
  while (most > 1 && text_width(part, size) > width)
    part = shortened(text, --most);
  return part;
}

std::string keys_text(const Panel& panel) {
  const double keys = std::exp(panel.entropy);
  return std::isnan(keys)
             ? ""
             : format(keys < 99.5 ? "%.1f keys" : "%.0f keys", keys);
}

void draw_map(Svg& canvas, const Box& box, const HeatMap& map,
              const ColourScale& scale) {
  std::array<std::string, kLevels + 1> paths;
  const double cell_width = box.width / map.columns,
               cell_height = box.height / map.rows;
  for_each_run(
      map,
      [&](int row, int column) { return level_of(map, scale, row, column); },
      [&](int row, int begin, int end, int level) {
        if (level >= 0)
          paths[level] += format("M%d %dh%d", begin, row, end - begin);
      });
  canvas.begin_group(
      {{"transform", "translate(" + svg_number(box.x) + " " +
                         svg_number(box.y + cell_height / 2) + ") " +
                         format("scale(%.6g %.6g)", cell_width, cell_height)},
       {"fill", "none"},
       {"shape-rendering", "crispEdges"}});
  for (int level = 0; level <= kLevels; ++level)
    if (!paths[level].empty())
      canvas.path(
          {{"stroke", hex(colour_of(level, scale))}, {"d", paths[level]}});
  canvas.end_group();
  std::vector<Box> blocked;
  for_each_run(
      map, [&](int row, int column) { return map.is_blocked(row, column); },
      [&](int row, int begin, int end, bool is_blocked) {
        if (is_blocked)
          blocked.push_back({box.x + begin * cell_width,
                             box.y + row * cell_height,
                             (end - begin) * cell_width, cell_height});
      });
  canvas.hatch(blocked);
}

void draw_scale(Svg& canvas, Point at, const ColourScale& scale,
                const std::string& name, bool has_blocked) {
  constexpr int kSteps = 64;
  constexpr double kWidth = 220;
  const double from = scale.is_signed() ? -1 : 0;
  draw_map(canvas, {at.x, at.y, kWidth, 10}, bar_of(scale, kSteps), scale);
  for (int i = 0; i <= 4; ++i) {
    const double share = from + (1 - from) * i / 4;
    const bool open = i == 4 && scale.is_open();
    canvas.write({at.x + kWidth * i / 4, at.y + 24},
                 (open ? "≥ " : "") + percent(scale.value(share)) + " %",
                 {.size = 10, .tone = "dim", .anchor = Anchor::kMiddle});
  }
  const double x = at.x + kWidth + 20;
  canvas.write({x, at.y + 9}, name, {.tone = "dim"});
  if (!has_blocked) return;
  const Box sample{x + 6.6 * columns(name) + 24, at.y - 3, 16, 16};
  canvas.hatch({&sample, 1});
  canvas.write({sample.x + 22, at.y + 9}, "blocked", {.tone = "dim"});
}

}  // namespace multihead::pictures
