// SPDX-License-Identifier: MIT
//
// The half of the safetensors format that needs no tensors: the header's JSON,
// and its rules. It links no torch, so that fuzzers run fast.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "multihead/safetensors/file.h"

namespace multihead::safetensors {

/// One tensor as the header describes it: data bytes [begin, end), counted
/// from the header's end.
struct Entry {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<int64_t> shape = {};
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct Header {
  std::map<std::string, Entry> tensors = {};
  std::map<std::string, std::string> metadata = {};
  uint64_t data_start = 0;  ///< position of the data in the file
};

/// Where a file's bytes come from.
struct Source {
  std::string where;  ///< how errors begin: function and file
  uint64_t size;
  /// Fills `to` with the bytes from `offset` on, all of them or it throws.
  std::function<void(uint64_t offset, std::span<std::byte> to)> read_at;
};

/// Reads and checks a file's header: on return the entries cover the data
/// without hole, overlap or rest, and every entry's bytes equal shape × dtype.
/// Allocates in proportion to the header, after its length proved to lie within
/// the file. Throws SafetensorsError.
Header read_header(const Source& source);

/// The first bytes of a file with these tensors, up to the data; sets begin,
/// end and data_start. The same bytes as the reference implementation: tensors
/// by dtype, widest first, then by name; spaces up to a multiple of 8. Throws
/// SafetensorsError.
std::string write_header(Header& header, const std::string& where);

/// "[2,3]"
std::string format_shape(std::span<const int64_t> shape);

/// Text as in JSON, in ASCII and cut after 80 bytes, so that a hostile name can
/// neither flood nor control a terminal.
std::string quote(std::string_view text);

}  // namespace multihead::safetensors
