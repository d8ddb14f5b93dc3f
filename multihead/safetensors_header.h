// SPDX-License-Identifier: MIT
//
// The half of the safetensors format that needs no tensors: the header's JSON,
// its rules, and the errors. It links no torch, so that fuzzers run fast.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] multihead {

/// What is wrong with a file, or with what is to be written to one.
enum class SafetensorsFault {
  kUnreadable,      ///< the file cannot be opened, read or written
  kHeaderTooSmall,  ///< fewer than 8 bytes
  kHeaderTooLarge,  ///< header length above 100,000,000
  kHeaderLength,    ///< header length beyond the end of the file
  kHeaderStart,     ///< header does not start with '{'
  kHeaderUtf8,      ///< header is not UTF-8
  kHeaderJson,      ///< header is not one JSON object, or repeats a key
  kMetadata,        ///< __metadata__ is not an object of strings
  kTensorInfo,      ///< an entry is not {dtype, shape, data_offsets}
  kDtype,           ///< dtype is not a string, or one that torch lacks
  kShape,           ///< shape is not at most 64 integers in [0, 2^63)
  kOverflow,        ///< the product of sizes and width exceeds 2^63 − 1
  kOffsets,         ///< data_offsets is not two unsigned integers, begin > end,
                    ///< a hole, an overlap, or beyond the data
  kSize,            ///< bytes do not equal shape × dtype
  kTrailing,        ///< data after the last tensor
  kValue,           ///< a BOOL byte is neither 0 nor 1
  kMissing,         ///< a tensor that the module needs is not there
  kMismatch,        ///< a name, shape or dtype does not fit the module
};

/// Thrown by everything that reads or writes safetensors. what() names file,
/// tensor, what was expected and what was found.
class SafetensorsError : public std::runtime_error {
 public:
  SafetensorsError(SafetensorsFault fault, const std::string& what)
      : std::runtime_error(what), fault_(fault) {}
  SafetensorsFault fault() const { return fault_; }

 private:
  SafetensorsFault fault_;
};

}  // namespace multihead

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

}  // namespace multihead::safetensors
