// SPDX-License-Identifier: MIT
//
// Of explanations that fit equally, which is believed.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "diagnosis/dump/run.h"
#include "diagnosis/search/search.h"

namespace multihead::diagnosis {

/// The faults of an explanation, sorted.
std::vector<std::string> names_of(const Explanation& explanation);

/// The likeliest first, one for each set of names.
std::vector<Explanation> ranked(std::span<const Run> runs,
                                std::vector<Explanation> found);

}  // namespace multihead::diagnosis
