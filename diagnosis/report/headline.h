// SPDX-License-Identifier: MIT
//
// What a report comes to, and the verdict in one sentence.
#pragma once

#include "diagnosis/report/document.h"
#include "diagnosis/report/json.h"
#include "multihead/diagnosis.h"

namespace multihead::diagnosis {

/// "bits" or "rounding".
bool is_right(const std::string& verdict);

/// What is seen of an output before any rule of attention is the news.
bool is_flaw_of_out(const Json& report);

Outcome outcome_of(const Json& report);

/// ✓ or ✗.
Span mark(bool good);

Block headline(const Json& report);

}  // namespace multihead::diagnosis
