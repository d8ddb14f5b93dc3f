// SPDX-License-Identifier: MIT
//
// What can be wrong with a safetensors file, and the error that says it.
#pragma once

#include <stdexcept>
#include <string>

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
