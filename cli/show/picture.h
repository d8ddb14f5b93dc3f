// SPDX-License-Identifier: MIT
//
// What `multihead show` has to say, as data: measured once, then drawn in
// characters, as SVG (and PNG from it) or HTML. No torch.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cli/show/heat_map.h"

namespace cli {

struct Link {
  int64_t query = 0, key = 0;
  double weight = 0;
};

/// One head, or the mean of all.
struct Panel {
  std::string name;  ///< "head 3", "mean of 12 heads"
  HeatMap map = {};
  /// -Σ w·ln w of rows divided by their sum, the mean over the queries that
  /// see a key and have no weight that is negative or not finite; NaN: none.
  double entropy = std::numeric_limits<double>::quiet_NaN();
  std::vector<Link> links = {};  ///< the strongest, the first most so
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
  bool difference = false;  ///< values are yours − reference
  int64_t num_heads = 1, num_kv_heads = 1, batch_size = 1;
  std::vector<Stage> stages = {};
  std::vector<Item> items = {};  ///< the chosen one first
};

/// "12 heads · 13 queries × 13 keys"
std::string sizes(const Picture& picture);

/// The same with the items of the batch, from the first to `last`.
std::string subtitle(const Picture& picture, const Item& last);
/// What a cell stands for, where that is more than a query and a key; else "".
std::string pooling(const Axis& queries, const Axis& keys);

/// "weight", "yours − reference"
std::string scale_name(const Picture& picture);

/// "entropy 1.2, as of 3.3 keys"
std::string describe_entropy(double entropy);

/// "2 × 8 × 13 × 32"
std::string shape_text(const std::vector<int64_t>& shape);

bool has_blocked_cells(const Item& item);

/// The colours of all panels of an item.
ColourScale scale_of(const Picture& picture, const Item& item);

/// For the terminal, in lines of at most `width` columns.
enum class Colours { kNone, k256, kTrue };
struct Screen {
  int width = 80;
  Colours colours = Colours::kNone;
  bool utf8 = true;
};
std::string to_text(const Picture& picture, const Screen& screen);

std::string to_svg(const Picture& picture);
std::string to_html(const Picture& picture);

}  // namespace cli
