// SPDX-License-Identifier: MIT
//
// What a call shows of the things that stand beside attention in one module.
#pragma once

#include "diagnosis/dump/observed_call.h"

namespace multihead::diagnosis {

/// Norms, learned numbers and tables among the weights that are not attention's
/// own; tables of rotary positions; a window; matrices without gradients; to
/// how many digits the output is rounded. call: all else has been read.
void read_beside(const Observation& from, ObservedCall& call);

}  // namespace multihead::diagnosis
