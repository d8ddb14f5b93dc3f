// SPDX-License-Identifier: MIT
//
// backend.h's kernel_isa, for those who call the kernels.
#pragma once

#include "multihead/kernels/kernels.h"

namespace multihead {

/// Throws where MULTIHEAD_ISA names none, or one that this CPU lacks.
kernels::Isa current_isa();

}  // namespace multihead
