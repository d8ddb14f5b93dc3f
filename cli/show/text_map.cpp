// SPDX-License-Identifier: MIT
#include "cli/show/text_map.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cli/terminal/format.h"
#include "cli/terminal/width.h"

namespace cli {
namespace {

constexpr const char* kPlain = "\033[0m";
constexpr const char* kHatched = "\033[90m";

std::string colour_code(Rgb c, bool background, const Screen& screen) {
  const int base = background ? 48 : 38;
  return screen.colours == Colours::kTrue
             ? format("\033[%d;2;%d;%d;%dm", base, c.red, c.green, c.blue)
             : format("\033[%d;5;%dm", base, nearest_of_256(c));
}

std::string repeated(std::string_view text, int times) {
  std::string result;
  for (int i = 0; i < times; ++i) result += text;
  return result;
}

std::string percent(double value) {
  if (!std::isfinite(value)) return "??";
  const double rounded = std::round(100 * value);
  if (std::abs(rounded) > 999) return "big";
  return rounded == 0 ? "" : std::to_string(static_cast<int>(rounded));
}

std::string centred(const std::string& text, int width) {
  const int spaces = std::max<int>(0, width - static_cast<int>(text.size()));
  const int left = (spaces + 1) / 2;
  return std::string(left, ' ') + text + std::string(spaces - left, ' ');
}

// As much ink as there is weight.
std::string shade(double share, bool is_signed, const Screen& screen) {
  if (!std::isfinite(share)) return "?";
  if (is_signed)
    return std::abs(share) < 0.05 ? " "
           : share < -0.5         ? "="
           : share < 0            ? "-"
           : share < 0.5          ? "+"
                                  : "#";
  static constexpr std::string_view kAscii = " .:-=+*#%@";
  static constexpr const char* kBlocks[] = {" ", "·", "░", "▒", "▓", "█"};
  const double t = std::clamp(share, 0.0, 1.0);
  return screen.utf8 ? kBlocks[std::lround(5 * t)]
                     : std::string(1, kAscii[std::lround(9 * t)]);
}

class Writer {
 public:
  Writer(const HeatMap& map, const ColourScale& scale, const CellStyle& style,
         const Screen& screen)
      : map_(map), scale_(scale), style_(style), screen_(screen) {}

  std::string line(int row) const {
    std::string text;
    for (int column = 0; column < map_.columns; ++column)
      text += style_.halves                       ? halves(row, column)
              : screen_.colours == Colours::kNone ? in_ink(row, column)
                                                  : in_colour(row, column);
    return screen_.colours == Colours::kNone ? text : text + kPlain;
  }

 private:
  bool is_hidden(int row, int column) const {
    return row >= map_.rows ||
           (map_.is_blocked(row, column) && map_.at(row, column) == 0);
  }

  // A weight where none should be is told by a sign of its own.
  std::string content(int row, int column) const {
    const double value = map_.at(row, column);
    if (style_.numbers) return centred(percent(value), style_.columns);
    if (map_.is_blocked(row, column)) return repeated("!", style_.columns);
    return std::isfinite(value) ? "" : repeated("?", style_.columns);
  }

  std::string in_colour(int row, int column) const {
    if (is_hidden(row, column))
      return std::string(kPlain) + kHatched +
             repeated(blocked_sign(screen_), style_.columns);
    const Rgb colour = scale_(map_.at(row, column));
    const Rgb text = is_light(colour) ? Rgb{0, 0, 0} : Rgb{255, 255, 255};
    return colour_code(colour, true, screen_) +
           colour_code(text, false, screen_) +
           padded(content(row, column), style_.columns);
  }

  std::string in_ink(int row, int column) const {
    if (is_hidden(row, column))
      return repeated(blocked_sign(screen_), style_.columns);
    const std::string text = content(row, column);
    if (!text.empty()) return text;
    return repeated(
        shade(scale_.share(map_.at(row, column)), scale_.is_signed(), screen_),
        style_.columns);
  }

  std::string halves(int row, int column) const {
    const bool upper = !is_hidden(row, column),
               lower = !is_hidden(row + 1, column);
    const auto code = [&](int r, bool background) {
      return colour_code(scale_(map_.at(r, column)), background, screen_);
    };
    if (upper && lower) return code(row, false) + code(row + 1, true) + "▀";
    if (upper) return kPlain + code(row, false) + "▀";
    if (lower) return kPlain + code(row + 1, false) + "▄";
    return row + 1 >= map_.rows && !map_.is_blocked(row, column)
               ? std::string(kPlain) + " "
               : std::string(kPlain) + kHatched + blocked_sign(screen_);
  }

  const HeatMap& map_;
  const ColourScale& scale_;
  const CellStyle& style_;
  const Screen& screen_;
};

// The text for a terminal without UTF-8: known signs become ASCII ones, other
// letters become question marks.
std::string in_ascii(std::string_view text) {
  static constexpr std::pair<std::string_view, std::string_view> kSigns[] = {
      {"·", "|"},     {"×", "x"},  {"–", "-"}, {"→", "->"}, {"…", "~"},
      {"√", "sqrt "}, {"ᵀ", "^T"}, {"−", "-"}, {"≈", "~"},  {"└", "`"},
      {"┘", "'"},     {"─", "-"},  {"╱", "/"}};
  std::string result;
  for (const auto& [cluster, wide] : clusters(text)) {
    const auto* known = std::ranges::find(
        kSigns, cluster, &std::pair<std::string_view, std::string_view>::first);
    if (known != std::end(kSigns))
      result += known->second;
    else if (static_cast<unsigned char>(cluster[0]) < 0x80)
      result += cluster[0];
    else
      result += repeated("?", std::max(1, wide));
  }
  return result;
}

}  // namespace

std::vector<std::string> map_lines(const HeatMap& map, const ColourScale& scale,
                                   const CellStyle& style,
                                   const Screen& screen) {
  const Writer writer(map, scale, style, screen);
  std::vector<std::string> lines;
  for (int row = 0; row < map.rows; row += style.halves ? 2 : 1)
    lines.push_back(writer.line(row));
  return lines;
}

std::string colour_bar(const ColourScale& scale, int width,
                       const Screen& screen) {
  HeatMap bar{1, width, {}, std::vector<uint8_t>(width, 0)};
  for (int i = 0; i < width; ++i) {
    const double t = width > 1 ? static_cast<double>(i) / (width - 1) : 1;
    bar.values.push_back(
        static_cast<float>(scale.value(scale.is_signed() ? 2 * t - 1 : t)));
  }
  return map_lines(bar, scale, {.columns = 1}, screen)[0];
}

std::string blocked_sign(const Screen& screen) {
  return screen.utf8 ? "╱" : "/";
}

std::string styled(const std::string& text, Style style, const Screen& screen) {
  return styled(text, style,
                Terminal{.colour = screen.colours != Colours::kNone});
}

std::string exactly(std::string_view text, int width, const Screen& screen,
                    bool right) {
  if (screen.utf8) return padded(text, width, right);
  return in_ascii(padded(in_ascii(text), width, right));
}

std::string at_most(std::string_view text, int width, const Screen& screen) {
  if (screen.utf8) return shortened(text, width);
  return in_ascii(shortened(in_ascii(text), width));
}

}  // namespace cli
