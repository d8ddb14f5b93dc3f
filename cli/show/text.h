// SPDX-License-Identifier: MIT
//
// A picture in characters.
#pragma once

#include <string>

#include "pictures/picture.h"

namespace cli {

using namespace multihead::pictures;

/// For the terminal, in lines of at most `width` columns.
enum class Colours { kNone, k256, kTrue };
struct Screen {
  int width = 80;
  Colours colours = Colours::kNone;
  bool utf8 = true;
};
std::string to_text(const Picture& picture, const Screen& screen);

}  // namespace cli
