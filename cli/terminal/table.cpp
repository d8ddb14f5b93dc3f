// SPDX-License-Identifier: MIT
#include "cli/terminal/table.h"

#include <langinfo.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <clocale>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "cli/terminal/output.h"
#include "cli/terminal/width.h"

namespace cli {
namespace {

constexpr int kGap = 2;
constexpr int kNarrowestName = 16;

// NO_COLOR counts when it is set and not empty (no-color.org).
bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value && *value;
}

const char* escape_code(Style style) {
  switch (style) {
    case Style::kPlain:
      return "";
    case Style::kBold:
      return "\033[1m";
    case Style::kDim:
      return "\033[2m";
    case Style::kGood:
      return "\033[32m";
    case Style::kBad:
      return "\033[1;31m";
    case Style::kWarning:
      return "\033[1;33m";
  }
  return "";
}

}  // namespace

Terminal detect_terminal() {
  Terminal terminal;
  std::setlocale(LC_CTYPE, "");
  terminal.utf8 = std::string_view(nl_langinfo(CODESET)) == "UTF-8";
  if (!isatty(STDOUT_FILENO)) return terminal;
  const char* term = std::getenv("TERM");
  terminal.colour =
      !is_set("NO_COLOR") && term && std::string_view(term) != "dumb";
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0)
    terminal.width = size.ws_col;
  return terminal;
}

std::string for_terminal(const std::string& text, const Terminal& terminal) {
  if (terminal.utf8) return text;
  static constexpr std::pair<std::string_view, std::string_view> kAscii[] = {
      {"✓", "ok"}, {"✗", "NO"},    {"·", "*"},   {"×", "x"},
      {"–", "-"},  {"µ", "u"},     {"≥", ">="},  {"≤", "<="},
      {"≠", "!="}, {"√", "sqrt "}, {"∞", "inf"}, {"…", "..."},
  };
  std::string ascii;
  for (size_t i = 0; i < text.size();) {
    const std::string_view rest = std::string_view(text).substr(i);
    const auto* known =
        std::find_if(std::begin(kAscii), std::end(kAscii),
                     [&](const auto& p) { return rest.starts_with(p.first); });
    if (known != std::end(kAscii)) {
      ascii += known->second;
      i += known->first.size();
    } else {
      ascii += static_cast<unsigned char>(text[i]) < 0x80 ? text[i] : '?';
      ++i;
    }
  }
  return ascii;
}

std::string styled(const std::string& text, Style style,
                   const Terminal& terminal) {
  if (!terminal.colour || style == Style::kPlain) return text;
  return escape_code(style) + text + "\033[0m";
}

Table::Table(std::vector<Column> columns, Terminal terminal)
    : columns_(std::move(columns)),
      shown_(columns_.size(), true),
      terminal_(terminal) {
  for (Column& column : columns_) {
    column.title = for_terminal(column.title, terminal_);
    column.width = std::max(column.width, cli::columns(column.title));
  }
  if (terminal_.width > 0) fit();
}

int Table::total_width() const {
  int width = -kGap;
  for (size_t i = 0; i < columns_.size(); ++i)
    if (shown_[i]) width += columns_[i].width + kGap;
  return width;
}

void Table::fit() {
  for (size_t i = columns_.size(); i-- > 0 && total_width() > terminal_.width;)
    if (columns_[i].dispensable) shown_[i] = false;
  const int excess = total_width() - terminal_.width;
  if (excess > 0)
    columns_[0].width = std::max(kNarrowestName, columns_[0].width - excess);
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
    std::string cell = for_terminal(cells[i].text, terminal_);
    if (i == 0) cell = beginning(cell, column.width);
    const bool last = i + 1 == cells.size() && !column.right;
    if (!last)
      cell = padded(cell, std::max(column.width, columns(cell)), column.right);
    text += (text.empty() ? "" : std::string(kGap, ' ')) +
            styled(cell, cells[i].style, terminal_);
  }
  write_output(text + "\n");
}

void Table::line(const std::string& text, Style style) {
  const std::string shown = for_terminal(text, terminal_);
  write_output(styled(shown, style, terminal_) + "\n");
}

}  // namespace cli
