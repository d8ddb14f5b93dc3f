// SPDX-License-Identifier: MIT
#include "cli/terminal/text.h"

#include <langinfo.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <clocale>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "cli/terminal/output.h"

namespace cli {
namespace {

constexpr int kGap = 2;
constexpr int kNarrowestName = 16;

}  // namespace

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

std::string environment(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
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
    const char32_t c = multihead::take_code_point(text);
    if ((c >= 0x0590 && c <= 0x08FF) || (c >= 0xFB1D && c <= 0xFDFF) ||
        (c >= 0xFE70 && c <= 0xFEFC) || (c >= 0x10800 && c <= 0x10FFF) ||
        (c >= 0x1E800 && c <= 0x1EFFF))
      return true;
  }
  return false;
}

Terminal detect_terminal() {
  Terminal terminal;
  std::setlocale(LC_CTYPE, "");
  terminal.utf8 = std::string_view(nl_langinfo(CODESET)) == "UTF-8";
  if (!isatty(STDOUT_FILENO)) return terminal;
  const char* term = std::getenv("TERM");
  // NO_COLOR counts when it is set and not empty (no-color.org).
  terminal.colour = environment("NO_COLOR").empty() && term &&
                    std::string_view(term) != "dumb";
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0)
    terminal.width = size.ws_col;
  return terminal;
}

std::string styled(const std::string& text, Style style, bool colour) {
  static constexpr const char* kCodes[] = {"", "1", "2", "32", "1;31", "1;33"};
  if (!colour || style == Style::kPlain) return text;
  return std::string("\033[") + kCodes[static_cast<int>(style)] + "m" + text +
         "\033[0m";
}

Table::Table(std::vector<Column> columns)
    : columns_(std::move(columns)), shown_(columns_.size(), true) {
  for (Column& column : columns_) {
    column.title = terminal_.shown(column.title);
    column.width = std::max(column.width, cli::columns(column.title));
  }
  if (terminal_.width == 0) return;
  for (size_t i = columns_.size(); i-- > 0 && total_width() > terminal_.width;)
    if (columns_[i].dispensable) shown_[i] = false;
  const int excess = total_width() - terminal_.width;
  if (excess > 0)
    columns_[0].width = std::max(kNarrowestName, columns_[0].width - excess);
}

int Table::total_width() const {
  int width = -kGap;
  for (size_t i = 0; i < columns_.size(); ++i)
    if (shown_[i]) width += columns_[i].width + kGap;
  return width;
}

void Table::header() {
  std::vector<Cell> titles;
  for (const Column& column : columns_)
    titles.push_back({column.title, Style::kDim});
  row(titles);
}

void Table::row(const std::vector<Cell>& cells) {
  std::string text;
  for (size_t i = 0; i < cells.size(); ++i) {
    if (!shown_[i]) continue;
    const Column& column = columns_[i];
    std::string cell = terminal_.shown(cells[i].text);
    if (i == 0) cell = beginning(cell, column.width);
    const bool last = i + 1 == cells.size() && !column.right;
    if (!last)
      cell = padded(cell, std::max(column.width, columns(cell)), column.right);
    text += (text.empty() ? "" : std::string(kGap, ' ')) +
            styled(cell, cells[i].style, terminal_.colour);
  }
  write_output(text + "\n");
}

void Table::line(const std::string& text, Style style) {
  write_output(styled(terminal_.shown(text), style, terminal_.colour) + "\n");
}

}  // namespace cli
