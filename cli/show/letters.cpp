// SPDX-License-Identifier: MIT
#include "cli/show/letters.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>

#include "cli/terminal/bidi.h"
#include "cli/terminal/width.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define STBTT_STATIC
#define STB_TRUETYPE_IMPLEMENTATION
#include <stb/stb_easy_font.h>
#include <stb/stb_truetype.h>
#pragma GCC diagnostic pop

namespace cli {
namespace {

constexpr const char* kFolders[] = {"/usr/share/fonts",
                                    "/usr/local/share/fonts", "/Library/Fonts",
                                    "/System/Library/Fonts"};
constexpr const char* kNames[] = {"DejaVuSans.ttf",
                                  "NotoSans-Regular.ttf",
                                  "LiberationSans-Regular.ttf",
                                  "Arial.ttf",
                                  "NotoSansArabic-Regular.ttf",
                                  "NotoSansHebrew-Regular.ttf",
                                  "NotoSansDevanagari-Regular.ttf",
                                  "NotoSansCJK-Regular.ttc",
                                  "wqy-microhei.ttc",
                                  "DroidSansFallbackFull.ttf",
                                  "NotoSansSymbols2-Regular.ttf"};

// The info points into the bytes, which a vector's growth must not move.
struct Font {
  std::unique_ptr<std::string> bytes;
  stbtt_fontinfo info;
};

std::vector<Font> find_fonts() {
  namespace fs = std::filesystem;
  std::vector<fs::path> found;
  for (const char* folder : kFolders) {
    std::error_code none;
    for (const auto& entry : fs::recursive_directory_iterator(
             folder, fs::directory_options::skip_permission_denied, none))
      if (std::ranges::find(kNames, entry.path().filename()) !=
          std::end(kNames))
        found.push_back(entry.path());
  }
  const auto rank = [](const fs::path& path) {
    return std::ranges::find(kNames, path.filename()) - kNames;
  };
  std::ranges::sort(found, {}, rank);
  std::vector<Font> fonts;
  for (const fs::path& path : found) {
    std::ifstream file(path, std::ios::binary);
    auto bytes = std::make_unique<std::string>(
        std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    const auto* data = reinterpret_cast<const unsigned char*>(bytes->data());
    const int offset =
        bytes->size() > 12 ? stbtt_GetFontOffsetForIndex(data, 0) : -1;
    stbtt_fontinfo info;
    if (offset >= 0 && stbtt_InitFont(&info, data, offset))
      fonts.push_back({std::move(bytes), info});
  }
  return fonts;
}

const std::vector<Font>& fonts() {
  static const std::vector<Font> found = find_fonts();
  return found;
}

struct Glyph {
  const stbtt_fontinfo* font;
  int index;
  float scale;
};

Glyph glyph_of(char32_t letter, double size) {
  const auto scaled = [&](const Font& font, int index) {
    return Glyph{
        &font.info, index,
        stbtt_ScaleForMappingEmToPixels(&font.info, static_cast<float>(size))};
  };
  for (const Font& font : fonts())
    if (const int index =
            stbtt_FindGlyphIndex(&font.info, static_cast<int>(letter)))
      return scaled(font, index);
  return scaled(fonts()[0], 0);
}

Ink by_font(const std::string& text, double size) {
  const std::u32string letters = visual_order(text);
  double width = 0;
  std::vector<double> places;
  for (const char32_t letter : letters) {
    const Glyph glyph = glyph_of(letter, size);
    int advance = 0, bearing = 0;
    stbtt_GetGlyphHMetrics(glyph.font, glyph.index, &advance, &bearing);
    places.push_back(width);
    width += advance * glyph.scale;
  }
  Ink ink{.width = static_cast<int>(std::ceil(width)) + 4,
          .height = static_cast<int>(std::ceil(1.6 * size)),
          .baseline = static_cast<int>(std::ceil(1.15 * size))};
  ink.coverage.resize(static_cast<size_t>(ink.width) * ink.height);
  for (size_t i = 0; i < letters.size(); ++i) {
    const Glyph glyph = glyph_of(letters[i], size);
    const double whole = std::floor(places[i]);
    int x = 0, y = 0, w = 0, h = 0;
    unsigned char* bitmap = stbtt_GetGlyphBitmapSubpixel(
        glyph.font, glyph.scale, glyph.scale,
        static_cast<float>(places[i] - whole), 0, glyph.index, &w, &h, &x, &y);
    for (int row = 0; row < h; ++row)
      for (int column = 0; column < w; ++column) {
        const int to_x = static_cast<int>(whole) + x + column + 1,
                  to_y = ink.baseline + y + row;
        if (to_x < 0 || to_x >= ink.width || to_y < 0 || to_y >= ink.height)
          continue;
        uint8_t& at =
            ink.coverage[static_cast<size_t>(to_y) * ink.width + to_x];
        at = std::max(at, bitmap[row * w + column]);
      }
    stbtt_FreeBitmap(bitmap, nullptr);
  }
  return ink;
}

// stb_easy_font: rectangles on a grid 12 units high.
Ink by_rectangles(const std::string& text, double size) {
  std::string ascii;
  for (const char32_t letter : code_points(text))
    ascii += letter < 0x80 ? static_cast<char>(letter) : '?';
  struct Corner {
    float x, y, z;
    uint32_t colour;
  };
  std::vector<Corner> corners(ascii.size() * 70 + 4);
  const int count =
      stb_easy_font_print(0, 0, ascii.data(), nullptr, corners.data(),
                          static_cast<int>(corners.size() * sizeof(Corner)));
  const double unit = size / 10;
  Ink ink{.width = static_cast<int>(
                       std::ceil(stb_easy_font_width(ascii.data()) * unit)) +
                   2,
          .height = static_cast<int>(std::ceil(13 * unit)),
          .baseline = static_cast<int>(std::ceil(8 * unit))};
  ink.coverage.resize(static_cast<size_t>(ink.width) * ink.height);
  const auto pixel = [&](float at, int most) {
    return std::clamp(static_cast<int>(std::lround(at * unit)), 0, most);
  };
  for (int quad = 0; quad < count; ++quad) {
    const Corner &first = corners[4 * quad], &third = corners[4 * quad + 2];
    for (int y = pixel(first.y, ink.height); y < pixel(third.y, ink.height);
         ++y)
      for (int x = pixel(first.x, ink.width); x < pixel(third.x, ink.width);
           ++x)
        ink.coverage[static_cast<size_t>(y) * ink.width + x] = 255;
  }
  return ink;
}

}  // namespace

Ink set_in_ink(const std::string& text, double size, bool bold) {
  Ink ink = fonts().empty() ? by_rectangles(text, size) : by_font(text, size);
  if (bold)
    for (size_t i = ink.coverage.size() - 1; i > 0; --i)
      ink.coverage[i] = std::max(ink.coverage[i], ink.coverage[i - 1]);
  return ink;
}

}  // namespace cli
