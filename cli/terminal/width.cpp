// SPDX-License-Identifier: MIT
#include "cli/terminal/width.h"

#include <utf8proc.h>

#include <algorithm>

namespace cli {
namespace {

using multihead::take_code_point;

constexpr char32_t kJoiner = 0x200D, kAsEmoji = 0xFE0F;

// As terminals have it: marks with a place of their own take it.
int width_of(utf8proc_int32_t c) {
  return utf8proc_category(c) == UTF8PROC_CATEGORY_MC ? 1
                                                      : utf8proc_charwidth(c);
}

bool is_regional(char32_t c) { return c >= 0x1F1E6 && c <= 0x1F1FF; }

// Skin tones; by themselves they are wide.
bool modifies_emoji(char32_t c) { return c >= 0x1F3FB && c <= 0x1F3FF; }

struct Cluster {
  std::string text;
  int width = 0;
};

std::vector<Cluster> split(std::string_view text) {
  std::vector<Cluster> found;
  char32_t last = 0;
  utf8proc_int32_t state = 0;
  while (!text.empty()) {
    const char32_t c = take_code_point(text);
    const auto point = static_cast<utf8proc_int32_t>(c);
    const bool begins = found.empty() ||
                        utf8proc_grapheme_break_stateful(
                            static_cast<utf8proc_int32_t>(last), point, &state);
    if (begins) found.emplace_back();
    Cluster& cluster = found.back();
    cluster.text += to_utf8(c);
    // What is joined to an emoji changes it; a flag is two letters, and wide.
    const bool joined = !begins && (last == kJoiner || modifies_emoji(c));
    if (c == kAsEmoji || (!begins && is_regional(c)))
      cluster.width = 2;
    else if (!joined)
      cluster.width += width_of(point);
    last = c;
  }
  return found;
}

}  // namespace

std::u32string code_points(std::string_view utf8) {
  std::u32string points;
  while (!utf8.empty()) {
    const char32_t c = take_code_point(utf8);
    points += c == multihead::kNoCodePoint ? U'\uFFFD' : c;
  }
  return points;
}

std::string label(std::string_view text) {
  return text.empty() ? "\"\"" : printable(text);
}

std::vector<std::string> clusters(std::string_view text) {
  std::vector<std::string> found;
  for (Cluster& cluster : split(text)) found.push_back(std::move(cluster.text));
  return found;
}

int columns(std::string_view text) {
  int sum = 0;
  for (const Cluster& cluster : split(text)) sum += cluster.width;
  return sum;
}

std::string shortened(std::string_view text, int width) {
  if (columns(text) <= width) return std::string(text);
  std::string result;
  int sum = 0;
  for (const Cluster& cluster : split(text)) {
    if (sum + cluster.width > width - 1) break;
    result += cluster.text;
    sum += cluster.width;
  }
  return width > 0 ? result + "…" : "";
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
