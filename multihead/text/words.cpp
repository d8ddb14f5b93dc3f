// SPDX-License-Identifier: MIT
#include "multihead/text/words.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <utility>

#include "multihead/text/printable.h"
#include "multihead/text/width.h"

namespace multihead {

std::string format(const char* pattern, ...) {
  va_list values, again;
  va_start(values, pattern);
  va_copy(again, values);
  std::string text(std::vsnprintf(nullptr, 0, pattern, values), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  va_end(values);
  return text;
}

std::string plural(int64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string joined(const std::vector<std::string>& words,
                   const std::string& between) {
  std::string text;
  for (const std::string& word : words)
    text += (text.empty() ? "" : between) + word;
  return text;
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
  for (const auto& cluster : clusters(text)) {
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

std::string in_ascii(std::string_view text) {
  static constexpr std::pair<std::string_view, std::string_view> kSigns[] = {
      {"✓", "ok"}, {"✗", "NO"}, {"·", "*"},     {"×", "x"},  {"–", "-"},
      {"µ", "u"},  {"≥", ">="}, {"≤", "<="},    {"≠", "!="}, {"∞", "inf"},
      {"→", "->"}, {"…", "~"},  {"√", "sqrt "}, {"ᵀ", "^T"}, {"−", "-"},
      {"≈", "~"},  {"└", "`"},  {"┘", "'"},     {"─", "-"},  {"╱", "/"}};
  std::string result;
  for (const auto& [cluster, wide] : clusters(text)) {
    const auto* known = std::ranges::find(
        kSigns, cluster, [](const auto& sign) { return sign.first; });
    if (known != std::end(kSigns))
      result += known->second;
    else if (static_cast<unsigned char>(cluster[0]) < 0x80)
      result += cluster[0];
    else
      result.append(std::max(1, wide), '?');
  }
  return result;
}

bool is_right_to_left(std::string_view text) {
  while (!text.empty()) {
    const char32_t c = take_code_point(text);
    if ((c >= 0x0590 && c <= 0x08FF) || (c >= 0xFB1D && c <= 0xFDFF) ||
        (c >= 0xFE70 && c <= 0xFEFC) || (c >= 0x10800 && c <= 0x10FFF) ||
        (c >= 0x1E800 && c <= 0x1EFFF))
      return true;
  }
  return false;
}

}  // namespace multihead
