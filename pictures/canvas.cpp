// SPDX-License-Identifier: MIT
#include "pictures/canvas.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>

#include "multihead/text/escaped.h"
#include "multihead/text/width.h"
#include "multihead/text/words.h"

namespace multihead::pictures {
namespace {

constexpr const char* kStyle = R"(<style>
  .page { fill: #ffffff } .surface { fill: #f6f8fa; stroke: #8c959f }
  text { fill: #1f2328; font-family: system-ui, sans-serif; font-size: 12px;
    direction: ltr }
  .dim { fill: #656d76 } .warning { fill: #9a6700 } .bold { font-weight: 600 }
  .line { stroke: #8c959f } .grid { stroke: #d0d7de } .one { stroke: #656d76 }
  .ours { fill: #1f6feb } .slower { fill: #cf222e } .theirs { fill: #afb8c1 }
  .middle { text-anchor: middle } .end { text-anchor: end }
  .w, .b { text-anchor: middle; font-size: 11px }
  .w { fill: #ffffff } .b { fill: #000000 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .surface { fill: #161b22; stroke: #6e7681 }
    text { fill: #e6edf3 } .dim { fill: #8d96a0 } .warning { fill: #d29922 }
    .line { stroke: #6e7681 } .grid { stroke: #30363d } .one { stroke: #8d96a0 }
    .ours { fill: #4493f8 } .slower { fill: #f85149 } .theirs { fill: #484f58 }
    .w { fill: #ffffff } .b { fill: #000000 }
  }
</style>
<defs><pattern id="blocked" width="6" height="6" patternUnits="userSpaceOnUse">
<path class="line" d="M-1 1l2-2M0 6l6-6M5 7l2-2"/></pattern></defs>
)";

std::string opening(std::string_view name, const Svg::Attributes& attributes) {
  std::string text = "<" + std::string(name);
  for (const auto& [key, value] : attributes)
    if (!value.empty())
      text += std::string(" ") + key + "=\"" + escaped(value) + "\"";
  return text;
}

}  // namespace

double text_width(const std::string& text, double size) {
  constexpr std::string_view kWide = "MW@%mw",
                             kNarrow = "ijlftrI|'.,:;!()[]-/ ";
  double sum = 0;
  for (const auto& [letter, wide] : clusters(text)) {
    sum += wide != 1                              ? 0.55 * wide
           : letter.size() > 1                    ? 0.8
           : kWide.find(letter) != kWide.npos     ? 0.98
           : kNarrow.find(letter) != kNarrow.npos ? 0.42
           : letter[0] >= 'A' && letter[0] <= 'Z' ? 0.76
                                                  : 0.65;
  }
  return sum * size;
}

std::string svg_number(double value) {
  std::string text = format("%.2f", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.ends_with('.')) text.pop_back();
  return text == "-0" ? "0" : text;
}

void Svg::element(std::string_view name, const Attributes& attributes,
                  std::string_view content) {
  body_ += opening(name, attributes);
  body_ += content.empty()
               ? "/>\n"
               : ">" + escaped(content) + "</" + std::string(name) + ">\n";
}

void Svg::write(Point at, const std::string& text, const Lettering& style) {
  std::string classes = style.tone;
  const auto add = [&](bool wanted, const char* name) {
    if (wanted) classes += (classes.empty() ? "" : " ") + std::string(name);
  };
  add(style.bold, "bold");
  add(style.anchor == Anchor::kMiddle, "middle");
  add(style.anchor == Anchor::kEnd, "end");
  const std::string x = svg_number(at.x), y = svg_number(at.y);
  Attributes place = {{"x", x}, {"y", y}};
  if (style.angle != 0)
    place = {{"transform", "translate(" + x + " " + y + ") rotate(" +
                               svg_number(-style.angle) + ")"}};
  place.emplace_back("class", classes);
  if (style.size != 12)
    place.emplace_back("style", "font-size:" + svg_number(style.size) + "px");
  element("text", place, text);
}

void Svg::line(Point from, Point to, const char* classes) {
  path({{"class", classes},
        {"d", "M" + svg_number(from.x) + " " + svg_number(from.y) + "L" +
                  svg_number(to.x) + " " + svg_number(to.y)}});
}

void Svg::rectangle(const Box& box, const char* classes) {
  const bool outlined = classes == std::string_view("surface");
  element("rect", {{"class", classes},
                   {"x", svg_number(box.x)},
                   {"y", svg_number(box.y)},
                   {"width", svg_number(box.width)},
                   {"height", svg_number(box.height)},
                   {"rx", outlined ? "2" : ""}});
}

void Svg::hatch(std::span<const Box> boxes) {
  std::string outline;
  for (const Box& box : boxes) {
    const std::string width = svg_number(box.width);
    outline += "M" + svg_number(box.x) + " " + svg_number(box.y) + "h" + width +
               "v" + svg_number(box.height) + "h-" + width + "z";
  }
  if (!outline.empty()) path({{"fill", "url(#blocked)"}, {"d", outline}});
}

void Svg::path(const Attributes& attributes) { element("path", attributes); }

void Svg::begin_group(const Attributes& attributes) {
  body_ += opening("g", attributes) + ">\n";
}

void Svg::end_group() { body_ += "</g>\n"; }

std::string Svg::page(double width, double height,
                      const std::string& title) const {
  const std::string w = svg_number(std::ceil(width)),
                    h = svg_number(std::ceil(height));
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + w +
         "\" height=\"" + h + "\" viewBox=\"0 0 " + w + " " + h +
         "\" role=\"img\">\n<title>" + escaped(title) + "</title>\n" + kStyle +
         "<rect class=\"page\" width=\"100%\" height=\"100%\"/>\n" + body_ +
         "</svg>\n";
}

// --- PNG ---------------------------------------------------------------------

namespace {

constexpr const char* kLibrary = "librsvg-2.so.2";
constexpr double kDensity = 2;
constexpr int kRgb24 = 1;  // CAIRO_FORMAT_RGB24

// As in <librsvg/rsvg.h> and <fontconfig/fontconfig.h>.
struct Rectangle {
  double x, y, width, height;
};
struct FontSet {
  int count;  // and more, which is not looked at
};

// The functions of librsvg, and of what it is made of: cairo, GObject and
// fontconfig, which come with it.
class Renderer {
 public:
  Renderer() : library_(dlopen(kLibrary, RTLD_NOW)) {
    if (!library_) {
      why_ = dlerror();
      return;
    }
    load(open, "rsvg_handle_new_from_data");
    load(size, "rsvg_handle_get_intrinsic_size_in_pixels");
    load(render, "rsvg_handle_render_document");
    load(unref, "g_object_unref");
    load(surface, "cairo_image_surface_create");
    load(context, "cairo_create");
    load(destroy_context, "cairo_destroy");
    load(destroy_surface, "cairo_surface_destroy");
    load(encode, "cairo_surface_write_to_png_stream");
    load(fonts, "FcConfigGetFonts");
  }

  const std::string& why_not() const { return why_; }

  void* (*open)(const void* data, size_t size, void** error);
  int (*size)(void* svg, double* width, double* height);
  int (*render)(void* svg, void* context, const Rectangle* to, void** error);
  void (*unref)(void* object);
  void* (*surface)(int format, int width, int height);
  void* (*context)(void* surface);
  void (*destroy_context)(void* context);
  void (*destroy_surface)(void* surface);
  int (*encode)(void* surface, int (*write)(void*, const void*, unsigned),
                void* to);
  FontSet* (*fonts)(void* configuration, int set);

 private:
  template <typename F>
  void load(F*& function, const char* name) {
    function = reinterpret_cast<F*>(dlsym(library_, name));
    if (!function) why_.assign(kLibrary).append(" without ").append(name);
  }

  void* library_;  // never closed: GObject's types stay registered
  std::string why_;
};

const Renderer& renderer() {
  static const Renderer kRenderer;
  return kRenderer;
}

}  // namespace

void require_png(const std::string& option) {
  const Renderer& r = renderer();
  if (!r.why_not().empty())
    throw std::runtime_error(
        option + " must have librsvg 2.52 to draw with, got " + r.why_not() +
        " (Debian: librsvg2-2); --svg needs nothing");
  const FontSet* fonts = r.fonts(/*current=*/nullptr, /*FcSetSystem=*/0);
  if (!fonts || fonts->count == 0)
    throw std::runtime_error(
        option +
        " must have a font to write with, got none (Debian: "
        "fonts-dejavu-core); --svg needs nothing");
}

std::string png_of(const std::string& svg) {
  using Handle = std::unique_ptr<void, void (*)(void*)>;
  const Renderer& r = renderer();
  const Handle document(r.open(svg.data(), svg.size(), nullptr), r.unref);
  double width = 0, height = 0;
  if (!document || !r.size(document.get(), &width, &height))
    throw std::runtime_error("png: librsvg cannot read the picture");
  width = std::ceil(width * kDensity);
  height = std::ceil(height * kDensity);
  const Handle surface(
      r.surface(kRgb24, static_cast<int>(width), static_cast<int>(height)),
      r.destroy_surface);
  const Handle context(r.context(surface.get()), r.destroy_context);
  const Rectangle page{0, 0, width, height};
  std::string bytes;
  const auto append = [](void* to, const void* data, unsigned size) {
    static_cast<std::string*>(to)->append(static_cast<const char*>(data), size);
    return 0;
  };
  if (!r.render(document.get(), context.get(), &page, nullptr) ||
      r.encode(surface.get(), append, &bytes) != 0)
    throw std::runtime_error(
        "png: a picture of " + std::to_string(std::lround(width)) + " x " +
        std::to_string(std::lround(height)) + " pixels cannot be drawn");
  return bytes;
}

}  // namespace multihead::pictures
