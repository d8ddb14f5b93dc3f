// SPDX-License-Identifier: MIT
#include "cli/show/picture.h"

#include <algorithm>
#include <cmath>

#include "cli/terminal/format.h"

namespace cli {

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape)
    text += (text.empty() ? "" : " × ") + std::to_string(size);
  return text;
}

std::string sizes(const Picture& picture) {
  const Item& item = picture.items[0];
  const auto count = [](int64_t n, const std::string& noun) {
    return std::to_string(n) + " " + noun + (n == 1 ? "" : "s");
  };
  std::string text = count(picture.num_heads, "head");
  if (picture.num_kv_heads != picture.num_heads)
    text += ", " + count(picture.num_kv_heads, "key/value head");
  text += " · " +
          (item.queries.length() == 1
               ? std::string("1 query")
               : std::to_string(item.queries.length()) + " queries") +
          " × " + count(item.keys.length(), "key");
  return text;
}

std::string subtitle(const Picture& picture, const Item& last) {
  const Item& first = picture.items[0];
  const std::string text = sizes(picture);
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

std::string describe_entropy(double entropy) {
  if (std::isnan(entropy)) return "";
  return format("entropy %.2f, as of %.1f keys", entropy, std::exp(entropy));
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
  Extremes extremes;
  for (const Panel& panel : item.panels) widen(extremes, panel.map);
  return ColourScale(extremes, picture.difference);
}

}  // namespace cli
