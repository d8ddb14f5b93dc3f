// SPDX-License-Identifier: MIT
#include "cli/show/heat_map.h"

#include <algorithm>
#include <cmath>

namespace cli {
namespace {

// The smallest difference that is coloured: smaller ones are rounding.
constexpr double kVisible = 1e-3;

}  // namespace

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

namespace {

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
  for (const float value : map.values) {
    if (!std::isfinite(value)) continue;
    extremes.low = std::min<double>(extremes.low, value);
    extremes.high = std::max<double>(extremes.high, value);
  }
}

ColourScale::ColourScale(const Extremes& extremes, bool difference)
    : signed_(difference || extremes.low < 0),
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

}  // namespace cli
