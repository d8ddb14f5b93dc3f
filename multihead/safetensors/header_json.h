// SPDX-License-Identifier: MIT
//
// The JSON of a safetensors header: text to entries and back. What the entries
// claim about the data is checked in header.cpp.
#pragma once

#include <span>

#include "multihead/safetensors/fail.h"
#include "multihead/safetensors/header.h"

namespace multihead::safetensors {

using NamedEntry = std::pair<const std::string, Entry>;

struct DtypeRow {
  std::string_view name;
  c10::ScalarType dtype;
  int64_t bytes;
};

/// Every dtype of the format that torch has, in the format's order.
std::span<const DtypeRow> dtype_table();

/// The row of a dtype; kDtype if the format or this table lacks it.
const DtypeRow& dtype_row(c10::ScalarType dtype, const std::string& where,
                          const std::string& tensor);

/// Header text to entries and metadata. Throws SafetensorsError.
Header parse_json(const std::string& text, const std::string& where);

/// The inverse: metadata, then the header's entries in the order given.
std::string format_json(const Header& header,
                        std::span<NamedEntry* const> entries,
                        const std::string& where);

/// "[2,3]"
std::string format_shape(std::span<const int64_t> shape);

/// Text as in JSON, in ASCII and cut after 80 bytes, so that a hostile name can
/// neither flood nor control a terminal.
std::string quote(std::string_view text);

}  // namespace multihead::safetensors
