// SPDX-License-Identifier: MIT
//
// Both maps of colours are lines in Oklab, in which distances are those that
// people see (Björn Ottosson, "A perceptual color space for image processing",
// 2020).
#include "pictures/picture.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "multihead/text/words.h"

namespace multihead::pictures {
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

// One of xterm's colours: 16 to 231 are a cube of six levels, the others greys.
Rgb xterm_colour(int number) {
  const auto grey = static_cast<uint8_t>(8 + 10 * (number - 232));
  if (number >= 232) return {grey, grey, grey};
  const auto level = [](int step) {
    return static_cast<uint8_t>(step == 0 ? 0 : 55 + 40 * step);
  };
  const int place = number - 16;
  return {level(place / 36), level(place / 6 % 6), level(place % 6)};
}

// The smallest difference that is coloured: smaller ones are rounding.
constexpr double kVisible = 1e-3;

// Of two weights that differ by less, neither is the greater.
constexpr double kRounding = 1e-5;

void widen_by_row(Extremes& extremes, const HeatMap& map, int row) {
  for (int column = 0; column < map.columns; ++column) {
    const double value = map.at(row, column);
    if (!std::isfinite(value)) continue;
    extremes.low = std::min(extremes.low, value);
    extremes.high = std::max(extremes.high, value);
  }
}

// Whether a row has one cell that the mask leaves to it, or, where no mask is
// known, one with weight.
bool has_one_cell(const HeatMap& map, int row) {
  int open = 0, weighty = 0;
  for (int column = 0; column < map.columns; ++column) {
    open += !map.is_blocked(row, column);
    weighty += map.at(row, column) != 0;
  }
  return open == 1 || weighty == 1;
}

// The values that colours are to tell apart.
struct Range {
  bool difference;
  Extremes all = {}, free = {};  // free: of rows with a choice

  void widen(const Item& item) {
    for (const Panel& panel : item.panels)
      for (int row = 0; row < panel.map.rows; ++row) {
        widen_by_row(all, panel.map, row);
        if (!has_one_cell(panel.map, row)) widen_by_row(free, panel.map, row);
      }
  }

  ColourScale scale() const {
    const bool bound = difference || all.low < 0 || free.high == 0;
    const Extremes& extremes = bound ? all : free;
    return ColourScale(extremes, difference,
                       all.high > extremes.high * (1 + kRounding));
  }
};

// Which cell of the coarser axis each cell goes to.
std::vector<int> destinations(const Coarsening& axis) {
  std::vector<int> to(axis.from.cells());
  int cell = 0;
  for (int i = 0; i < axis.from.cells(); ++i) {
    while (axis.from.edges[i] >= axis.to.edges[cell + 1]) ++cell;
    to[i] = cell;
  }
  return to;
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
  int nearest = 16;
  for (int number = 17; number < 256; ++number)
    if (distance(xterm_colour(number), colour) <
        distance(xterm_colour(nearest), colour))
      nearest = number;
  return nearest;
}

std::string hex(Rgb colour) {
  return format("#%02x%02x%02x", colour.red, colour.green, colour.blue);
}

std::string Axis::name(int64_t position) const {
  return tokens.empty() ? std::to_string(position) : tokens[position];
}

std::string Axis::label(int cell) const {
  const int64_t first = edges[cell], last = edges[cell + 1] - 1;
  if (first == last) return name(first);
  const std::string range = std::to_string(first) + "–" + std::to_string(last);
  return tokens.empty() ? range : range + " " + tokens[first];
}

Axis make_axis(int64_t length, int cells, std::vector<std::string> tokens) {
  const int64_t each = std::max<int64_t>(1, (length + cells - 1) / cells);
  Axis axis{.tokens = std::move(tokens)};
  for (int64_t end = each; axis.length() < length; end += each)
    axis.edges.push_back(std::min(end, length));
  return axis;
}

Axis coarser(const Axis& axis, int cells) {
  const int each = std::max(1, (axis.cells() + cells - 1) / cells);
  Axis result{.tokens = axis.tokens};
  for (int end = each; result.length() < axis.length(); end += each)
    result.edges.push_back(axis.edges[std::min(end, axis.cells())]);
  return result;
}

HeatMap pool(const HeatMap& map, const Coarsening& queries,
             const Coarsening& keys) {
  const int rows = queries.to.cells(), columns = keys.to.cells();
  if (rows == map.rows && columns == map.columns) return map;
  const std::vector<int> row_to = destinations(queries),
                         column_to = destinations(keys);
  std::vector<double> sums(static_cast<size_t>(rows) * columns);
  HeatMap result{rows, columns};
  result.blocked.assign(sums.size(), 1);
  for (int row = 0; row < map.rows; ++row) {
    const double share = static_cast<double>(queries.from.count(row)) /
                         static_cast<double>(queries.to.count(row_to[row]));
    for (int column = 0; column < map.columns; ++column) {
      const size_t cell =
          static_cast<size_t>(row_to[row]) * columns + column_to[column];
      sums[cell] += share * map.at(row, column);
      result.blocked[cell] &= map.is_blocked(row, column);
    }
  }
  result.values.assign(sums.begin(), sums.end());
  return result;
}

void widen(Extremes& extremes, const HeatMap& map) {
  for (int row = 0; row < map.rows; ++row) widen_by_row(extremes, map, row);
}

ColourScale::ColourScale(const Extremes& extremes, bool difference,
                         bool is_open)
    : signed_(difference || extremes.low < 0),
      open_(is_open),
      high_(std::max(extremes.high, -extremes.low)) {
  if (high_ == 0) high_ = 1;
  if (difference) high_ = std::max(high_, kVisible);
}

double ColourScale::share(double value) const {
  return std::copysign(std::sqrt(std::abs(value) / high_), value);
}

double ColourScale::value(double share) const {
  return share * std::abs(share) * high_;
}

Rgb ColourScale::operator()(double value) const {
  if (!std::isfinite(value)) return kNotFinite;
  return signed_ ? diverging(share(value)) : sequential(share(value));
}

HeatMap bar_of(const ColourScale& scale, int cells) {
  HeatMap bar{1, cells, {}, std::vector<uint8_t>(cells, 0)};
  const double from = scale.is_signed() ? -1 : 0;
  for (int i = 0; i < cells; ++i)
    bar.values.push_back(
        static_cast<float>(scale.value(from + (1 - from) * i / (cells - 1))));
  return bar;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape)
    text += (text.empty() ? "" : " × ") + std::to_string(size);
  return text;
}

std::string subtitle(const Picture& picture, const Item& last) {
  const Item& first = picture.items[0];
  const int64_t queries = first.queries.length();
  std::string text = plural(picture.num_heads, "head");
  if (picture.num_kv_heads != picture.num_heads)
    text += ", " + plural(picture.num_kv_heads, "key/value head");
  text += " · " + std::to_string(queries) +
          (queries == 1 ? " query × " : " queries × ") +
          plural(first.keys.length(), "key");
  if (picture.batch_size == 1) return text;
  const std::string name = std::to_string(first.index);
  return text +
         (first.index == last.index
              ? " · item " + name
              : " · items " + name + " to " + std::to_string(last.index)) +
         " of a batch of " + std::to_string(picture.batch_size);
}

std::string pooling(const Axis& queries, const Axis& keys) {
  if (!queries.pooled() && !keys.pooled()) return "";
  return "a cell: " + std::to_string(queries.count(0)) + " × " +
         std::to_string(keys.count(0)) +
         " positions; the sum over its keys, the mean of its queries";
}

std::string scale_name(const Picture& picture) {
  return picture.difference ? "yours − reference" : "weight";
}

bool has_blocked_cells(const Item& item) {
  return std::ranges::any_of(item.panels, [](const Panel& panel) {
    return std::ranges::find(panel.map.blocked, 1) != panel.map.blocked.end();
  });
}

ColourScale scale_of(const Picture& picture, const Item& item) {
  Range range{.difference = picture.difference};
  range.widen(item);
  return range.scale();
}

ColourScale scale_of(const Album& album) {
  Range range{.difference = album.layers[0].difference};
  for (const Picture& layer : album.layers) range.widen(layer.items[0]);
  return range.scale();
}

}  // namespace multihead::pictures
