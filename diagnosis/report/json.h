// SPDX-License-Identifier: MIT
//
// A report as JSON, read with patience: what is missing or of another type is
// empty.
#pragma once

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace multihead::diagnosis {

using Json = nlohmann::json;

/// A report, its strings printable (multihead/text/printable.h). Throws
/// c10::ValueError where it is none, or lacks a verdict.
Json parsed_report(const std::string& text);

/// The string or list under `key`, an empty one where there is none.
std::string text_at(const Json& object, const char* key);
const Json& list_at(const Json& object, const char* key);
bool is_true(const Json& object, const char* key);

/// NaN where JSON has null, nullopt where it has nothing.
std::optional<double> number_at(const Json& object, const char* key);
bool has_number(const Json& object, const char* key);
/// 0 where there is no number.
double value_at(const Json& object, const char* key);

/// Whether an entry of a list has one of these names.
bool has_named(const Json& list, std::initializer_list<std::string_view> names);

/// The strings and numbers of a list.
std::string joined(const Json& list, const char* separator);

// ---- Words -----------------------------------------------------------------

void append_new(std::vector<std::string>& words, const std::string& word);

/// "a", "a and b", "a, b and c".
std::string listed(const std::vector<std::string>& words,
                   const char* conjunction = " and ");

/// "one", "two", "three", "four"; digits for other numbers.
std::string number_word(size_t count);

/// "1 case", "7 cases".
std::string counted(size_t count, const std::string& noun);

/// "the one case", "both cases", "all 7 cases".
std::string all_cases(size_t count);

}  // namespace multihead::diagnosis
