// SPDX-License-Identifier: MIT
#pragma once

namespace multihead::diagnosis {

/// A step of a recipe that these shapes do not allow.
struct Impossible {};

inline void need(bool condition) {
  if (!condition) throw Impossible();
}

}  // namespace multihead::diagnosis
