// SPDX-License-Identifier: MIT
#ifndef MULTIHEAD_DIAGNOSIS_SEARCH_ARRANGEMENT_H
#define MULTIHEAD_DIAGNOSIS_SEARCH_ARRANGEMENT_H

#include <optional>

#include "diagnosis/dump/observed_call.h"
#include "multihead/diagnosis.h"

namespace multihead::diagnosis {

/// Of calls whose heads alone are observed, (B, H, L, d): the fault of how
/// heads are split or merged, as the trace shows it. What the code computes
/// before and after may be anything: numbers that are only moved can be found
/// again.
std::optional<Finding> misplaced(const ObservedCall& call);

}  // namespace multihead::diagnosis

#endif  // MULTIHEAD_DIAGNOSIS_SEARCH_ARRANGEMENT_H
