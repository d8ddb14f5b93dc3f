// SPDX-License-Identifier: MIT
//
// Attention as a list of choices, one for each thing that an implementation
// can get wrong. The defaults are attention; a fault changes one of them, two
// faults change two. simulate() follows them.
#pragma once

#include "diagnosis/stages/dropout.h"
#include "diagnosis/stages/heads.h"
#include "diagnosis/stages/masks.h"
#include "diagnosis/stages/output.h"
#include "diagnosis/stages/projections.h"
#include "diagnosis/stages/rounding.h"
#include "diagnosis/stages/scale.h"
#include "diagnosis/stages/softmax.h"

namespace multihead::diagnosis {

struct Recipe : ProjectionChoices,
                HeadChoices,
                ScaleChoices,
                MaskChoices,
                SoftmaxChoices,
                DropoutChoices,
                RoundingChoices,
                OutputChoices {
  bool operator==(const Recipe&) const = default;
};

}  // namespace multihead::diagnosis
