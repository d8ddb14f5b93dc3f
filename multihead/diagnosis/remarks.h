// SPDX-License-Identifier: MIT
//
// What is right, but worth knowing.
#pragma once

#include <span>
#include <vector>

#include "multihead/diagnosis/recipe.h"
#include "multihead/diagnosis/run.h"

namespace multihead::diagnosis {

/// On runs beside attention by `attention`, conventions only; in_float: they
/// agree to the digits of float32 only.
std::vector<Finding> remarks(std::span<const Run> runs, const Recipe& attention,
                             bool in_float);

/// On a search that was cut short.
Finding search_cut_short();

}  // namespace multihead::diagnosis
