// SPDX-License-Identifier: MIT
//
// A document as text for terminals, as the picture of a terminal (SVG), and as
// HTML that stands in a notebook or in a file of its own. And a verdict as
// JSON, from which documents are made.
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "diagnosis/report/codes.h"
#include "diagnosis/report/document.h"
#include "multihead/diagnosis.h"
#include "multihead/text/escaped.h"
#include "multihead/text/width.h"

namespace multihead::diagnosis {
namespace {

// ---- Lines -----------------------------------------------------------------

constexpr int kIndent = 2, kLabel = 10, kGap = 2, kNarrowestName = 12;
constexpr int kNarrowestPage = 40;
// Columns of the table.
constexpr size_t kName = 1, kFirstNumber = 4, kLastNumber = 5;

// What takes a place, and how.
struct Glyph {
  std::string text;
  Emphasis emphasis;
};
using Glyphs = std::vector<Glyph>;

Glyphs glyphs_of(const Text& text) {
  Glyphs glyphs;
  for (const Span& span : text)
    for (const Cluster& cluster : clusters(span.text))
      glyphs.push_back({cluster.text, span.emphasis});
  return glyphs;
}

void append(Text& line, std::string_view text, Emphasis emphasis) {
  if (text.empty()) return;
  if (line.empty() || line.back().emphasis != emphasis)
    line.push_back({"", emphasis});
  line.back().text += text;
}

void append(Text& line, const Glyphs& glyphs, size_t from, size_t to) {
  for (size_t i = from; i < to; ++i)
    append(line, glyphs[i].text, glyphs[i].emphasis);
}

void pad(Text& line, int columns) {
  append(line, std::string(static_cast<size_t>(columns), ' '),
         Emphasis::kPlain);
}

// Where a line may end: before a space, but not in code, nor inside the items
// of a list, whose separators are dots.
bool may_break(const Glyphs& glyphs, size_t at) {
  if (glyphs[at].text != " " || glyphs[at].emphasis == Emphasis::kCode)
    return false;
  return glyphs[at].emphasis != Emphasis::kDim ||
         (at > 0 && glyphs[at - 1].text == "·");
}

// The end of the line that begins at `from`: where it may break within `width`,
// else at any space there, else after the word that is longer.
size_t line_end(const Glyphs& glyphs, size_t from, size_t width) {
  size_t paragraph_end = from;
  while (paragraph_end < glyphs.size() && glyphs[paragraph_end].text != "\n")
    ++paragraph_end;
  if (paragraph_end - from <= width) return paragraph_end;
  for (size_t end = from + width; end > from; --end)
    if (may_break(glyphs, end)) return end;
  for (size_t end = from + width; end > from; --end)
    if (glyphs[end].text == " ") return end;
  size_t end = from + width;
  while (end < paragraph_end && glyphs[end].text != " ") ++end;
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
      pad(page.back(), start);
      append(page.back(), block.label.text, block.label.emphasis);
    }
    pad(page.back(), indent - (first ? taken : 0));
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
    pad(page.back(), kIndent);
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string cell = cut(row[i].text, std::max(widths[i], 1));
      const int missing = widths[i] - columns(cell);
      const bool right = i >= kFirstNumber && i <= kLastNumber;
      const bool last = i + 1 == row.size();
      if (right) pad(page.back(), missing);
      append(page.back(), cell, row[i].emphasis);
      if (!last) pad(page.back(), (right ? 0 : missing) + kGap);
    }
  }
}

// The lines of a page of `width` columns, or as many as the longest word needs.
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

// By emphasis, as are kClasses and kTags.
constexpr const char* kEscapes[] = {"",           "\033[1m",    "\033[2m",
                                    "\033[1;32m", "\033[1;31m", "\033[36m",
                                    "\033[1;33m"};

std::string to_text(const Document& document, bool colour, int width) {
  std::string text;
  for (const Text& line : laid_out(document, width)) {
    for (const Span& span : line) {
      const bool styled = colour && span.emphasis != Emphasis::kPlain;
      text += styled ? kEscapes[static_cast<size_t>(span.emphasis)] +
                           span.text + "\033[0m"
                     : span.text;
    }
    text += '\n';
  }
  return text;
}

// ---- The picture of a terminal, light on light pages and dark on dark ------

// A column and a line of 13 pixel type, and the frame around them.
constexpr double kColumn = 7.8, kLine = 19, kMargin = 20;

constexpr const char* kSvgStyle = R"(<style>
  .page { fill: #f6f8fa; stroke: #d0d7de }
  text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328; white-space: pre }
  .strong { font-weight: 600 } .dim { fill: #656d76 } .code { fill: #0a3069 }
  .good { fill: #1a7f37; font-weight: 600 } .bad { fill: #cf222e; font-weight: 600 }
  .open { fill: #9a6700; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 }
    .dim { fill: #8d96a0 } .code { fill: #79c0ff }
    .good { fill: #3fb950 } .bad { fill: #f85149 } .open { fill: #d29922 }
  }
</style>
)";

constexpr const char* kClasses[] = {"",
                                    " class=\"strong\"",
                                    " class=\"dim\"",
                                    " class=\"good\"",
                                    " class=\"bad\"",
                                    " class=\"code\"",
                                    " class=\"open\""};

// Each span at its column and of its length, whatever font there is. Spaces at
// its ends would be lost in some programs.
std::string drawn(const Span& span, int column, double y) {
  const size_t first = span.text.find_first_not_of(' ');
  if (first == std::string::npos) return "";
  const size_t last = span.text.find_last_not_of(' ');
  const std::string text = span.text.substr(first, last - first + 1);
  char place[160];
  std::snprintf(
      place, sizeof place, "<text x=\"%.1f\" y=\"%.1f\" textLength=\"%.1f\"%s>",
      kMargin + kColumn * (column + static_cast<int>(first)), y,
      kColumn * columns(text), kClasses[static_cast<size_t>(span.emphasis)]);
  return place + escaped(text) + "</text>\n";
}

std::string to_svg(const Document& document, int width) {
  const std::vector<Text> lines = laid_out(document, width);
  std::string body;
  double y = kMargin + 13;
  int widest = 0;
  for (const Text& line : lines) {
    int column = 0;
    for (const Span& span : line) {
      body += drawn(span, column, y);
      column += columns(span.text);
    }
    widest = std::max(widest, column);
    y += kLine;
  }
  const double picture_width = 2 * kMargin + kColumn * widest;
  const double picture_height = y - kLine + kMargin;
  char frame[2000];
  std::snprintf(frame, sizeof frame,
                "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" "
                "height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" role=\"img\">\n%s"
                "<rect class=\"page\" x=\"0.5\" y=\"0.5\" width=\"%.0f\" "
                "height=\"%.0f\" rx=\"8\"/>\n",
                picture_width, picture_height, picture_width, picture_height,
                kSvgStyle, picture_width - 1, picture_height - 1);
  return frame + body + "</svg>\n";
}

// ---- HTML ------------------------------------------------------------------

// Colours are the page's own where they can be, so that light and dark fit.
constexpr const char* kHtmlStyle = R"(<style>
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
.multihead-report .open { color: #bf8700; font-weight: 600 }
</style>
)";

constexpr std::pair<const char*, const char*> kTags[] = {
    {"", ""},
    {"<strong>", "</strong>"},
    {"<span class=\"dim\">", "</span>"},
    {"<span class=\"good\">", "</span>"},
    {"<span class=\"bad\">", "</span>"},
    {"<code>", "</code>"},
    {"<span class=\"open\">", "</span>"}};

std::string html(const Span& span) {
  const auto [open, close] = kTags[static_cast<size_t>(span.emphasis)];
  return open + escaped(span.text) + close;
}

std::string html(const Text& text) {
  std::string result;
  for (const Span& span : text) result += html(span);
  return result;
}

std::string row_html(const Text& row, const char* cell) {
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

std::string to_html(const Document& document) {
  std::string result = "<div class=\"multihead-report\">\n";
  result += kHtmlStyle;
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

}  // namespace

ReportFormat report_format_from_name(std::string_view name) {
  if (name == "text") return ReportFormat::kText;
  if (name == "ansi") return ReportFormat::kAnsi;
  if (name == "html") return ReportFormat::kHtml;
  if (name == "svg") return ReportFormat::kSvg;
  TORCH_CHECK_VALUE(false,
                    "render_report: format must be \"text\", \"ansi\", "
                    "\"html\" or \"svg\", got \"",
                    name, "\"");
}

std::string render_report(const std::string& json, ReportFormat format,
                          int width) {
  const Document document = document_of(json);
  switch (format) {
    case ReportFormat::kHtml:
      return to_html(document);
    case ReportFormat::kSvg:
      return to_svg(document, width);
    default:
      return to_text(document, format == ReportFormat::kAnsi, width);
  }
}

std::string to_text(const Verdict& verdict, int width) {
  return render_report(to_json(verdict), ReportFormat::kText, width);
}

// ---- A verdict as JSON -----------------------------------------------------

using OrderedJson = nlohmann::ordered_json;

// Text is escaped, and what is no UTF-8 replaced; NaN and infinities are null.
static void to_json(OrderedJson& json, const Finding& finding) {
  json = {{"name", finding.name},     {"code", code_of(finding.name)},
          {"stage", finding.stage},   {"sentence", finding.sentence},
          {"remedy", finding.remedy}, {"detail", finding.detail}};
}

static void to_json(OrderedJson& json, const Condition& condition) {
  json = {{"name", condition.name},
          {"sentence", condition.sentence},
          {"remedy", condition.remedy}};
}

static void to_json(OrderedJson& json, const ComparedCase& c) {
  json = {{"name", c.name},       {"dtype", c.dtype},
          {"tensor", c.tensor},   {"shape", c.shape},
          {"agrees", c.agrees},   {"explained", c.explained},
          {"bits", c.bits},       {"exercise", c.exercise},
          {"error", c.error},     {"pytorch_error", c.pytorch_error},
          {"allowed", c.allowed}, {"unexplained", c.unexplained}};
}

static void to_json(OrderedJson& json, const Place& place) {
  json = {{"case", place.observation},
          {"tensor", place.tensor},
          {"index", place.index},
          {"got", place.got},
          {"expected", place.expected}};
}

std::string to_json(const Verdict& verdict) {
  constexpr const char* kJudgements[] = {"bits", "rounding", "fault",
                                         "unknown"};
  const auto or_null = [](const auto& value) {
    return value ? OrderedJson(*value) : OrderedJson(nullptr);
  };
  const OrderedJson all = {
      {"verdict", kJudgements[static_cast<int>(verdict.judgement)]},
      {"faults", verdict.faults},
      {"alternatives", verdict.alternatives},
      {"findings", verdict.findings},
      {"assumptions", verdict.assumptions},
      {"conditions", verdict.conditions},
      {"remarks", verdict.remarks},
      {"doubtful", verdict.doubtful},
      {"first_stage", or_null(verdict.first_stage)},
      {"where", or_null(verdict.where)},
      {"cases", verdict.cases},
      {"weights", verdict.weights},
      {"unused", verdict.unused},
      {"effort", verdict.effort}};
  return all.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

}  // namespace multihead::diagnosis
