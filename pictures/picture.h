// SPDX-License-Identifier: MIT
//
// What there is to say of attention, as data: measured once, then drawn as SVG
// (and PNG from it), as HTML, or by the command in characters. No torch.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace multihead::pictures {

// --- Numbers as colours: equal steps of the number look equally large --------

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

// --- A matrix as cells -------------------------------------------------------

/// The positions of a sequence, cut into cells: cell i stands for positions
/// edges[i] to edges[i + 1] - 1.
struct Axis {
  std::vector<int64_t> edges = {0};
  std::vector<std::string> tokens = {};  ///< printable; none: numbers

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
  explicit ColourScale(const Extremes& extremes, bool difference = false,
                       bool is_open = false);

  Rgb operator()(double value) const;
  /// How far along the map, 0 to 1, or -1 to 1 for signed values.
  double share(double value) const;
  /// The value that lies there.
  double value(double share) const;
  bool is_signed() const { return signed_; }
  double high() const { return high_; }
  /// Whether there are values above the greatest, which have its colour.
  bool is_open() const { return open_; }

 private:
  bool signed_, open_;
  double high_;
};

/// The colours of a scale from the least value's to the greatest's, in a row.
HeatMap bar_of(const ColourScale& scale, int cells);

// --- A picture ---------------------------------------------------------------

struct Link {
  int64_t query = 0, key = 0;
  double weight = 0;
};

/// What a head's queries and keys are made of: their products, feature by
/// feature, sum to the scores before masks and softcap.
struct Features {
  int width = 0;                    ///< 0: not known, or too many to show
  std::vector<float> queries = {};  ///< rows × width, times the scale
  std::vector<float> keys = {};     ///< columns × width
};

/// One head, or the mean of all.
struct Panel {
  std::string name;  ///< "head 3", "mean of 12 heads"
  HeatMap map = {};
  /// -Σ w·ln w of rows divided by their sum, the mean over the queries that
  /// see a key and have no weight that is negative or not finite; NaN: none.
  double entropy = std::numeric_limits<double>::quiet_NaN();
  std::vector<Link> links = {};  ///< the strongest, the first most so
  Features features = {};
};

/// One item of the batch.
struct Item {
  int64_t index = 0;
  Axis queries = {}, keys = {};
  std::vector<Panel> panels = {};  ///< the mean first, if there are more heads
  std::vector<std::string> remarks = {};  ///< what one should know
};

/// A step of attention, with the shape of what it yields.
struct Stage {
  std::string name, what;
  std::vector<int64_t> shape;
};

struct Picture {
  std::string title;
  /// Of a layer among others: "layer 3", and with which others it belongs:
  /// "encoder".
  std::string name = {}, group = {};
  bool difference = false;  ///< values are yours − reference
  int64_t num_heads = 1, num_kv_heads = 1, batch_size = 1;
  std::vector<Stage> stages = {};
  std::vector<Item> items = {};  ///< the chosen one first
};

/// The layers of a model, in their order; or one call alone.
struct Album {
  std::string title;
  std::vector<Picture> layers = {};
  std::vector<Picture> paths = {};  ///< through the layers of a group: paths.h
};

/// "12 heads · 13 queries × 13 keys", and the items of a batch, from the first
/// to `last`.
std::string subtitle(const Picture& picture, const Item& last);

/// What a cell stands for, where that is more than a query and a key; else "".
std::string pooling(const Axis& queries, const Axis& keys);

/// "weight", "yours − reference"
std::string scale_name(const Picture& picture);

/// "2 × 8 × 13 × 32"
std::string shape_text(const std::vector<int64_t>& shape);

bool has_blocked_cells(const Item& item);

/// The colours of all panels of an item. A query that sees one key gives it all
/// it has, whatever the heads have learned: the first of a causal head, say.
/// Such rows do not stretch the colours, or every causal picture would go up
/// to 1.
ColourScale scale_of(const Picture& picture, const Item& item);

/// The colours of the first items of all layers.
ColourScale scale_of(const Album& album);

/// One layer in full; of several, all heads of all of them.
std::string to_svg(const Album& album);
std::string to_html(const Album& album);

}  // namespace multihead::pictures
