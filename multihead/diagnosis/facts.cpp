// SPDX-License-Identifier: MIT
#include "multihead/diagnosis/facts.h"

#include <charconv>
#include <cmath>

namespace multihead::diagnosis {
namespace {

// The whole text as a number; nullopt where it is none.
template <typename Number>
std::optional<Number> number_in(const std::string& text) {
  Number number = 0;
  const char* whole = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), whole, number);
  if (error != std::errc() || end != whole) return std::nullopt;
  return number;
}

}  // namespace

const std::string* find_text(const Observation& from, const std::string& name) {
  const auto entry = from.metadata.find(name);
  return entry == from.metadata.end() ? nullptr : &entry->second;
}

std::optional<int64_t> find_count(const Observation& from,
                                  const std::string& name) {
  const std::string* text = find_text(from, name);
  if (text == nullptr) return std::nullopt;
  const std::optional<int64_t> count = number_in<int64_t>(*text);
  TORCH_CHECK_VALUE(count && *count >= 1 && *count <= 65536, "explain: ", name,
                    " must be a number from 1 to 65536, got \"", *text, "\"");
  return count;
}

std::optional<double> find_number(const Observation& from,
                                  const std::string& name) {
  const std::string* text = find_text(from, name);
  if (text == nullptr) return std::nullopt;
  const std::optional<double> number = number_in<double>(*text);
  TORCH_CHECK_VALUE(number && std::isfinite(*number), "explain: ", name,
                    " must be a number, got \"", *text, "\"");
  return number;
}

bool find_flag(const Observation& from, const std::string& name, bool absent) {
  return find_choice<bool>(from, name, absent,
                           {{"true", true}, {"false", false}});
}

}  // namespace multihead::diagnosis
