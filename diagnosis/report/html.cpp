// SPDX-License-Identifier: MIT
//
// A report as a fragment of HTML: for notebooks, and whole enough for a file.
#include "diagnosis/report/document.h"
#include "multihead/text/escaped.h"

namespace multihead::diagnosis {
namespace {

// Colours are the page's own where they can be, so that light and dark fit.
constexpr const char* kStyle = R"(<style>
.multihead-report { font: 14px/1.5 system-ui, sans-serif; max-width: 56em; padding: .8em 1.2em; border: 1px solid #8886; border-radius: 8px }
.multihead-report h3 { font-size: 1.1em; margin: .2em 0 .6em }
.multihead-report p { margin: .5em 0; white-space: pre-wrap }
.multihead-report dl { display: grid; grid-template-columns: max-content 1fr; gap: .3em 1em; margin: .6em 0 }
.multihead-report dd { margin: 0; white-space: pre-wrap }
.multihead-report code { font: .92em ui-monospace, monospace; background: #8882; border-radius: 4px; padding: 0 .25em }
.multihead-report table { color: inherit; font-size: inherit; border-collapse: collapse; margin: .6em 0; font-variant-numeric: tabular-nums }
.multihead-report th, .multihead-report td { text-align: left; padding: .1em 1em .1em 0; font-weight: normal; border: 0 }
.multihead-report .number { text-align: right }
.multihead-report .dim { opacity: .65 }
.multihead-report .good { color: #2da44e; font-weight: 600 }
.multihead-report .bad { color: #e5484d; font-weight: 600 }
</style>
)";

std::string html(const Span& span) {
  const std::string text = escaped(span.text);
  switch (span.emphasis) {
    case Emphasis::kStrong:
      return "<strong>" + text + "</strong>";
    case Emphasis::kDim:
      return "<span class=\"dim\">" + text + "</span>";
    case Emphasis::kGood:
      return "<span class=\"good\">" + text + "</span>";
    case Emphasis::kBad:
      return "<span class=\"bad\">" + text + "</span>";
    case Emphasis::kCode:
      return "<code>" + text + "</code>";
    default:
      return text;
  }
}

std::string html(const Text& text) {
  std::string result;
  for (const Span& span : text) result += html(span);
  return result;
}

std::string row_html(const Text& row, const char* cell) {
  constexpr size_t kFirstNumber = 4, kLastNumber = 5;
  std::string result = "<tr>";
  for (size_t i = 0; i < row.size(); ++i) {
    const bool number = i >= kFirstNumber && i <= kLastNumber;
    result += std::string("<") + cell + (number ? " class=\"number\">" : ">") +
              html(row[i]) + "</" + cell + ">";
  }
  return result + "</tr>\n";
}

std::string table_html(const Block& table) {
  std::string rows;
  for (size_t i = 0; i < table.rows.size(); ++i)
    rows += row_html(table.rows[i], i == 0 ? "th" : "td");
  const std::string result = "<table>\n" + rows + "</table>\n";
  if (!table.folded) return result;
  return "<details><summary>cases</summary>\n" + result + "</details>\n";
}

std::string block_html(const Block& block) {
  using Kind = Block::Kind;
  const std::string label = html(block.label);
  switch (block.kind) {
    case Kind::kPrompt:
      return "<p>" + label + " <code>" + html(block.text) + "</code></p>\n";
    case Kind::kHeadline:
      return "<h3>" + label + " " + html(block.text) + "</h3>\n";
    case Kind::kTable:
      return table_html(block);
    case Kind::kNote:
      return "<dt>" + label + "</dt><dd>" + html(block.text) + "</dd>\n";
    default:
      return "<p>" + html(block.text) + "</p>\n";
  }
}

}  // namespace

std::string to_html(const Document& document) {
  std::string result = "<div class=\"multihead-report\">\n";
  result += kStyle;
  bool in_notes = false;
  for (const Block& block : document) {
    const bool note = block.kind == Block::Kind::kNote;
    if (note != in_notes) result += note ? "<dl>\n" : "</dl>\n";
    in_notes = note;
    result += block_html(block);
  }
  if (in_notes) result += "</dl>\n";
  return result + "</div>\n";
}

}  // namespace multihead::diagnosis
