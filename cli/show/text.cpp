// SPDX-License-Identifier: MIT
//
// A picture in lines of a terminal, none longer than the screen.
#include <algorithm>
#include <cmath>

#include "cli/show/picture.h"
#include "cli/show/text_map.h"
#include "cli/terminal/format.h"
#include "cli/terminal/width.h"

namespace cli {
namespace {

constexpr int kGap = 2;           // between the maps of heads
constexpr int kMostLines = 64;    // of one map
constexpr int kTallestLabel = 9;  // of keys, downwards

// "the cat", where a line of half blocks shows two queries.
std::string line_label(const Axis& lines, int line) {
  if (lines.count(line) != 2) return lines.label(line);
  const int64_t first = lines.edges[line];
  if (lines.tokens.empty()) return lines.name(first);
  return lines.name(first) + " " + lines.name(first + 1);
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
    put(styled(fit(line), how, screen_));
  }
  std::string fit(std::string_view line) const {
    return at_most(line, screen_.width, screen_);
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

  bool can_halve() const {
    return screen_.utf8 && screen_.colours != Colours::kNone;
  }

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
    const std::string entropy = describe_entropy(panel.entropy);
    add(panel.name + (entropy.empty() ? "" : " · " + entropy), Style::kBold);
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
    std::string text = on_its_side(exactly(label, width, screen_, true)) + " ";
    const bool ascii = std::ranges::all_of(
        text, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
    if (screen_.colours != Colours::kNone && !ascii)
      text += format("\033[%dG", width + 2);
    return text;
  }

  // Tokens downwards, above their columns; positions where there are none.
  std::vector<std::string> key_labels(const Axis& keys, int cell) const {
    if (keys.pooled() || keys.tokens.empty()) return {ticks(keys, cell)};
    std::vector<std::vector<std::string>> letters;
    size_t tallest = 0;
    for (const std::string& token : keys.tokens) {
      letters.emplace_back();
      for (auto& cluster : clusters(at_most(token, kTallestLabel, screen_)))
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
    std::string bar = colour_bar(scale_, width, screen_);
    int used = width;
    const auto append = [&](const std::string& plain, const std::string& text) {
      if (used + columns(plain) > screen_.width) return;
      bar += text;
      used += columns(plain);
    };
    const std::string name = "  " + at_most(scale_name(picture_), 40, screen_);
    append(name, name);
    if (has_blocked_cells(item_)) {
      const std::string sign = blocked_sign(screen_);
      append("   / blocked",
             "   " + styled(sign, Style::kDim, screen_) + " blocked");
    }
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
                      high = value(1);
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
        std::clamp((screen_.width + kGap) / (width + kGap), 1, shown);
    for (int first = 1; first <= shown; first += per_row) {
      add("");
      std::vector<std::string> lines(1);
      for (int i = first; i < std::min(first + per_row, shown + 1); ++i) {
        const Panel& panel = item_.panels[i];
        const std::vector<std::string> map = map_lines(
            pool(panel.map, {item_.queries, queries}, {item_.keys, keys}),
            scale_, style, screen_);
        lines.resize(map.size() + 1);
        lines[0] += exactly(panel.name, width + kGap, screen_);
        const int rest = width + kGap - keys.cells() * style.columns;
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
