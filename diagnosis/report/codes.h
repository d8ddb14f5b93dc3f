// SPDX-License-Identifier: MIT
//
// Faults by the codes under which reviews and configurations know them.
#pragma once

#include <span>
#include <string_view>

namespace multihead::diagnosis {

struct FaultCode {
  std::string_view code;   ///< "MH301"
  std::string_view name;   ///< "scale_missing"
  std::string_view hurts;  ///< what it does to those who do not notice
  // Of what is no fault of the catalogue, which says it itself:
  std::string_view sentence = {}, remedy = {};
};

/// Every fault of the catalogue, and what keeps a program from being right
/// beside those; ordered by code.
std::span<const FaultCode> all_codes();

/// The latter alone.
std::span<const FaultCode> codes_of_programs();

/// "" where a name has none.
std::string_view code_of(std::string_view name);

}  // namespace multihead::diagnosis
