// SPDX-License-Identifier: MIT
//
// A picture as SVG: vectors alone, and colours of the page by the reader's
// choice of light or dark.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string_view>

#include "cli/show/drawing.h"
#include "cli/terminal/width.h"

namespace cli {
namespace {

constexpr const char* kStyle = R"(<style>
  .page { fill: #ffffff } .surface { fill: #f6f8fa; stroke: #8c959f }
  text { fill: #1f2328; font-family: system-ui, sans-serif; font-size: 12px }
  .dim { fill: #656d76 } .warning { fill: #9a6700 } .bold { font-weight: 600 }
  .line { stroke: #8c959f } .ink { stroke: #8c959f }
  .middle { text-anchor: middle } .end { text-anchor: end }
  .w, .b { text-anchor: middle; font-size: 11px }
  .w { fill: #ffffff } .b { fill: #000000 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .surface { fill: #161b22; stroke: #6e7681 }
    text { fill: #e6edf3 } .dim { fill: #8d96a0 } .warning { fill: #d29922 }
    .line { stroke: #6e7681 } .ink { stroke: #6e7681 }
    .w { fill: #ffffff } .b { fill: #000000 }
  }
</style>
<defs><pattern id="blocked" width="6" height="6" patternUnits="userSpaceOnUse">
<path class="ink" d="M-1 1l2-2M0 6l6-6M5 7l2-2"/></pattern></defs>
)";

// Colours of a map are rounded to these: cells of one are one path.
constexpr int kLevels = 96;

// "12.5", without zeros at its end.
std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  std::string result = text;
  result.erase(result.find_last_not_of('0') + 1);
  if (result.ends_with('.')) result.pop_back();
  return result == "-0" ? "0" : result;
}

std::string tag(
    std::string_view name,
    std::initializer_list<std::pair<const char*, std::string>> attributes,
    std::string_view content = "") {
  std::string text = "<" + std::string(name);
  for (const auto& [key, value] : attributes)
    if (!value.empty())
      text += std::string(" ") + key + "=\"" + escaped(value) + "\"";
  return content.empty()
             ? text + "/>\n"
             : text + ">" + escaped(content) + "</" + std::string(name) + ">\n";
}

class SvgCanvas : public Canvas {
 public:
  void write(Point at, const std::string& text,
             const Lettering& style) override {
    std::string classes = style.tone == Tone::kDim       ? "dim "
                          : style.tone == Tone::kWarning ? "warning "
                                                         : "";
    if (style.bold) classes += "bold ";
    if (style.anchor == Anchor::kMiddle) classes += "middle ";
    if (style.anchor == Anchor::kEnd) classes += "end ";
    if (!classes.empty()) classes.pop_back();
    const std::string place = number(at.x) + " " + number(at.y);
    body_ += tag(
        "text",
        {{"x", style.angle == 0 ? number(at.x) : ""},
         {"y", style.angle == 0 ? number(at.y) : ""},
         {"transform", style.angle == 0 ? ""
                                        : "translate(" + place + ") rotate(" +
                                              number(-style.angle) + ")"},
         {"class", classes},
         {"style",
          style.size == 12 ? "" : "font-size:" + number(style.size) + "px"}},
        text);
  }

  void write_on(Point centre, const std::string& text, Rgb colour) override {
    body_ += tag("text",
                 {{"x", number(centre.x)},
                  {"y", number(centre.y + 4)},
                  {"class", is_light(colour) ? "w" : "b"}},
                 text);
  }

  void draw_map(const Box& box, const HeatMap& map,
                const ColourScale& scale) override {
    // Runs of one colour, as strokes as thick as a row of cells.
    std::array<std::string, kLevels + 1> paths;
    const double cell_width = box.width / map.columns,
                 cell_height = box.height / map.rows;
    for (int row = 0; row < map.rows; ++row)
      for (int begin = 0, end; begin < map.columns; begin = end) {
        const int level = level_of(map, scale, row, begin);
        for (end = begin + 1;
             end < map.columns && level_of(map, scale, row, end) == level;)
          ++end;
        if (level >= 0)
          paths[level] += "M" + std::to_string(begin) + " " +
                          std::to_string(row) + "h" +
                          std::to_string(end - begin);
      }
    body_ += "<g transform=\"translate(" + number(box.x) + " " +
             number(box.y + cell_height / 2) + ") scale(" + factor(cell_width) +
             " " + factor(cell_height) +
             ")\" fill=\"none\" shape-rendering=\"crispEdges\">\n";
    for (int level = 0; level <= kLevels; ++level)
      if (!paths[level].empty())
        body_ += tag("path", {{"stroke", hex(colour_of(level, scale))},
                              {"d", paths[level]}});
    body_ += "</g>\n";
    const std::string hatched = blocked_cells(box, map);
    if (!hatched.empty())
      body_ += tag("path", {{"fill", "url(#blocked)"}, {"d", hatched}});
  }

  void draw_line(Point from, Point to, Tone) override {
    body_ += tag("path", {{"class", "line"},
                          {"d", "M" + number(from.x) + " " + number(from.y) +
                                    "L" + number(to.x) + " " + number(to.y)}});
  }

  void draw_frame(const Box& box) override {
    body_ += tag("rect", {{"class", "surface"},
                          {"x", number(box.x)},
                          {"y", number(box.y)},
                          {"width", number(box.width)},
                          {"height", number(box.height)},
                          {"rx", "2"}});
  }

  void hatch(const Box& box) override {
    body_ += tag("path", {{"fill", "url(#blocked)"}, {"d", rectangle(box)}});
  }

  const std::string& body() const { return body_; }

 private:
  // Which of the colours; the last is that of numbers that are not finite, -1
  // that of the page: a blocked cell without weight.
  static int level_of(const HeatMap& map, const ColourScale& scale, int row,
                      int column) {
    const double value = map.at(row, column);
    if (map.is_blocked(row, column) && value == 0) return -1;
    if (!std::isfinite(value)) return kLevels;
    const double share = std::clamp(scale.share(value), -1.0, 1.0);
    const double t = scale.is_signed() ? (share + 1) / 2 : std::max(share, 0.0);
    return static_cast<int>(std::lround(t * (kLevels - 1)));
  }

  static Rgb colour_of(int level, const ColourScale& scale) {
    if (level == kLevels) return kNotFinite;
    const double t = static_cast<double>(level) / (kLevels - 1);
    return scale.is_signed() ? diverging(2 * t - 1) : sequential(t);
  }

  // By runs of cells in a row.
  static std::string blocked_cells(const Box& box, const HeatMap& map) {
    std::string path;
    const double width = box.width / map.columns,
                 height = box.height / map.rows;
    for (int row = 0; row < map.rows; ++row)
      for (int begin = 0, end; begin < map.columns; begin = end) {
        end = begin + 1;
        if (!map.is_blocked(row, begin)) continue;
        while (end < map.columns && map.is_blocked(row, end)) ++end;
        path += rectangle({box.x + begin * width, box.y + row * height,
                           (end - begin) * width, height});
      }
    return path;
  }

  static std::string rectangle(const Box& box) {
    return "M" + number(box.x) + " " + number(box.y) + "h" + number(box.width) +
           "v" + number(box.height) + "h-" + number(box.width) + "z";
  }

  static std::string factor(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", value);
    return text;
  }

  std::string body_;
};

}  // namespace

std::string to_svg(const Picture& picture) {
  const Drawing drawing(picture);
  SvgCanvas canvas;
  drawing.draw(canvas);
  const std::string width = number(std::ceil(drawing.width())),
                    height = number(std::ceil(drawing.height()));
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + width +
         "\" height=\"" + height + "\" viewBox=\"0 0 " + width + " " + height +
         "\" role=\"img\">\n" + tag("title", {}, picture.title) + kStyle +
         "<rect class=\"page\" width=\"100%\" height=\"100%\"/>\n" +
         canvas.body() + "</svg>\n";
}

}  // namespace cli
