// SPDX-License-Identifier: MIT
#include "diagnosis/report/json.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "multihead/text/printable.h"

namespace multihead::diagnosis {
namespace {

void clean(Json& json, std::string_view key = "") {
  if (json.is_string()) {
    // Sentences may have several lines; names, which stand in tables, have one.
    const bool lines = key == "sentence" || key == "remedy" || key == "detail";
    auto& text = json.get_ref<std::string&>();
    while (!text.empty() && text.back() == '\n') text.pop_back();
    text = printable(text, lines ? "\n" : "");
  } else if (json.is_object()) {
    for (auto& [name, value] : json.items()) clean(value, name);
  } else if (json.is_array()) {
    for (Json& part : json) clean(part, key);
  }
}

}  // namespace

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

Json parsed_report(const std::string& text) {
  const auto is_shallow = [](int depth, Json::parse_event_t, const Json&) {
    return depth <= 16;  // a report has three levels; the rest is left out
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

std::optional<double> number_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return std::nullopt;
  return found->is_number() ? found->get<double>() : NAN;
}

bool has_number(const Json& object, const char* key) {
  return !std::isnan(number_at(object, key).value_or(NAN));
}

double value_at(const Json& object, const char* key) {
  return has_number(object, key) ? *number_at(object, key) : 0;
}

bool has_named(const Json& list,
               std::initializer_list<std::string_view> names) {
  return std::any_of(list.begin(), list.end(), [&](const Json& entry) {
    return std::ranges::find(names, text_at(entry, "name")) != names.end();
  });
}

std::string joined(const Json& list, const char* separator) {
  std::string text;
  for (const Json& part : list) {
    if (!part.is_string() && !part.is_number()) continue;
    text += text.empty() ? "" : separator;
    text += part.is_string() ? part.get<std::string>() : part.dump();
  }
  return text;
}

void append_new(std::vector<std::string>& words, const std::string& word) {
  if (std::ranges::find(words, word) == words.end()) words.push_back(word);
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

std::string number_word(size_t count) {
  constexpr const char* kWords[] = {"one", "two", "three", "four"};
  return count >= 1 && count <= std::size(kWords) ? kWords[count - 1]
                                                  : std::to_string(count);
}

std::string counted(size_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string all_cases(size_t count) {
  return count == 1   ? "the one case"
         : count == 2 ? "both cases"
                      : "all " + counted(count, "case");
}

}  // namespace multihead::diagnosis
