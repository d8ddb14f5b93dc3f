// SPDX-License-Identifier: MIT
#include "multihead/text/width.h"

#include <locale.h>
#include <wchar.h>
#include <wctype.h>

#include "multihead/text/printable.h"

namespace multihead {
namespace {

constexpr char32_t kJoiner = 0x200D, kAsEmoji = 0xFE0F, kSymbols = 0x2190;

bool is_regional(char32_t c) { return c >= 0x1F1E6 && c <= 0x1F1FF; }

// Skin tones; by themselves they are wide.
bool modifies_emoji(char32_t c) { return c >= 0x1F3FB && c <= 0x1F3FF; }

// The C library's tables of Unicode, whatever the locale of the process.
class Unicode {
 public:
  Unicode() : before_(uselocale(locale())) {}
  ~Unicode() { uselocale(before_); }
  Unicode(const Unicode&) = delete;
  Unicode& operator=(const Unicode&) = delete;

  int width(char32_t c) const {
    if (c < 0x7F || locale() == locale_t{}) return 1;
    const int columns = wcwidth(static_cast<wchar_t>(c));
    return columns < 0 ? 1 : columns;
  }
  // Marks that have a column of their own included.
  bool combines(char32_t c) const {
    return c >= 0x7F && iswctype(static_cast<wint_t>(c), wctype("combining"));
  }

 private:
  static locale_t locale() {
    static const locale_t kUtf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
    return kUtf8;
  }
  locale_t before_;
};

}  // namespace

std::vector<Cluster> clusters(std::string_view text) {
  const Unicode unicode;
  std::vector<Cluster> found;
  char32_t last = 0;
  bool half_a_flag = false;
  while (!text.empty()) {
    const char32_t c = take_code_point(text);
    const int width = unicode.width(c);
    // An emoji that is joined to another, or its skin tone, changes that one.
    // Two letters of a flag are one wide sign. Below the symbols, joiners shape
    // letters.
    const bool changes =
                   (last == kJoiner && c >= kSymbols) || modifies_emoji(c),
               ends_flag = half_a_flag && is_regional(c);
    if (found.empty() ||
        !(changes || ends_flag || width == 0 || unicode.combines(c)))
      found.push_back({"", width});
    else if (c == kAsEmoji || ends_flag)
      found.back().columns = 2;
    else if (!changes)
      found.back().columns += width;
    found.back().text += to_utf8(c);
    half_a_flag = is_regional(c) && !ends_flag;
    last = c;
  }
  return found;
}

int columns(std::string_view text) {
  int sum = 0;
  for (const Cluster& cluster : clusters(text)) sum += cluster.columns;
  return sum;
}

}  // namespace multihead
