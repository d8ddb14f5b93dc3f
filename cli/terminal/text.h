// SPDX-License-Identifier: MIT
//
// Text of any origin and script for people: columns that line up, colour where
// a terminal shows it, nothing that would move the cursor.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "multihead/text/escaped.h"
#include "multihead/text/printable.h"
#include "multihead/text/width.h"
#include "multihead/text/words.h"

namespace cli {

using multihead::beginning;
using multihead::clusters;
using multihead::columns;
using multihead::escaped;
using multihead::format;
using multihead::in_ascii;
using multihead::is_right_to_left;
using multihead::joined;
using multihead::label;
using multihead::padded;
using multihead::plural;
using multihead::printable;
using multihead::shortened;

/// The value of a variable of the environment, "" without one.
std::string environment(const char* variable);

/// What the place we print to can show.
struct Terminal {
  bool colour = false;  ///< a terminal, NO_COLOR unset, TERM not "dumb"
  bool utf8 = false;    ///< the locale's encoding
  int width = 0;        ///< columns; 0 = no limit (a file, a pipe)

  std::string shown(const std::string& text) const {
    return utf8 ? text : in_ascii(text);
  }
};

/// Asks standard output and the environment.
Terminal detect_terminal();

enum class Style { kPlain, kBold, kDim, kGood, kBad, kWarning };

/// `text` between the escape codes of `style`, or as it is.
std::string styled(const std::string& text, Style style, bool colour);

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

/// Rows are printed as they come (output.h), so that a long run shows its
/// progress; widths are therefore given beforehand. The first column gives way
/// when space is short, after the dispensable ones from the right.
class Table {
 public:
  explicit Table(std::vector<Column> columns);

  void header();
  void row(const std::vector<Cell>& cells);
  /// A line across all columns.
  void line(const std::string& text, Style style = Style::kPlain);

 private:
  int total_width() const;

  std::vector<Column> columns_;
  std::vector<bool> shown_;
  Terminal terminal_ = detect_terminal();
};

}  // namespace cli
