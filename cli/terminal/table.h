// SPDX-License-Identifier: MIT
//
// Text for people: columns that line up, colour where a terminal shows it.
#pragma once

#include <string>
#include <vector>

namespace cli {

/// What the place we print to can show.
struct Terminal {
  bool colour = false;  ///< a terminal, NO_COLOR unset, TERM not "dumb"
  bool utf8 = false;    ///< the locale's encoding
  int width = 0;        ///< columns; 0 = no limit (a file, a pipe)
};

/// Asks standard output and the environment.
Terminal detect_terminal();

enum class Style { kPlain, kBold, kDim, kGood, kBad, kWarning };

/// `text` in ASCII where the terminal has no UTF-8: "×" becomes "x".
std::string for_terminal(const std::string& text, const Terminal& terminal);

struct Column {
  std::string title;
  int width = 0;             ///< at least this, and the title's
  bool right = false;        ///< aligned to the right
  bool dispensable = false;  ///< left out where the terminal is too narrow
};

struct Cell {
  std::string text;
  Style style = Style::kPlain;
};

/// Rows are printed as they come (cli/output.h), so that a long run shows its
/// progress; widths are therefore given beforehand. The first column gives way
/// when space is short, after the dispensable ones from the right.
class Table {
 public:
  Table(std::vector<Column> columns, Terminal terminal);

  void header();
  void row(const std::vector<Cell>& cells);
  /// A line across all columns.
  void line(const std::string& text, Style style = Style::kPlain);

 private:
  int total_width() const;
  void fit();

  std::vector<Column> columns_;
  std::vector<bool> shown_;
  Terminal terminal_;
};

/// `text` between the escape codes of `style`, or as it is.
std::string styled(const std::string& text, Style style,
                   const Terminal& terminal);

}  // namespace cli
