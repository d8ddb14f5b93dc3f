// SPDX-License-Identifier: MIT
// A picture as SVG: one large map with its labels, the heads beside it, what
// colours mean, the stages with their shapes, the groups.

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "multihead/text/width.h"
#include "multihead/text/words.h"
#include "pictures/canvas.h"
#include "pictures/drawing.h"
#include "pictures/picture.h"

namespace multihead::pictures {
namespace {

constexpr double kMargin = 28, kGap = 18;
constexpr int kLongestLabel = 14;  // columns
constexpr double kWidestLabel = 104;
constexpr double kSide = 416;             // of the large map, at most
constexpr double kName = 11, kKeys = 10;  // sizes of a head's two captions
constexpr double kShape = 9;              // and of what a stage says
constexpr double kTitle = 76;             // where the maps' labels begin
constexpr double kStage = 96;             // height of the strip of stages
constexpr size_t kMostNotes = 6;

std::string label_of(const Axis& axis, int cell) {
  return fitted(axis.label(cell), kLongestLabel, kWidestLabel);
}

double label_width(const Axis& axis) {
  double widest = 0;
  for (int i = 0; i < axis.cells(); ++i)
    widest = std::max(widest, text_width(label_of(axis, i), 12));
  return widest;
}

// Every how many cells a label has room; slanted ones need more.
int label_step(const Axis& axis, double cell, double room) {
  const double wanted = axis.pooled() ? 2 * room : room;
  return std::max(1, static_cast<int>(std::ceil(wanted / cell)));
}

class Drawing {
 public:
  explicit Drawing(const Picture& picture)
      : picture_(picture),
        item_(picture.items[0]),
        scale_(scale_of(picture, item_)),
        keys_(coarser(item_.keys, most_cells(kSide, 4))),
        queries_(matching(item_.queries, keys_, most_cells(kSide, 4))) {
    const int longest = std::max(keys_.cells(), queries_.cells());
    const double cell = std::clamp(std::floor(kSide / longest), 4.0, 34.0);
    const double above = label_width(keys_) * 0.75 + 46;
    large_ = {kMargin + label_width(queries_) + 8, kTitle + above,
              cell * keys_.cells(), cell * queries_.cells()};
    // The last slanted label leans over the right end of the map.
    const double overhang = label_width(keys_) * 0.75 + 12;
    heads_ = {large_.x + std::max(large_.width + overhang, 240.0), kTitle + 12};
    width_ = heads_.x;
    double bottom = large_.y + large_.height;
    if (item_.panels.size() > 1) {
      place_heads();
      const auto heads = static_cast<int>(item_.panels.size()) - 1;
      const int rows = (heads + per_row_ - 1) / per_row_;
      const double height =
          small_ * small_queries_.cells() / std::max(small_keys_.cells(), 1);
      width_ = heads_.x + per_row_ * small_step_ - kGap + kMargin;
      bottom = std::max(bottom, heads_.y + rows * (height + 34) - 8);
    }
    double stage = 0;
    for (const Stage& each : picture.stages)
      stage = std::max(stage, text_width(shape_text(each.shape), kShape) + 8);
    const auto stages = static_cast<double>(picture.stages.size());
    width_ = std::max({width_, 720.0, 2 * kMargin + stages * stage});
    legend_ = bottom + 26;
    stages_ = legend_ + 44;
    groups_ = stages_ + (picture.stages.size() > 1 ? kStage + 14 : 0);
    notes_ = groups_ + (picture.num_kv_heads < picture.num_heads ? 74 : 0);
    height_ = notes_ + 18 * static_cast<double>(notes().size()) + 12;
  }

  std::string page() const {
    Svg canvas;
    const double room = width_ - 2 * kMargin;
    canvas.write({kMargin, 38}, fitted(picture_.title, 400, room, 18),
                 {.size = 18, .bold = true});
    canvas.write({kMargin, 58}, subtitle(picture_, item_), {.tone = "dim"});
    draw_large(canvas);
    if (item_.panels.size() > 1) draw_heads(canvas);
    draw_legend(canvas);
    if (picture_.stages.size() > 1) draw_stages(canvas);
    if (picture_.num_kv_heads < picture_.num_heads) draw_groups(canvas);
    draw_notes(canvas);
    return canvas.page(width_, height_, picture_.title);
  }

 private:
  // So many beside each other that all are about as high as the large map.
  void place_heads() {
    const auto heads = static_cast<int>(item_.panels.size()) - 1;
    const double aspect = static_cast<double>(queries_.cells()) / keys_.cells();
    const double room = std::max(large_.y + large_.height - heads_.y, 240.0);
    for (per_row_ = 1; per_row_ < 8 && per_row_ < heads; ++per_row_) {
      const int rows = (heads + per_row_ - 1) / per_row_;
      if (rows * (108 * aspect + 34) <= room) break;
    }
    const int rows = (heads + per_row_ - 1) / per_row_;
    small_ =
        std::clamp(std::floor((room / rows - 34 + 8) / aspect), 64.0, 160.0);
    small_keys_ = coarser(keys_, most_cells(small_, 3));
    small_queries_ = matching(queries_, small_keys_, most_cells(small_, 1));
    double captions = 0;
    for (size_t i = 1; i < item_.panels.size(); ++i)
      captions =
          std::max(captions, text_width(item_.panels[i].name, kName) + 10 +
                                 text_width(keys_text(item_.panels[i]), kKeys));
    small_step_ = std::max(small_, captions) + kGap;
  }

  void draw_large(Svg& canvas) const {
    const Panel& panel = item_.panels[0];
    const HeatMap map =
        pool(panel.map, {item_.queries, queries_}, {item_.keys, keys_});
    canvas.write({large_.x, heads_.y + 12}, panel.name, {.size = kName});
    if (const std::string keys = keys_text(panel); !keys.empty())
      canvas.write(
          {large_.x + text_width(panel.name, kName) + 10, heads_.y + 12}, keys,
          {.size = kKeys, .tone = "dim"});
    draw_map(canvas, large_, map, scale_);
    const double cell = large_.width / keys_.cells();
    const int key_step = label_step(keys_, cell, 17);
    for (int i = 0; i < keys_.cells(); i += key_step)
      canvas.write({large_.x + (i + 0.5) * cell + 4, large_.y - 8},
                   label_of(keys_, i), {.angle = 45});
    const int query_step = label_step(queries_, cell, 13);
    for (int i = 0; i < queries_.cells(); i += query_step)
      canvas.write({large_.x - 8, large_.y + (i + 0.5) * cell + 4},
                   label_of(queries_, i), {.anchor = Anchor::kEnd});
    if (cell < 24) return;
    for (int row = 0; row < map.rows; ++row)
      for (int column = 0; column < map.columns; ++column) {
        const double percent = 100 * map.at(row, column);
        if (!(std::abs(percent) >= 0.5 && std::abs(percent) < 999)) continue;
        const bool light = is_light(scale_(map.at(row, column)));
        canvas.write({large_.x + (column + 0.5) * cell,
                      large_.y + (row + 0.5) * cell + 4},
                     format("%.0f", percent), {.tone = light ? "b" : "w"});
      }
  }

  void draw_heads(Svg& canvas) const {
    const double height = small_ * small_queries_.cells() / small_keys_.cells();
    for (size_t i = 1; i < item_.panels.size(); ++i) {
      const Panel& panel = item_.panels[i];
      const auto place = static_cast<int>(i) - 1;
      const double x = heads_.x + (place % per_row_) * small_step_,
                   y = heads_.y + (place / per_row_) * (height + 34);
      canvas.write({x, y + 12}, panel.name, {.size = kName});
      const std::string keys = keys_text(panel);
      if (!keys.empty())
        canvas.write({x + small_step_ - kGap, y + 12}, keys,
                     {.size = kKeys, .tone = "dim", .anchor = Anchor::kEnd});
      draw_map(canvas, {x, y + 18, small_, height},
               pool(panel.map, {item_.queries, small_queries_},
                    {item_.keys, small_keys_}),
               scale_);
    }
  }

  void draw_legend(Svg& canvas) const {
    draw_scale(canvas, {large_.x, legend_}, scale_, scale_name(picture_),
               has_blocked_cells(item_));
  }

  // A film: what each stage yields, its heads as pages behind each other.
  void draw_stages(Svg& canvas) const {
    const auto count = static_cast<double>(picture_.stages.size());
    const double step = (width_ - 2 * kMargin) / count;
    const auto length = [](int64_t size) {
      return 5 + 5 * std::log2(1 + static_cast<double>(size));
    };
    double x = kMargin;
    for (const Stage& stage : picture_.stages) {
      const std::vector<int64_t>& shape = stage.shape;
      const double width = std::min(length(shape.back()), step * 0.5);
      const double height = std::min(length(shape[shape.size() - 2]), 44.0);
      const int64_t pages =
          shape.size() > 3 ? std::min<int64_t>(shape[1], 5) : 1;
      for (int64_t page = pages; page-- > 0;)
        canvas.rectangle(
            {x + 4.0 * page, stages_ + 46 - height - 3.0 * page, width, height},
            "surface");
      canvas.write({x, stages_ + 62}, stage.name, {.size = 11, .bold = true});
      canvas.write({x, stages_ + 75}, shape_text(shape),
                   {.size = kShape, .tone = "dim"});
      canvas.write({x, stages_ + 87}, fitted(stage.what, 40, step - 6, kShape),
                   {.size = kShape, .tone = "dim"});
      const double next = x + step - 8, end = x + width + 4.0 * (pages - 1) + 8;
      if (&stage != &picture_.stages.back() && next > end)
        canvas.line({end, stages_ + 34}, {next, stages_ + 34});
      x += step;
    }
  }

  // Query heads above the key/value head that they share.
  void draw_groups(Svg& canvas) const {
    const int64_t heads = picture_.num_heads, groups = picture_.num_kv_heads;
    const double label = 112;
    const double step = std::min(
        30.0, (width_ - 2 * kMargin - label) / static_cast<double>(heads));
    const auto centre = [&](double head) {
      return kMargin + label + (head + 0.5) * step;
    };
    const auto name = [&](double at, double y, int64_t number) {
      if (step >= 14)
        canvas.write({centre(at), y}, std::to_string(number),
                     {.size = 10, .anchor = Anchor::kMiddle});
    };
    canvas.write({kMargin, groups_ + 15}, "query heads", {.size = 11});
    canvas.write({kMargin, groups_ + 55}, "key/value heads", {.size = 11});
    const double each = static_cast<double>(heads / groups);
    for (int64_t head = 0; head < heads; ++head) {
      const double middle =
          std::floor(static_cast<double>(head) / each) * each + (each - 1) / 2;
      canvas.line({centre(static_cast<double>(head)), groups_ + 21},
                  {centre(middle), groups_ + 41});
      canvas.rectangle({centre(static_cast<double>(head)) - step * 0.42,
                        groups_ + 2, step * 0.84, 19},
                       "surface");
      name(static_cast<double>(head), groups_ + 15, head);
    }
    for (int64_t group = 0; group < groups; ++group) {
      const double middle = static_cast<double>(group) * each + (each - 1) / 2;
      canvas.rectangle(
          {centre(middle) - step * 0.42, groups_ + 41, step * 0.84, 19},
          "surface");
      name(middle, groups_ + 55, group);
    }
  }

  // Each with its tone.
  std::vector<std::pair<std::string, const char*>> notes() const {
    std::vector<std::pair<std::string, const char*>> lines;
    for (const std::string& remark : item_.remarks)
      if (lines.size() < kMostNotes) lines.emplace_back(remark, "warning");
    const std::string pooled = pooling(queries_, keys_);
    if (!pooled.empty()) lines.emplace_back(pooled, "dim");
    return lines;
  }

  void draw_notes(Svg& canvas) const {
    double y = notes_ + 8;
    for (const auto& [line, tone] : notes()) {
      canvas.write({kMargin, y}, line, {.tone = tone});
      y += 18;
    }
  }

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

}  // namespace

std::string to_svg(const Album& album) {
  return album.layers.size() == 1 ? Drawing(album.layers[0]).page()
                                  : model_svg(album);
}

}  // namespace multihead::pictures
