// SPDX-License-Identifier: MIT
//
// The cases of a verdict: what was compared, in numbers.
#pragma once

#include "diagnosis/report/document.h"
#include "diagnosis/report/words.h"

namespace multihead::diagnosis {

/// 0 where there is no number.
double value_at(const Json& object, const char* key);
bool has_number(const Json& object, const char* key);

/// Whether attention has a result to compare this case with: else nothing is
/// allowed for rounding either.
bool has_reference(const Json& c);

/// The exercise's own assertion, where the code is right and PyTorch has
/// numbers to stand beside it: rows that see nothing, and dropout, have none.
void add_exercise(Document& document, const Json& cases);

/// A table: those that disagree before those that agree, where they are too
/// many to see.
void add_cases(Document& document, const Json& cases, bool folded);

}  // namespace multihead::diagnosis
