// SPDX-License-Identifier: MIT
//
// A picture as one page to explore: page.html with the numbers inside.
#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "pictures/picture.h"

namespace multihead::pictures {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kColours = 256;

// page.html, with {{SCRIPT}} where page.js goes and {{DATA}} where the numbers
// do; CMake puts both into this file.
constexpr const char* kPage =
#include "page.html.inc"
    ;
constexpr const char* kScript =
#include "page.js.inc"
    ;

std::string base64(std::span<const std::byte> bytes) {
  static constexpr char kDigits[] =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t three = 0;
    for (size_t j = i; j < i + 3; ++j)
      three = three << 8 |
              (j < bytes.size() ? std::to_integer<uint32_t>(bytes[j]) : 0);
    for (int shift = 18; shift >= 0; shift -= 6)
      text += kDigits[three >> shift & 63];
  }
  for (size_t i = bytes.size(); i % 3 != 0; ++i)
    text[text.size() - 1 - (i - bytes.size())] = '=';
  return text;
}

Json rgb(Rgb colour) { return {colour.red, colour.green, colour.blue}; }

Json colours(Rgb (*colour_of)(double), double from) {
  Json table = Json::array();
  for (int i = 0; i < kColours; ++i)
    table.push_back(rgb(colour_of(from + (1 - from) * i / (kColours - 1))));
  return table;
}

Json labels(const Axis& axis) {
  Json texts = Json::array();
  for (int i = 0; i < axis.cells(); ++i) texts.push_back(axis.label(i));
  return {{"labels", std::move(texts)}};
}

// Masks are mostly one and the same: each is written once.
class Masks {
 public:
  int add(const std::vector<uint8_t>& blocked) {
    const auto [place, is_new] =
        numbers_.try_emplace(blocked, static_cast<int>(texts_.size()));
    if (is_new) texts_.push_back(base64(std::as_bytes(std::span(blocked))));
    return place->second;
  }
  const Json& texts() const { return texts_; }

 private:
  std::map<std::vector<uint8_t>, int> numbers_;
  Json texts_ = Json::array();
};

// Numbers of queries and keys, feature by feature.
Json to_json(const Features& features) {
  if (features.width == 0) return {};
  return {{"width", features.width},
          {"queries", base64(std::as_bytes(std::span(features.queries)))},
          {"keys", base64(std::as_bytes(std::span(features.keys)))}};
}

// How an item is written: in how many cells, in which colours.
struct Manner {
  Axis queries, keys;
  const ColourScale& scale;
  bool features;
};

Json to_json(const Panel& panel, const Item& item, const Manner& manner,
             Masks& masks) {
  const HeatMap map =
      pool(panel.map, {item.queries, manner.queries}, {item.keys, manner.keys});
  Json links = Json::array();
  for (const Link& link : panel.links)
    links.push_back(
        {item.queries.name(link.query), item.keys.name(link.key), link.weight});
  return {{"name", panel.name},
          {"rows", map.rows},
          {"columns", map.columns},
          {"entropy", std::isnan(panel.entropy) ? Json() : Json(panel.entropy)},
          {"links", std::move(links)},
          {"features", manner.features ? to_json(panel.features) : Json()},
          {"mask", masks.add(map.blocked)},
          {"values", base64(std::as_bytes(std::span(map.values)))}};
}

Json to_json(const Item& item, const Manner& manner, Masks& masks) {
  const ColourScale& scale = manner.scale;
  Json panels = Json::array();
  for (const Panel& panel : item.panels)
    panels.push_back(to_json(panel, item, manner, masks));
  return {{"index", item.index},
          {"queries", labels(manner.queries)},
          {"keys", labels(manner.keys)},
          {"signed", scale.is_signed()},
          {"high", scale.high()},
          {"open", scale.is_open()},
          {"pooling", pooling(manner.queries, manner.keys)},
          {"remarks", item.remarks},
          {"panels", std::move(panels)}};
}

Json groups(const Picture& picture) {
  Json list = Json::array();
  if (picture.num_kv_heads == picture.num_heads) return list;
  const int64_t each = picture.num_heads / picture.num_kv_heads;
  for (int64_t group = 0; group < picture.num_kv_heads; ++group) {
    std::string heads;
    for (int64_t head = group * each; head < (group + 1) * each; ++head)
      heads += (heads.empty() ? "" : " ") + std::to_string(head);
    list.push_back({{"name", std::to_string(group)}, {"heads", heads}});
  }
  return list;
}

// JSON that nothing in it can end as a script.
std::string as_script(const Json& json) {
  std::string text;
  for (const char c : json.dump())
    text += c == '<' ? "\\u003c" : std::string(1, c);
  return text;
}

// What a page of all layers may hold: a few megabytes.
constexpr size_t kMostCells = 1'000'000;
constexpr size_t kMostNumbers = 600'000;  // of queries and keys

size_t numbers_of(const Album& album) {
  size_t sum = 0;
  for (const Picture& layer : album.layers)
    for (const Item& item : layer.items)
      for (const Panel& panel : item.panels)
        sum += panel.features.queries.size() + panel.features.keys.size();
  return sum;
}

// Cells along each side, so that those of all maps are not too many.
int most_cells_of(const Album& album) {
  size_t maps = 0;
  for (const Picture& layer : album.layers)
    for (const Item& item : layer.items) maps += item.panels.size();
  const double side =
      std::sqrt(static_cast<double>(kMostCells) / static_cast<double>(maps));
  return std::clamp(static_cast<int>(side), 16, 256);
}

class Writing {
 public:
  explicit Writing(const Album& album)
      : album_(album),
        most_(most_cells_of(album)),
        features_(numbers_of(album) <= kMostNumbers) {}

  std::string page() {
    Json layers = Json::array();
    const ColourScale all = scale_of(album_);
    const bool one = album_.layers.size() == 1;
    for (size_t i = 0; i < album_.layers.size(); ++i) {
      const Picture& layer = album_.layers[i];
      layers.push_back(to_json(layer, one ? nullptr : &all));
      if (i + 1 < album_.layers.size() &&
          album_.layers[i + 1].group == layer.group)
        continue;
      for (const Picture& path : album_.paths)  // at the end of its group
        if (path.group == layer.group) {
          layers.push_back(to_json(path, nullptr));
          layers.back()["path"] = true;
        }
    }
    const Json data = {{"title", album_.title},
                       {"sequential", colours(sequential, 0)},
                       {"diverging", colours(diverging, -1)},
                       {"not_finite", rgb(kNotFinite)},
                       {"layers", std::move(layers)},
                       {"masks", masks_.texts()}};
    std::string page = kPage;
    fill(page, "{{SCRIPT}}", kScript);
    fill(page, "{{DATA}}", as_script(data));
    return page;
  }

 private:
  static void fill(std::string& page, std::string_view place,
                   const std::string& content) {
    page.replace(page.find(place), place.size(), content);
  }

  Json to_json(const Picture& picture, const ColourScale* common) {
    Json items = Json::array(), stages = Json::array();
    for (const Item& item : picture.items) {
      const ColourScale own = scale_of(picture, item);
      items.push_back(pictures::to_json(
          item,
          {coarser(item.queries, most_), coarser(item.keys, most_),
           common ? *common : own, features_},
          masks_));
    }
    for (const Stage& stage : picture.stages)
      stages.push_back({{"name", stage.name},
                        {"what", stage.what},
                        {"shape", shape_text(stage.shape)}});
    return {{"name", picture.name},
            {"group", picture.group},
            {"sizes", subtitle(picture, picture.items.back())},
            {"meaning", scale_name(picture) + ", coloured by its root"},
            {"stages", std::move(stages)},
            {"groups", groups(picture)},
            {"items", std::move(items)}};
  }

  const Album& album_;
  int most_;
  bool features_;
  Masks masks_;
};

}  // namespace

std::string to_html(const Album& album) { return Writing(album).page(); }

}  // namespace multihead::pictures
