// SPDX-License-Identifier: MIT
//
// A matrix as a picture: cells, what positions they stand for, how many cells
// become fewer, and which colour a cell has. No torch.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli/show/colour_map.h"

namespace cli {

/// The positions of a sequence, cut into cells: cell i stands for positions
/// edges[i] to edges[i + 1] - 1.
struct Axis {
  std::vector<int64_t> edges = {0};
  std::vector<std::string> tokens =
      {};  ///< printable, one per position; or none

  int cells() const { return static_cast<int>(edges.size()) - 1; }
  int64_t length() const { return edges.back(); }
  int64_t count(int cell) const { return edges[cell + 1] - edges[cell]; }
  bool pooled() const { return cells() < length(); }
  /// "mat", "7", and for a cell of several positions "4–7 the".
  std::string label(int cell) const;
  /// A position as links name it: "mat", "7".
  std::string name(int64_t position) const;
};

/// `length` positions in at most `cells` cells of about the same size.
Axis make_axis(int64_t length, int cells, std::vector<std::string> tokens = {});

/// The same positions in at most `cells` cells, each of whole cells of `axis`.
Axis coarser(const Axis& axis, int cells);

/// Cells by rows. A value is the share of attention that the queries of its row
/// give, on average, to the keys of its column: of single positions a weight,
/// and in any case rows of weights sum to 1.
struct HeatMap {
  int rows = 0, columns = 0;
  std::vector<float> values = {};
  std::vector<uint8_t> blocked = {};  ///< 1: no query may see any key of it

  float at(int row, int column) const {
    return values[static_cast<size_t>(row) * columns + column];
  }
  bool is_blocked(int row, int column) const {
    return blocked[static_cast<size_t>(row) * columns + column] != 0;
  }
};

/// Two axes of the same positions, the second's cells made of the first's.
struct Coarsening {
  const Axis &from, &to;
};

/// Sums over keys, the mean over queries: exact, whatever the steps.
HeatMap pool(const HeatMap& map, const Coarsening& queries,
             const Coarsening& keys);

/// The largest of the finite values, 0 of none; of their absolute values.
struct Extremes {
  double low = 0, high = 0;
};
void widen(Extremes& extremes, const HeatMap& map);

/// From values to colours, the same for all maps of one picture. Colours go by
/// the root of a value: most weights are small, and differ there.
class ColourScale {
 public:
  /// Signed values, and every difference, are coloured away from 0 both ways;
  /// differences as small as rounding hardly at all.
  explicit ColourScale(const Extremes& extremes, bool difference = false);

  Rgb operator()(double value) const;
  /// How far along the map, 0 to 1, or -1 to 1 for signed values.
  double share(double value) const;
  /// The value that lies there.
  double value(double share) const;
  bool is_signed() const { return signed_; }
  double high() const { return high_; }

 private:
  bool signed_;
  double high_;
};

}  // namespace cli
