// SPDX-License-Identifier: MIT
//
// Code may be called and read in several ways: which verdict is believed.
#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "multihead/diagnosis.h"

namespace multihead::diagnosis {
namespace {

// What is believed first is smallest: no faults, one, two, none that is known.
std::pair<bool, size_t> rank(const std::string& verdict) {
  try {
    const auto json = nlohmann::json::parse(verdict);
    return {json.at("verdict") == "unknown", json.at("faults").size()};
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false,
                      "is_better_reading: each must be a verdict as JSON, got "
                      "one that lacks what a verdict has (",
                      error.what(), ")");
  }
}

}  // namespace

bool is_better_reading(const std::string& later, const std::string& earlier) {
  return rank(later) < rank(earlier);
}

}  // namespace multihead::diagnosis
