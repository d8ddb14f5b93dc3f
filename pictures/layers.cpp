// SPDX-License-Identifier: MIT
//
// All heads of a model, a row for each layer, and its entropies.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "multihead/text/words.h"
#include "pictures/drawing.h"

namespace multihead::pictures {
namespace {

constexpr double kEdge = 28, kBetween = 6;
constexpr double kRoom = 1120;      // for a row of heads
constexpr size_t kMostInLine = 50;  // heads; a layer of more takes several
constexpr double kCaption = 10;     // size of letters of a head
constexpr double kFirstGroup = 92;  // where the first group begins
constexpr size_t kMostRemarks = 12;
constexpr double kGroupTitle = 44;  // its title, and the numbers of heads

// Whether a layer begins a group of its own.
bool begins_group(const Album& album, size_t layer) {
  const std::vector<Picture>& layers = album.layers;
  return layer == 0 || layers[layer].group != layers[layer - 1].group ||
         layers[layer].items[0].panels.size() !=
             layers[layer - 1].items[0].panels.size();
}

// "mean of 12 heads" is "mean", "head 3" is "3".
std::string short_name(const Panel& panel) {
  if (panel.name.starts_with("mean")) return "mean";
  return panel.name.starts_with("head ") ? panel.name.substr(5) : panel.name;
}

class ModelDrawing {
 public:
  explicit ModelDrawing(const Album& album)
      : album_(album), scale_(scale_of(album)) {
    size_t most = 1;
    double name = 0, keys = 0;
    for (const Picture& layer : album.layers) {
      most = std::max(most, layer.items[0].panels.size());
      name = std::max(name, text_width(name_of(layer), 11));
      for (const Panel& panel : layer.items[0].panels)
        keys = std::max({keys, text_width(keys_text(panel), kCaption),
                         text_width(short_name(panel), kCaption)});
    }
    left_ = kEdge + name + 12;
    const size_t lines = (most + kMostInLine - 1) / kMostInLine;
    in_line_ = (most + lines - 1) / lines;
    const auto across = static_cast<double>(in_line_);
    step_ = std::min(kRoom / across, 72.0);
    captioned_ = step_ >= keys + 4;
    numbered_ = step_ >= 26 && lines == 1;
    width_ = std::max(left_ + step_ * across + kEdge, 720.0);
  }

  std::string page() {
    canvas_.write({kEdge, 38},
                  fitted(album_.title, 400, width_ - 2 * kEdge, 18),
                  {.size = 18, .bold = true});
    canvas_.write({kEdge, 58}, sizes(), {.tone = "dim"});
    double y = kFirstGroup;
    bool blocked = false;
    for (size_t i = 0; i < album_.layers.size(); ++i) {
      const Picture& layer = album_.layers[i];
      blocked |= has_blocked_cells(layer.items[0]);
      if (begins_group(album_, i)) y = title_of_group(layer, y + (i ? 14 : 0));
      y = row(layer, y);
    }
    draw_scale(canvas_, {left_, y + 16}, scale_, scale_name(album_.layers[0]),
               blocked);
    y += 62;
    for (const std::string& remark : remarks()) y = note(remark, y);
    return canvas_.page(width_, y + 4, album_.title);
  }

 private:
  static std::string name_of(const Picture& layer) {
    return shortened(layer.name, 28);
  }

  std::string sizes() const {
    const auto size_of = [](const Picture& layer) {
      return subtitle(layer, layer.items[0]);
    };
    const std::string first = size_of(album_.layers[0]);
    const std::string count = plural(std::ssize(album_.layers), "layer");
    const bool alike = std::ranges::all_of(
        album_.layers, [&](const auto& x) { return size_of(x) == first; });
    return alike ? count + " · " + first : count;
  }

  // Each once, with the layers that it is of, unless it is of all.
  std::vector<std::string> remarks() const {
    std::vector<std::string> said, of;
    std::vector<size_t> counts;
    for (const Picture& layer : album_.layers)
      for (const std::string& remark : layer.items[0].remarks) {
        const auto place = std::ranges::find(said, remark) - said.begin();
        if (place == std::ssize(said)) {
          said.push_back(remark);
          of.emplace_back();
          counts.push_back(0);
        }
        of[place] += (counts[place]++ ? ", " : "") + name_of(layer);
      }
    if (said.size() > kMostRemarks) {
      said.resize(kMostRemarks);
      said.emplace_back("the page tells more");
      of.emplace_back();
      counts.push_back(0);
    }
    for (size_t i = 0; i < said.size(); ++i)
      if (counts[i] > 0 && counts[i] < album_.layers.size())
        said[i] = shortened(of[i], 60) + ": " + said[i];
    return said;
  }

  double title_of_group(const Picture& layer, double y) {
    const std::string sizes = subtitle(layer, layer.items[0]);
    std::string title = shortened(layer.group, 60);
    if (title.empty() || this->sizes().ends_with(sizes))
      canvas_.write({kEdge, y + 4}, title, {.size = 12, .bold = true});
    else
      canvas_.write({kEdge, y + 4}, title + ": " + sizes,
                    {.size = 12, .bold = true});
    if (layer.group.empty()) y -= 20;
    if (!numbered_) return y + 14;
    for (size_t i = 0; i < layer.items[0].panels.size(); ++i)
      canvas_.write(
          {middle(i), y + 24}, short_name(layer.items[0].panels[i]),
          {.size = kCaption, .tone = "dim", .anchor = Anchor::kMiddle});
    return y + kGroupTitle - 14;
  }

  double middle(size_t panel) const {
    const auto place = static_cast<double>(panel % in_line_);
    return left_ + step_ * (place + 0.5) - kBetween / 2;
  }

  double row(const Picture& layer, double y) {
    const Item& item = layer.items[0];
    const double side = step_ - kBetween;
    const Axis keys = coarser(item.keys, std::max(most_cells(side, 1.5), 1));
    const Axis queries = matching(item.queries, keys, most_cells(2 * side, 1));
    const double height =
        std::clamp(side * queries.cells() / keys.cells(), 6.0, 2 * side);
    canvas_.write({left_ - 10, y + height / 2 + 4}, name_of(layer),
                  {.size = 11, .anchor = Anchor::kEnd});
    const double line = height + (captioned_ ? 20 : kBetween);
    for (size_t i = 0; i < item.panels.size(); ++i) {
      const Panel& panel = item.panels[i];
      if (i > 0 && i % in_line_ == 0) y += line;
      draw_map(canvas_, {middle(i) - side / 2, y, side, height},
               pool(panel.map, {item.queries, queries}, {item.keys, keys}),
               scale_);
      if (captioned_ && !std::isnan(panel.entropy))
        canvas_.write(
            {middle(i), y + height + 11}, keys_text(panel),
            {.size = kCaption, .tone = "dim", .anchor = Anchor::kMiddle});
    }
    // A layer of several lines keeps some distance from the next.
    return y + line + (item.panels.size() > in_line_ ? 2 * kBetween : 0);
  }

  double note(const std::string& remark, double y) {
    for (const std::string& line : wrapped(remark)) {
      canvas_.write({kEdge, y}, line, {.tone = "warning"});
      y += 17;
    }
    return y;
  }

  // In lines as wide as the picture.
  std::vector<std::string> wrapped(const std::string& text) const {
    std::vector<std::string> lines(1);
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find(' ', begin), text.size());
      const std::string word = text.substr(begin, end - begin);
      const std::string longer =
          lines.back().empty() ? word : lines.back() + " " + word;
      if (text_width(longer, 12) > width_ - 2 * kEdge && !lines.back().empty())
        lines.push_back(word);
      else
        lines.back() = longer;
      begin = end + 1;
    }
    return lines;
  }

  const Album& album_;
  ColourScale scale_;
  Svg canvas_;
  double left_ = 0, step_ = 0, width_ = 0;
  size_t in_line_ = 1;  // heads
  bool captioned_ = false, numbered_ = false;
};

}  // namespace

std::string model_svg(const Album& album) { return ModelDrawing(album).page(); }

}  // namespace multihead::pictures
