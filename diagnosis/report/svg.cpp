// SPDX-License-Identifier: MIT
//
// A report as a picture of a terminal, light on light pages and dark on dark.
#include <algorithm>
#include <cstdio>

#include "diagnosis/report/document.h"
#include "multihead/text/escaped.h"

namespace multihead::diagnosis {
namespace {

// A column and a line of 13 pixel type, and the frame around them.
constexpr double kColumn = 7.8, kLine = 19, kMargin = 20;

constexpr const char* kStyle = R"(<style>
  .page { fill: #f6f8fa; stroke: #d0d7de }
  text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328; white-space: pre }
  .strong { font-weight: 600 } .dim { fill: #656d76 } .code { fill: #0a3069 }
  .good { fill: #1a7f37; font-weight: 600 } .bad { fill: #cf222e; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 }
    .dim { fill: #8d96a0 } .code { fill: #79c0ff }
    .good { fill: #3fb950 } .bad { fill: #f85149 }
  }
</style>
)";

const char* class_of(Emphasis emphasis) {
  switch (emphasis) {
    case Emphasis::kStrong:
      return " class=\"strong\"";
    case Emphasis::kDim:
      return " class=\"dim\"";
    case Emphasis::kGood:
      return " class=\"good\"";
    case Emphasis::kBad:
      return " class=\"bad\"";
    case Emphasis::kCode:
      return " class=\"code\"";
    default:
      return "";
  }
}

// Each span at its column and of its length, whatever font there is. Spaces at
// its ends would be lost in some programs.
std::string drawn(const Span& span, int column, double y) {
  const size_t first = span.text.find_first_not_of(' ');
  if (first == std::string::npos) return "";
  const size_t last = span.text.find_last_not_of(' ');
  const std::string text = span.text.substr(first, last - first + 1);
  char place[160];
  std::snprintf(place, sizeof place,
                "<text x=\"%.1f\" y=\"%.1f\" textLength=\"%.1f\"%s>",
                kMargin + kColumn * (column + static_cast<int>(first)), y,
                kColumn * columns(text), class_of(span.emphasis));
  return place + escaped(text) + "</text>\n";
}

}  // namespace

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
  char frame[400];
  std::snprintf(frame, sizeof frame,
                "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" "
                "height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" role=\"img\">\n",
                picture_width, picture_height, picture_width, picture_height);
  char page[200];
  std::snprintf(page, sizeof page,
                "<rect class=\"page\" x=\"0.5\" y=\"0.5\" width=\"%.0f\" "
                "height=\"%.0f\" rx=\"8\"/>\n",
                picture_width - 1, picture_height - 1);
  return std::string(frame) + kStyle + page + body + "</svg>\n";
}

}  // namespace multihead::diagnosis
