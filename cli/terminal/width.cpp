// SPDX-License-Identifier: MIT
#include "cli/terminal/width.h"

#include <algorithm>

namespace cli {

using multihead::Cluster;

std::u32string code_points(std::string_view utf8) {
  std::u32string points;
  while (!utf8.empty()) {
    const char32_t c = multihead::take_code_point(utf8);
    points += c == multihead::kNoCodePoint ? U'\uFFFD' : c;
  }
  return points;
}

std::string label(std::string_view text) {
  return text.empty() ? "\"\"" : printable(text);
}

std::string shortened(std::string_view text, int width) {
  if (columns(text) <= width) return std::string(text);
  return width > 0 ? beginning(text, width - 1) + "…" : "";
}

std::string beginning(std::string_view text, int width) {
  std::string result;
  for (const Cluster& cluster : multihead::clusters(text)) {
    width -= cluster.columns;
    if (width < 0) break;
    result += cluster.text;
  }
  return result;
}

std::string padded(std::string_view text, int width, bool right) {
  const std::string kept = shortened(text, width);
  const std::string blank(std::max(0, width - columns(kept)), ' ');
  return right ? blank + kept : kept + blank;
}

bool is_right_to_left(std::string_view text) {
  return std::ranges::any_of(code_points(text), [](char32_t c) {
    return (c >= 0x0590 && c <= 0x08FF) || (c >= 0xFB1D && c <= 0xFDFF) ||
           (c >= 0xFE70 && c <= 0xFEFC) || (c >= 0x10800 && c <= 0x10FFF) ||
           (c >= 0x1E800 && c <= 0x1EFFF);
  });
}

}  // namespace cli
