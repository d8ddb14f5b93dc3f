// SPDX-License-Identifier: MIT
//
// A picture as one page to explore: page.html with the numbers inside.
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "cli/show/picture.h"

namespace cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kColours = 256;

// page.html, with {{DATA}} where the numbers go; CMake puts it into this file.
constexpr const char* kPage =
#include "page.html.inc"
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

Json to_json(const Panel& panel, const Item& item, Masks& masks) {
  Json links = Json::array();
  for (const Link& link : panel.links)
    links.push_back(
        {item.queries.name(link.query), item.keys.name(link.key), link.weight});
  return {{"name", panel.name},
          {"rows", panel.map.rows},
          {"columns", panel.map.columns},
          {"entropy", std::isnan(panel.entropy) ? Json() : Json(panel.entropy)},
          {"links", std::move(links)},
          {"mask", masks.add(panel.map.blocked)},
          {"values", base64(std::as_bytes(std::span(panel.map.values)))}};
}

Json to_json(const Item& item, const Picture& picture, Masks& masks) {
  const ColourScale scale = scale_of(picture, item);
  Json panels = Json::array();
  for (const Panel& panel : item.panels)
    panels.push_back(to_json(panel, item, masks));
  return {{"index", item.index},
          {"queries", labels(item.queries)},
          {"keys", labels(item.keys)},
          {"signed", scale.is_signed()},
          {"high", scale.high()},
          {"open", scale.is_open()},
          {"pooling", pooling(item.queries, item.keys)},
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

}  // namespace

std::string to_html(const Picture& picture) {
  Masks masks;
  Json items = Json::array(), stages = Json::array();
  for (const Item& item : picture.items)
    items.push_back(to_json(item, picture, masks));
  for (const Stage& stage : picture.stages)
    stages.push_back({{"name", stage.name},
                      {"what", stage.what},
                      {"shape", shape_text(stage.shape)}});
  const Json data = {
      {"title", picture.title},
      {"sizes", subtitle(picture, picture.items.back())},
      {"meaning", scale_name(picture) + ", coloured by its root"},
      {"stages", std::move(stages)},
      {"groups", groups(picture)},
      {"sequential", colours(sequential, 0)},
      {"diverging", colours(diverging, -1)},
      {"not_finite", rgb(kNotFinite)},
      {"items", std::move(items)},
      {"masks", masks.texts()}};
  static constexpr std::string_view kPlace = "{{DATA}}";
  std::string page = kPage;
  return page.replace(page.find(kPlace), kPlace.size(), as_script(data));
}

}  // namespace cli
