// SPDX-License-Identifier: MIT
#include "cli/terminal/png.h"

#include <dlfcn.h>

#include <cmath>
#include <memory>
#include <stdexcept>

namespace cli {
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

}  // namespace cli
