// SPDX-License-Identifier: MIT
//
// A report in lines of equal letters, for terminals and for the picture of one.
#include <algorithm>
#include <array>

#include "diagnosis/report/document.h"

namespace multihead::diagnosis {
namespace {

constexpr int kIndent = 2, kLabel = 10, kGap = 2, kNarrowestName = 12;
constexpr int kNarrowestPage = 40;

// A code point.
struct Glyph {
  std::string_view bytes;
  Emphasis emphasis;
};
using Glyphs = std::vector<Glyph>;

Glyphs glyphs_of(const Text& text) {
  Glyphs glyphs;
  for (const Span& span : text) {
    for (size_t at = 0; at < span.text.size();) {
      size_t end = at + 1;
      while (end < span.text.size() && (span.text[end] & 0xC0) == 0x80) ++end;
      glyphs.push_back(
          {std::string_view(span.text).substr(at, end - at), span.emphasis});
      at = end;
    }
  }
  return glyphs;
}

bool is(const Glyph& glyph, char c) {
  return glyph.bytes.size() == 1 && glyph.bytes[0] == c;
}

void append(Text& line, std::string_view text, Emphasis emphasis) {
  if (text.empty()) return;
  if (line.empty() || line.back().emphasis != emphasis)
    line.push_back({"", emphasis});
  line.back().text += text;
}

void append(Text& line, const Glyphs& glyphs, size_t from, size_t to) {
  for (size_t i = from; i < to; ++i)
    append(line, glyphs[i].bytes, glyphs[i].emphasis);
}

// Where a line may end: before a space, but not in code, nor inside the items
// of a list, whose separators are dots.
bool may_break(const Glyphs& glyphs, size_t at) {
  if (!is(glyphs[at], ' ') || glyphs[at].emphasis == Emphasis::kCode)
    return false;
  return glyphs[at].emphasis != Emphasis::kDim ||
         (at > 0 && glyphs[at - 1].bytes == "·");
}

// The end of the line that begins at `from`: where it may break within `width`,
// else at any space there, else after the word that is longer.
size_t line_end(const Glyphs& glyphs, size_t from, size_t width) {
  size_t paragraph_end = from;
  while (paragraph_end < glyphs.size() && !is(glyphs[paragraph_end], '\n'))
    ++paragraph_end;
  if (paragraph_end - from <= width) return paragraph_end;
  for (size_t end = from + width; end > from; --end)
    if (may_break(glyphs, end)) return end;
  for (size_t end = from + width; end > from; --end)
    if (is(glyphs[end], ' ')) return end;
  size_t end = from + width;
  while (end < paragraph_end && !is(glyphs[end], ' ')) ++end;
  return end;
}

// `text` in lines of at most `width` columns, where its words allow.
std::vector<Text> broken(const Text& text, int width) {
  const Glyphs glyphs = glyphs_of(text);
  std::vector<Text> lines;
  for (size_t from = 0; from < glyphs.size();) {
    const size_t end = line_end(glyphs, from, static_cast<size_t>(width));
    lines.emplace_back();
    append(lines.back(), glyphs, from, end);
    from = end + 1;  // the space or newline
  }
  return lines;
}

// The label in column `start`, every line of the text in column `indent`.
void add_labelled(std::vector<Text>& page, const Block& block, int start,
                  int width) {
  const int indent = kIndent + (block.kind == Block::Kind::kNote ? kLabel : 0);
  const int taken = start + columns(block.label.text);
  bool first = true;
  for (const Text& line : broken(block.text, width - indent)) {
    page.emplace_back();
    if (first) {
      append(page.back(), std::string(static_cast<size_t>(start), ' '),
             Emphasis::kPlain);
      append(page.back(), block.label.text, block.label.emphasis);
    }
    const auto rest = static_cast<size_t>(indent - (first ? taken : 0));
    append(page.back(), std::string(rest, ' '), Emphasis::kPlain);
    for (const Span& span : line) append(page.back(), span.text, span.emphasis);
    first = false;
  }
}

std::string cut(const std::string& text, int width) {
  if (columns(text) <= width) return text;
  size_t end = 0;
  for (int seen = 0; end < text.size(); ++end)
    if ((text[end] & 0xC0) != 0x80 && ++seen == width) break;
  return text.substr(0, end) + "…";
}

void add_table(std::vector<Text>& page, const Block& table, int width) {
  constexpr size_t kName = 1, kFirstNumber = 4, kLastNumber = 5;
  std::array<int, 7> widths{};
  for (const Text& row : table.rows)
    for (size_t i = 0; i < row.size(); ++i)
      widths[i] = std::max(widths[i], columns(row[i].text));
  int total = kIndent - kGap;
  for (const int column : widths) total += column + kGap;
  widths[kName] =
      std::max(kNarrowestName, widths[kName] - std::max(0, total - width));

  for (const Text& row : table.rows) {
    page.emplace_back();
    append(page.back(), std::string(kIndent, ' '), Emphasis::kPlain);
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string cell = cut(row[i].text, std::max(widths[i], 1));
      const auto missing = static_cast<size_t>(widths[i] - columns(cell));
      const bool right = i >= kFirstNumber && i <= kLastNumber;
      const bool last = i + 1 == row.size();
      if (right)
        append(page.back(), std::string(missing, ' '), Emphasis::kPlain);
      append(page.back(), cell, row[i].emphasis);
      if (!last)
        append(page.back(), std::string((right ? 0 : missing) + kGap, ' '),
               Emphasis::kPlain);
    }
  }
}

const char* escape_code(Emphasis emphasis) {
  switch (emphasis) {
    case Emphasis::kPlain:
      return "";
    case Emphasis::kStrong:
      return "\033[1m";
    case Emphasis::kDim:
      return "\033[2m";
    case Emphasis::kGood:
      return "\033[1;32m";
    case Emphasis::kBad:
      return "\033[1;31m";
    case Emphasis::kCode:
      return "\033[36m";
  }
  return "";
}

}  // namespace

std::vector<Text> laid_out(const Document& document, int width) {
  using Kind = Block::Kind;
  width = std::max(width, kNarrowestPage);
  std::vector<Text> page;
  const Block* previous = nullptr;
  for (const Block& block : document) {
    if (block.folded) continue;
    if (previous && (previous->kind != block.kind)) page.emplace_back();
    previous = &block;
    if (block.kind == Kind::kTable) {
      add_table(page, block, width);
    } else {
      const bool inset =
          block.kind == Kind::kNote || block.kind == Kind::kParagraph;
      add_labelled(page, block, inset ? kIndent : 0, width);
    }
  }
  return page;
}

std::string to_text(const Document& document, bool colour, int width) {
  std::string text;
  for (const Text& line : laid_out(document, width)) {
    for (const Span& span : line) {
      const bool styled = colour && span.emphasis != Emphasis::kPlain;
      text += styled ? escape_code(span.emphasis) + span.text + "\033[0m"
                     : span.text;
    }
    text += '\n';
  }
  return text;
}

}  // namespace multihead::diagnosis
