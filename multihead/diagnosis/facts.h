// SPDX-License-Identifier: MIT
//
// The facts of an observation: its metadata, read as numbers and choices. What
// is not there is absent; what is there and cannot be read throws
// c10::ValueError that names it.
#pragma once

#include <c10/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "multihead/explain.h"

namespace multihead::diagnosis {

const std::string* find_text(const Observation& from, const std::string& name);

/// A number of heads: from 1 to 65536, so that products of sizes stay numbers.
std::optional<int64_t> find_count(const Observation& from,
                                  const std::string& name);

std::optional<double> find_number(const Observation& from,
                                  const std::string& name);

bool find_flag(const Observation& from, const std::string& name, bool absent);

template <typename Value>
using Choices = std::initializer_list<std::pair<const char*, Value>>;

template <typename Value>
Value find_choice(const Observation& from, const std::string& name,
                  Value absent, Choices<Value> choices) {
  const std::string* text = find_text(from, name);
  if (text == nullptr) return absent;
  std::string known;
  for (const auto& [choice, value] : choices) {
    if (*text == choice) return value;
    known += std::string(known.empty() ? "" : ", ") + choice;
  }
  TORCH_CHECK_VALUE(false, "explain: ", name, " must be one of ", known,
                    ", got \"", *text, "\"");
}

}  // namespace multihead::diagnosis
