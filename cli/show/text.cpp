// SPDX-License-Identifier: MIT
//
// A picture in lines of a terminal, none longer than the screen.
#include "cli/show/text.h"

#include <algorithm>
#include <cmath>

#include "cli/terminal/text.h"

namespace cli {
namespace {

constexpr int kMapGap = 2;        // between the maps of heads
constexpr int kMostLines = 64;    // of one map
constexpr int kTallestLabel = 9;  // of keys, downwards

// "the cat", where a line of half blocks shows two queries.
std::string line_label(const Axis& lines, int line) {
  if (lines.count(line) != 2) return lines.label(line);
  const int64_t first = lines.edges[line];
  if (lines.tokens.empty()) return lines.name(first);
  return lines.name(first) + " " + lines.name(first + 1);
}

// How a cell is made of characters.
struct CellStyle {
  int columns = 2;
  bool halves = false;   // two rows of cells on a line; needs colours, UTF-8
  bool numbers = false;  // the value in percent; needs four columns
};

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

std::string cell_percent(double value) {
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

bool has_colours(const Screen& screen) {
  return screen.colours != Colours::kNone;
}

// What a blocked cell looks like.
std::string blocked_sign(const Screen& screen) {
  return screen.utf8 ? "╱" : "/";
}

struct Writer {
  const HeatMap& map;
  const ColourScale& scale;
  const CellStyle& style;
  const Screen& screen;

  std::string line(int row) const {
    std::string text;
    for (int column = 0; column < map.columns; ++column)
      text += style.halves          ? halves(row, column)
              : has_colours(screen) ? in_colour(row, column)
                                    : in_ink(row, column);
    return has_colours(screen) ? text + kPlain : text;
  }

  bool is_hidden(int row, int column) const {
    return row >= map.rows ||
           (map.is_blocked(row, column) && map.at(row, column) == 0);
  }

  // A weight where none should be is told by a sign of its own.
  std::string content(int row, int column) const {
    const double value = map.at(row, column);
    if (style.numbers) return centred(cell_percent(value), style.columns);
    if (map.is_blocked(row, column)) return repeated("!", style.columns);
    return std::isfinite(value) ? "" : repeated("?", style.columns);
  }

  std::string in_colour(int row, int column) const {
    if (is_hidden(row, column))
      return std::string(kPlain) + kHatched +
             repeated(blocked_sign(screen), style.columns);
    const Rgb colour = scale(map.at(row, column));
    const Rgb text = is_light(colour) ? Rgb{0, 0, 0} : Rgb{255, 255, 255};
    return colour_code(colour, true, screen) +
           colour_code(text, false, screen) +
           padded(content(row, column), style.columns);
  }

  std::string in_ink(int row, int column) const {
    if (is_hidden(row, column))
      return repeated(blocked_sign(screen), style.columns);
    const std::string text = content(row, column);
    if (!text.empty()) return text;
    return repeated(
        shade(scale.share(map.at(row, column)), scale.is_signed(), screen),
        style.columns);
  }

  std::string halves(int row, int column) const {
    const bool upper = !is_hidden(row, column),
               lower = !is_hidden(row + 1, column);
    const auto code = [&](int r, bool background) {
      return colour_code(scale(map.at(r, column)), background, screen);
    };
    if (upper && lower) return code(row, false) + code(row + 1, true) + "▀";
    if (upper) return kPlain + code(row, false) + "▀";
    if (lower) return kPlain + code(row + 1, false) + "▄";
    return row + 1 >= map.rows && !map.is_blocked(row, column)
               ? std::string(kPlain) + " "
               : std::string(kPlain) + kHatched + blocked_sign(screen);
  }
};

// Each map.columns·style.columns wide.
std::vector<std::string> map_lines(const HeatMap& map, const ColourScale& scale,
                                   const CellStyle& style,
                                   const Screen& screen) {
  const Writer writer{map, scale, style, screen};
  std::vector<std::string> lines;
  for (int row = 0; row < map.rows; row += style.halves ? 2 : 1)
    lines.push_back(writer.line(row));
  return lines;
}

class Page {
 public:
  Page(const Picture& picture, const Screen& screen)
      : picture_(picture),
        item_(picture.items[0]),
        scale_(scale_of(picture, item_)),
        screen_(screen) {}

  std::string write() {
    add(picture_.title, Style::kBold);
    add(subtitle(picture_, item_), Style::kDim);
    film();
    grouping();
    large(item_.panels[0]);
    legend();
    if (item_.panels.size() > 1) heads();
    table();
    if (!item_.remarks.empty()) add("");
    for (const std::string& remark : item_.remarks)
      add("! " + remark, Style::kWarning);
    return std::move(text_);
  }

 private:
  // A line as it is: what takes its columns knows how many there are.
  void put(const std::string& line) {
    const size_t end = line.find_last_not_of(' ');
    text_ += (end == std::string::npos ? "" : line.substr(0, end + 1)) + "\n";
  }
  void add(std::string_view line) { put(fit(line)); }
  void add(std::string_view line, Style how) {
    put(styled(fit(line), how, has_colours(screen_)));
  }
  // Text in the characters that the screen has, at most or exactly `width`
  // columns of it.
  std::string at_most(std::string_view text, int width) const {
    if (screen_.utf8) return shortened(text, width);
    return in_ascii(shortened(in_ascii(text), width));
  }
  std::string exactly(std::string_view text, int width,
                      bool right = false) const {
    if (screen_.utf8) return padded(text, width, right);
    return in_ascii(padded(in_ascii(text), width, right));
  }
  std::string fit(std::string_view line) const {
    return at_most(line, screen_.width);
  }

  void film() {
    if (picture_.stages.empty()) return;
    add("");
    int name = 0, what = 0;
    for (const Stage& stage : picture_.stages) {
      name = std::max(name, columns(stage.name));
      what = std::max(what, columns(stage.what));
    }
    for (const Stage& stage : picture_.stages) {
      const std::string shape = shape_text(stage.shape);
      std::string line = padded(stage.name, name + 2);
      if (name + what + 4 + columns(shape) <= screen_.width)
        line += padded(stage.what, what + 2);
      add(line + shape);
    }
  }

  // Which query heads share a key/value head.
  void grouping() {
    const int64_t groups = picture_.num_kv_heads;
    if (groups == picture_.num_heads) return;
    const int64_t each = picture_.num_heads / groups;
    const int digits =
        static_cast<int>(std::to_string(picture_.num_heads - 1).size());
    const int width = static_cast<int>(each) * (digits + 1) - 1;
    const std::string above = "query heads      ", below = "key/value heads  ";
    add("");
    const int label = static_cast<int>(above.size());
    const int64_t fitting = std::min<int64_t>(
        groups, std::max(1, (screen_.width - label + 2) / (width + 2)));
    for (int64_t first = 0; first < groups; first += fitting) {
      std::string upper = above, lower = below;
      for (int64_t g = first; g < std::min(first + fitting, groups); ++g) {
        for (int64_t h = g * each; h < (g + 1) * each; ++h)
          upper += padded(std::to_string(h), digits, true) + " ";
        upper += " ";
        lower += bracket(std::to_string(g), width) + "  ";
      }
      add(upper);
      add(lower);
    }
  }

  // "└── 1 ──┘"
  static std::string bracket(const std::string& name, int width) {
    const int inner = width - 2 - static_cast<int>(name.size());
    if (inner < 0) return padded(name, width, true);
    std::string line = "└";
    for (int i = 0; i < inner; ++i) line += i == inner / 2 ? name + "─" : "─";
    return inner == 0 ? "└" + name + "┘" : line + "┘";
  }

  bool can_halve() const { return screen_.utf8 && has_colours(screen_); }

  // The widest cells that fit beside labels of the queries.
  CellStyle style_for(int space) const {
    const int cells = item_.keys.cells(), rows = item_.queries.cells();
    if (4 * cells <= space && rows <= kMostLines / 2)
      return {.columns = 4, .numbers = true};
    if (2 * cells <= space && rows <= kMostLines) return {.columns = 2};
    return {.columns = 1, .halves = can_halve()};
  }

  void large(const Panel& panel) {
    add("");
    add(panel.name + (std::isnan(panel.entropy)
                          ? ""
                          : format(" · entropy %.2f, as of %.1f keys",
                                   panel.entropy, std::exp(panel.entropy))),
        Style::kBold);
    int label = 0;
    for (int i = 0; i < item_.queries.cells(); ++i)
      label = std::max(label, columns(item_.queries.label(i)));
    label = std::clamp(label, 1, std::max(4, screen_.width / 5));
    const int space = screen_.width - label - 1;
    const CellStyle style = style_for(space);
    const Axis keys = coarser(item_.keys, space / style.columns);
    const Axis queries = coarser(item_.queries, rows_for(keys, style));
    const Axis lines =
        style.halves ? coarser(queries, (queries.cells() + 1) / 2) : queries;
    for (const std::string& line : key_labels(keys, style.columns))
      put(std::string(label + 1, ' ') + line);
    const std::vector<std::string> cells =
        map_lines(pool(panel.map, {item_.queries, queries}, {item_.keys, keys}),
                  scale_, style, screen_);
    for (int i = 0; i < lines.cells(); ++i)
      put(beside(line_label(lines, i), label) + cells[i]);
    const std::string pooled = pooling(queries, keys);
    if (!pooled.empty()) add(pooled, Style::kDim);
  }

  // As many cells downwards as make them about square.
  int rows_for(const Axis& keys, const CellStyle& style) const {
    const int64_t each = keys.count(0);
    const int64_t rows = (item_.queries.length() + each - 1) / each;
    const int most = kMostLines * (style.halves ? 2 : 1);
    const bool narrow = style.columns == 1 && !style.halves;
    return static_cast<int>(
        std::clamp<int64_t>(narrow ? rows / 2 : rows, 1, most));
  }

  // The label, and then the cursor where the cells begin: terminals differ in
  // how wide they draw some scripts and emoji.
  std::string beside(const std::string& label, int width) const {
    std::string text = on_its_side(exactly(label, width, true)) + " ";
    const bool ascii = std::ranges::all_of(
        text, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
    if (has_colours(screen_) && !ascii) text += format("\033[%dG", width + 2);
    return text;
  }

  // Tokens downwards, above their columns; positions where there are none.
  std::vector<std::string> key_labels(const Axis& keys, int cell) const {
    if (keys.pooled() || keys.tokens.empty()) return {ticks(keys, cell)};
    std::vector<std::vector<std::string>> letters;
    size_t tallest = 0;
    for (const std::string& token : keys.tokens) {
      letters.emplace_back();
      for (auto& cluster : clusters(at_most(token, kTallestLabel)))
        letters.back().push_back(std::move(cluster.text));
      tallest = std::max(tallest, letters.back().size());
    }
    std::vector<std::string> lines;
    const int left = (cell - 1) / 2;
    for (size_t line = 0; line < tallest; ++line) {
      std::string text;
      for (const std::vector<std::string>& token : letters) {
        const size_t above = tallest - token.size();
        std::string letter = line < above ? " " : token[line - above];
        if (letter == "…" && screen_.utf8) letter = "⋮";
        if (left + columns(letter) > cell) letter = "*";
        text +=
            std::string(left, ' ') + on_its_side(padded(letter, cell - left));
      }
      lines.push_back(text);
    }
    return lines;
  }

  static std::string ticks(const Axis& keys, int cell) {
    std::string text;
    for (int i = 0; i < keys.cells(); ++i) {
      const int column = i * cell;
      const std::string number = std::to_string(keys.edges[i]);
      if (static_cast<int>(text.size()) > column - (i > 0)) continue;
      if (column + static_cast<int>(number.size()) > keys.cells() * cell) break;
      text.append(column - text.size(), ' ');
      text += number;
    }
    return text;
  }

  // What colours mean: the values at both ends and in the middle of the bar.
  void legend() {
    const int width = std::clamp(screen_.width / 4, 8, 32);
    add("");
    std::string bar =
        map_lines(bar_of(scale_, width), scale_, {.columns = 1}, screen_)[0];
    int used = width;
    const auto append = [&](const std::string& plain, const std::string& text) {
      if (used + columns(plain) > screen_.width) return;
      bar += text;
      used += columns(plain);
    };
    const std::string name = "  " + at_most(scale_name(picture_), 40);
    append(name, name);
    if (has_blocked_cells(item_))
      append("   / blocked", "   " +
                                 styled(blocked_sign(screen_), Style::kDim,
                                        has_colours(screen_)) +
                                 " blocked");
    put(bar);
    add(tick_line(width), Style::kDim);
  }

  // "0       0.25       1", under a bar `width` wide.
  std::string tick_line(int width) const {
    const double least = scale_.is_signed() ? -1 : 0;
    const auto value = [&](double share) {
      return format("%.2g", scale_.value(share));
    };
    const std::string low = value(least), middle = value((least + 1) / 2),
                      high = (scale_.is_open() ? "≥" : "") + value(1);
    const int half = (width - columns(middle)) / 2 - columns(low);
    std::string line = low;
    if (half > 0) line += std::string(half, ' ') + middle;
    return line + padded(high,
                         std::max(width - columns(line), columns(high) + 1),
                         true);
  }

  // Small maps side by side.
  void heads() {
    const int shown = static_cast<int>(item_.panels.size()) - 1;
    const int limit = shown > 16 ? 16 : 32;
    const CellStyle style{.columns = can_halve() ? 1 : 2,
                          .halves = can_halve()};
    const Axis keys = coarser(
        item_.keys, std::min(limit, screen_.width) / (style.halves ? 1 : 2));
    const Axis queries = coarser(item_.queries, rows_for(keys, style));
    const int width = std::max(keys.cells() * style.columns, 8);
    const int per_row =
        std::clamp((screen_.width + kMapGap) / (width + kMapGap), 1, shown);
    for (int first = 1; first <= shown; first += per_row) {
      add("");
      std::vector<std::string> lines(1);
      for (int i = first; i < std::min(first + per_row, shown + 1); ++i) {
        const Panel& panel = item_.panels[i];
        const std::vector<std::string> map = map_lines(
            pool(panel.map, {item_.queries, queries}, {item_.keys, keys}),
            scale_, style, screen_);
        lines.resize(map.size() + 1);
        lines[0] += exactly(panel.name, width + kMapGap);
        const int rest = width + kMapGap - keys.cells() * style.columns;
        for (size_t line = 0; line < map.size(); ++line)
          lines[line + 1] += map[line] + std::string(rest, ' ');
      }
      for (const std::string& line : lines) put(line);
    }
    const std::string pooled = pooling(queries, keys);
    if (!pooled.empty()) add(pooled, Style::kDim);
  }

  // Entropy and strongest links, a line for each head.
  void table() {
    const bool wide = screen_.width >= 60, numbers = !picture_.difference;
    add("");
    std::string title(10, ' ');
    if (numbers) title += wide ? "entropy    keys   " : "keys  ";
    add(title +
            (picture_.difference ? "largest differences" : "strongest links"),
        Style::kDim);
    for (const Panel& panel : item_.panels) {
      const bool mean = &panel == &item_.panels[0] && item_.panels.size() > 1;
      if (mean && panel.links.empty()) continue;
      std::string line = padded(mean ? "mean" : panel.name, 10);
      if (numbers) line += padded(entropy_text(panel, wide), wide ? 18 : 6);
      for (const Link& link : panel.links) {
        const int room = screen_.width - columns(line);
        std::string text = link_text(link, 16);
        // The strongest is shown by shorter names rather than not at all.
        const bool first = &link == &panel.links[0];
        for (int most = 12; first && most >= 4 && columns(text) > room;
             most -= 4)
          text = link_text(link, most);
        if (columns(text) > room) break;
        line += text + "   ";
      }
      add(line);
    }
  }

  static std::string entropy_text(const Panel& panel, bool wide) {
    if (std::isnan(panel.entropy)) return "";
    const double keys = std::exp(panel.entropy);
    return wide ? format("%7.2f %7.1f", panel.entropy, keys)
                : format("%.1f", keys);
  }

  // A mark, of no width, keeps letters that are written from right to left
  // from taking what follows to their left.
  std::string on_its_side(const std::string& text) const {
    return screen_.utf8 && is_right_to_left(text) ? text + "\u200E" : text;
  }

  // "cat → sat 0.61", of names at most so many columns wide
  std::string link_text(const Link& link, int most) const {
    const auto name = [&](const Axis& axis, int64_t position) {
      return on_its_side(shortened(axis.name(position), most));
    };
    return name(item_.queries, link.query) + " → " +
           name(item_.keys, link.key) +
           format(picture_.difference
                      ? std::abs(link.weight) < 0.005 ? " %+.1e" : " %+.2f"
                      : " %.2f",
                  link.weight);
  }

  const Picture& picture_;
  const Item& item_;
  const ColourScale scale_;
  const Screen& screen_;
  std::string text_;
};

}  // namespace

std::string to_text(const Picture& picture, const Screen& screen) {
  return Page(picture, screen).write();
}

}  // namespace cli
