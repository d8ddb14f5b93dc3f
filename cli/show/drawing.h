// SPDX-License-Identifier: MIT
//
// Where everything of a picture goes: one large map with its labels, the heads
// beside it, what colours mean, the stages with their shapes, the groups.
#pragma once

#include <vector>

#include "cli/show/canvas.h"
#include "cli/show/picture.h"

namespace cli {

class Drawing {
 public:
  explicit Drawing(const Picture& picture);

  double width() const { return width_; }
  double height() const { return height_; }
  void draw(Canvas& canvas) const;

 private:
  void place_heads();
  void draw_large(Canvas& canvas) const;
  void draw_heads(Canvas& canvas) const;
  void draw_legend(Canvas& canvas) const;
  void draw_stages(Canvas& canvas) const;
  void draw_groups(Canvas& canvas) const;
  void draw_notes(Canvas& canvas) const;
  std::vector<std::string> notes() const;

  const Picture& picture_;
  const Item& item_;
  ColourScale scale_;
  Axis keys_, queries_;              // of the large map
  Axis small_keys_, small_queries_;  // of the heads'
  Box large_;
  Point heads_;
  double small_ = 0, small_step_ = 0;
  int per_row_ = 0;
  double legend_ = 0, stages_ = 0, groups_ = 0, notes_ = 0;  // their tops
  double width_ = 0, height_ = 0;
};

}  // namespace cli
