// SPDX-License-Identifier: MIT
//
// Windows: which keys of a sequence a query sees, by their distance.
#pragma once

#include <array>
#include <cstdint>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

/// How many keys it holds to the left and to the right of the query's own.
std::array<int64_t, 2> sides_of(const GivenWindow& window,
                                WindowReading reading, bool is_causal);

}  // namespace multihead::diagnosis
