// SPDX-License-Identifier: MIT
#include "cli/unicode_text.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>

namespace cli {
namespace {

constexpr char32_t kNone = 0xFFFFFFFF, kJoiner = 0x200D, kAsEmoji = 0xFE0F;

// Takes one code point off the front of `rest`; kNone for a byte that does not
// begin one.
char32_t take(std::string_view& rest) {
  utf8proc_int32_t point = 0;
  const auto length =
      utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(rest.data()),
                       static_cast<utf8proc_ssize_t>(rest.size()), &point);
  rest.remove_prefix(std::max<size_t>(length > 0 ? length : 1, 1));
  return length > 0 ? static_cast<char32_t>(point) : kNone;
}

// The marks that turn the direction of all that follows; of the joiners only
// those that letters need are left in.
bool is_directional(char32_t c) {
  return (c >= 0x202A && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069) ||
         c == 0x200E || c == 0x200F || c == 0x061C;
}

bool is_unprintable(char32_t c) {
  return c < 0x20 || (c >= 0x7F && c < 0xA0) || is_directional(c) ||
         c == 0x2028 || c == 0x2029 || c == 0xFEFF || (c & 0xFFFE) == 0xFFFE ||
         (c >= 0xFDD0 && c <= 0xFDEF);
}

std::string escape(const char* format, unsigned value) {
  char text[16];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string escape(char32_t c) {
  if (c == '\n') return "\\n";
  if (c == '\t') return "\\t";
  if (c == '\r') return "\\r";
  return c < 0x100 ? escape("\\x%02x", c) : escape("\\u%04x", c);
}

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
    const char32_t c = take(text);
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
    const char32_t c = take(utf8);
    points += c == kNone ? U'\uFFFD' : c;
  }
  return points;
}

std::string to_utf8(char32_t c) {
  const auto tail = [&](int shift) {
    return static_cast<char>(0x80 | (c >> shift & 0x3F));
  };
  if (c < 0x80) return {static_cast<char>(c)};
  if (c < 0x800) return {static_cast<char>(0xC0 | c >> 6), tail(0)};
  if (c < 0x10000) return {static_cast<char>(0xE0 | c >> 12), tail(6), tail(0)};
  return {static_cast<char>(0xF0 | c >> 18), tail(12), tail(6), tail(0)};
}

std::string printable(std::string_view text) {
  if (text.empty()) return "\"\"";
  std::string result;
  while (!text.empty()) {
    const auto first = static_cast<uint8_t>(text[0]);
    const char32_t c = take(text);
    if (c == kNone)
      result += escape("\\x%02x", first);
    else
      result += is_unprintable(c) ? escape(c) : to_utf8(c);
  }
  return result;
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
