// SPDX-License-Identifier: MIT
#include "cli/terminal/text.h"

#include <langinfo.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <clocale>
#include <cstdlib>

#include "cli/terminal/output.h"

namespace cli {
namespace {

constexpr int kGap = 2;
constexpr int kNarrowestName = 16;

}  // namespace

std::string environment(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
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
