// SPDX-License-Identifier: MIT
//
// The catalogue: all faults, and what an implementation may choose without
// being wrong.
#pragma once

#include <span>
#include <string_view>

#include "diagnosis/dump/observed_call.h"
#include "diagnosis/stages/fault.h"

namespace multihead::diagnosis {

/// Ordered by stage, the likelier first: where observations cannot tell two
/// faults apart, the earlier one is named.
std::span<const Fault> all_faults();

/// A choice that is as good as the default, of which nobody said which it is.
struct Convention {
  std::string_view name;
  std::string_view sentence;  ///< what is assumed
  std::string_view remedy;    ///< how to state it
  bool (*concerns)(const ObservedCall&);
  void (*apply)(Recipe&);
};
std::span<const Convention> all_conventions();

}  // namespace multihead::diagnosis
