// SPDX-License-Identifier: MIT
//
// What is right, but worth knowing.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "multihead/diagnosis/recipe.h"
#include "multihead/diagnosis/run.h"
#include "multihead/diagnosis/search.h"

namespace multihead::diagnosis {

/// On runs beside attention by `attention`, the conventions of `explanation`.
std::vector<Finding> remarks(std::span<const Run> runs, const Recipe& attention,
                             const Explanation& explanation);

/// On scores so large that no result tells anything; nullopt: they are not.
std::optional<Finding> lost_in_rounding(std::span<const Run> runs);

/// On an output that has not the shape of attention's; nullopt: it has.
std::optional<Finding> another_shape(std::span<const Run> runs);

/// On a search that was cut short.
Finding search_cut_short();

}  // namespace multihead::diagnosis
