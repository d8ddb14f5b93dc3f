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

namespace cli {

using multihead::clusters;
using multihead::columns;
using multihead::escaped;
using multihead::printable;

/// What printf would print.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

/// "1 thread", "2 threads"
std::string plural(int64_t count, const std::string& noun);

/// The words with `between` between them.
std::string joined(const std::vector<std::string>& words,
                   const std::string& between = " ");

/// The value of a variable of the environment, "" without one.
std::string environment(const char* variable);

/// The printable form of a token, "" in quotes where it has no letters.
std::string label(std::string_view text);

/// The longest beginning that takes at most `width` columns, with "…" as its
/// last where something was left out.
std::string shortened(std::string_view text, int width);

/// The same without the sign.
std::string beginning(std::string_view text, int width);

/// shortened() with spaces up to `width` columns.
std::string padded(std::string_view text, int width, bool right = false);

/// Known signs become ASCII ones, "×" an "x", other letters question marks.
std::string in_ascii(std::string_view text);

/// Whether it has letters that are written from right to left.
bool is_right_to_left(std::string_view text);

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
