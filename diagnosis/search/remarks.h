// SPDX-License-Identifier: MIT
//
// What is worth knowing beside the verdict, and what an output shows by itself.
#pragma once

#include <span>
#include <vector>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/search/search.h"
#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

/// On calls beside attention by `attention`, the conventions of `explanation`.
std::vector<Finding> remarks(std::span<const ObservedCall> calls,
                             const Recipe& attention,
                             const Explanation& explanation);

/// On a search that explained nothing: why that may be.
std::vector<Finding> remarks_on_search(std::span<const ObservedCall> calls,
                                       const SearchResult& result);

/// What is wrong with out itself, in calls that nothing explains: its shape, or
/// numbers that are not finite where those of `attention` are.
std::vector<Finding> flaws_of_out(std::span<const ObservedCall> calls,
                                  const Recipe& attention);

}  // namespace multihead::diagnosis
