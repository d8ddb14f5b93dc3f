// SPDX-License-Identifier: MIT
//
// What a verdict takes for granted: what nobody said and the numbers show, what
// the code's own text says, what whoever ran the code had to guess. Some of it
// decides: then the code is right only if that is what was meant.
#pragma once

#include <span>
#include <vector>

#include "diagnosis/search/search.h"

namespace multihead::diagnosis {

/// Puts them into a verdict that has its faults: assumptions; conditions, where
/// it is right; remarks on what the code refuses; whether it is doubtful. Of
/// calls that nothing explains, only what some of them support. conventions:
/// those of `best`, or under which attention comes nearest. best: nullptr where
/// nothing explains them.
void assume(std::span<const ObservedCall> calls, const Conventions& conventions,
            const Explanation* best, Verdict& verdict);

}  // namespace multihead::diagnosis
