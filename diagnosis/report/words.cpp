// SPDX-License-Identifier: MIT
#include "diagnosis/report/words.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <string_view>

#include "multihead/text/printable.h"

namespace multihead::diagnosis {
namespace {

constexpr int kDeepest = 16;  // a report has three levels

// Sentences may have several lines; names, which stand in tables, have one.
bool has_lines(std::string_view key) {
  return key == "sentence" || key == "remedy" || key == "detail";
}

void clean(Json& json, std::string_view key = "") {
  if (json.is_string()) {
    auto& text = json.get_ref<std::string&>();
    while (!text.empty() && text.back() == '\n') text.pop_back();
    text = printable(text, has_lines(key) ? "\n" : "");
  } else if (json.is_object()) {
    for (auto& [name, value] : json.items()) clean(value, name);
  } else if (json.is_array()) {
    for (Json& part : json) clean(part, key);
  }
}

}  // namespace

Json parsed_report(const std::string& text) {
  const auto is_shallow = [](int depth, Json::parse_event_t, const Json&) {
    return depth <= kDeepest;  // what lies deeper is left out
  };
  Json report = Json::parse(text, is_shallow, /*allow_exceptions=*/false);
  TORCH_CHECK_VALUE(report.is_object() && report.contains("verdict"),
                    "render_report: report must be a JSON object with a "
                    "verdict, got ",
                    text.substr(0, 60));
  static constexpr std::string_view kVerdicts[] = {"bits", "rounding", "fault",
                                                   "unknown", "unchecked"};
  const Json& verdict = report["verdict"];
  TORCH_CHECK_VALUE(
      std::ranges::find(kVerdicts, text_at(report, "verdict")) !=
          std::end(kVerdicts),
      "render_report: verdict must be bits, rounding, fault, unknown or "
      "unchecked, got ",
      verdict.dump(-1, ' ', true, Json::error_handler_t::replace)
          .substr(0, 60));
  clean(report);
  return report;
}

std::string text_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return "";
  return found->get<std::string>();
}

const Json& list_at(const Json& object, const char* key) {
  static const Json empty = Json::array();
  const auto found = object.find(key);
  return found != object.end() && found->is_array() ? *found : empty;
}

bool is_true(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_boolean() && found->get<bool>();
}

std::string number_text(double x) {
  char text[32];
  const bool small = x != 0 && std::abs(x) < 1e-3;
  std::snprintf(text, sizeof text, small ? "%.1e" : "%.3g", x);
  return text;
}

std::string number_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return "–";
  return found->is_number() ? number_text(found->get<double>()) : "nan";
}

std::pair<std::string, std::string> numbers_apart(const Json& object,
                                                  const char* first,
                                                  const char* second) {
  std::pair texts(number_at(object, first), number_at(object, second));
  const auto one = object.find(first), other = object.find(second);
  if (texts.first == texts.second && one != object.end() && one->is_number() &&
      other->is_number()) {
    char longer[2][32];
    std::snprintf(longer[0], sizeof longer[0], "%.9g", one->get<double>());
    std::snprintf(longer[1], sizeof longer[1], "%.9g", other->get<double>());
    texts = {longer[0], longer[1]};
  }
  return texts;
}

std::string listed(const std::vector<std::string>& words,
                   const char* conjunction) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? conjunction : ", ";
    text += words[i];
  }
  return text;
}

std::string counted(size_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

Text marked_up(const std::string& text, Emphasis emphasis) {
  Text spans;
  size_t at = 0;
  while (at < text.size()) {
    const size_t open = text.find('`', at);
    const size_t close =
        open == std::string::npos ? open : text.find('`', open + 1);
    if (close == std::string::npos) break;
    if (open > at) spans.push_back({text.substr(at, open - at), emphasis});
    spans.push_back({text.substr(open + 1, close - open - 1), Emphasis::kCode});
    at = close + 1;
  }
  if (at < text.size()) spans.push_back({text.substr(at), emphasis});
  return spans;
}

}  // namespace multihead::diagnosis
