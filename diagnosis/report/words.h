// SPDX-License-Identifier: MIT
//
// The small change of a report's sentences: numbers, lists, names.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "diagnosis/report/document.h"

namespace multihead::diagnosis {

using Json = nlohmann::json;

/// A report, its strings printable (multihead/utf8.h). Throws c10::ValueError
/// where `text` is none.
Json parsed_report(const std::string& text);

/// The string or list under `key`, an empty one where there is none.
std::string text_at(const Json& object, const char* key);
const Json& list_at(const Json& object, const char* key);

bool is_true(const Json& object, const char* key);

/// "2.4e-07", "0.412", "0".
std::string number_text(double x);

/// The same; "nan" where JSON has null, "–" where it has nothing.
std::string number_at(const Json& object, const char* key);

/// Two numbers, with more digits where they would look the same.
std::pair<std::string, std::string> numbers_apart(const Json& object,
                                                  const char* first,
                                                  const char* second);

/// "a", "a and b", "a, b and c".
std::string listed(const std::vector<std::string>& words,
                   const char* conjunction = " and ");

/// "1 case", "7 cases".
std::string counted(size_t count, const std::string& noun);

/// `text` with what stands between backticks as code.
Text marked_up(const std::string& text, Emphasis emphasis = Emphasis::kPlain);

}  // namespace multihead::diagnosis
