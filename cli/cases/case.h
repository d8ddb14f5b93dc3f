// SPDX-License-Identifier: MIT
//
// What `multihead verify` runs: cases are data, listed in cli/verify.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/cases/judge.h"
#include "cli/cases/random.h"

namespace cli {

struct Case {
  std::string group;   ///< what is under test, against what
  std::string name;    ///< with group and shapes unique
  std::string shapes;  ///< sizes and dtype, "N2 L5 Lk7 E16 H4 f32"
  std::function<Comparison(Random&)> run;
};

std::vector<Case> textbook_cases();
std::vector<Case> module_cases();
std::vector<Case> functional_cases();
std::vector<Case> gradient_cases();

/// What torch::nn::MultiheadAttention gets wrong in C++, as sentences.
std::vector<std::string> known_wrong_answers(uint64_t seed);

/// "f32", "f64", "bf16", "f16"
std::string short_name(at::ScalarType dtype);

}  // namespace cli
