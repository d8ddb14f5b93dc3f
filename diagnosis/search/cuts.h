// SPDX-License-Identifier: MIT
#pragma once

#include <vector>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

/// A change of what heads are made of.
using Cut = void (*)(Recipe&);

/// What heads may be made of by fault, so that a norm or a rotation of them
/// shows in the trace beside such a fault, too: heads that are cut as they
/// should not be; views of a fused projection without a permutation; and, where
/// something is known to be done to heads, projections of others.
std::vector<Cut> other_cuts(const ObservedCall& call);

}  // namespace multihead::diagnosis
