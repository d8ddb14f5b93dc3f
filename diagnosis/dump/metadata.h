// SPDX-License-Identifier: MIT
//
// What an observation holds: its tensors, and the facts of its metadata as
// numbers and choices. What is not there is absent; what is there and cannot be
// read throws c10::ValueError that names it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "multihead/diagnosis.h"

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

/// The first of these names, as it came; undefined if none is there.
at::Tensor find(const Observation& from,
                std::initializer_list<const char*> names);

/// Whether x is float64, float32, bfloat16 or float16.
bool is_floating(const at::Tensor& x);

/// Real numbers in float64, which holds every number of the types that may
/// come; undefined of undefined.
at::Tensor numbers(const at::Tensor& x, const char* name);

/// numbers() of what goes into attention, or comes out of it: floating, not
/// empty.
at::Tensor features(const at::Tensor& x, const char* name);

}  // namespace multihead::diagnosis
