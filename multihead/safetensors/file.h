// SPDX-License-Identifier: MIT
//
// Files as safetensors needs them: read at an offset, and replaced as a whole
// or not at all. Every failure is a SafetensorsError of kind kUnreadable that
// begins with `where` and ends with the system's own words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <sstream>
#include <string>

#include "multihead/safetensors_error.h"

namespace multihead::safetensors {

/// Throws a SafetensorsError: `where`, a colon, and the parts as they print.
template <typename... Parts>
[[noreturn]] void fail(SafetensorsFault fault, const std::string& where,
                       const Parts&... parts) {
  std::ostringstream message;
  message << where << ": ";
  (message << ... << parts);
  throw SafetensorsError(fault, message.str());
}

/// An open descriptor, closed on destruction.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int value() const { return value_; }

 private:
  int value_;
};

/// A regular file, open for reading.
class InputFile {
 public:
  InputFile(const std::string& path, std::string where);
  uint64_t size() const { return size_; }
  /// Fills `to` with the bytes from `offset` on.
  void read_at(uint64_t offset, std::span<std::byte> to) const;

 private:
  std::string where_;
  Descriptor file_;
  uint64_t size_;
};

/// A file that appears at `path` when commit() returns; until then its bytes
/// lie in a temporary file in the same directory, which the destructor removes.
/// Whoever could read the file that was there can read the new one.
class OutputFile {
 public:
  OutputFile(const std::string& path, std::string where);
  ~OutputFile();
  void write_at(uint64_t offset, std::span<const std::byte> from);
  /// Flushes to the device, takes the place of `path`, flushes the directory.
  void commit();

 private:
  std::string where_;
  std::string name_;  ///< inside directory_, as is the next
  Descriptor directory_;
  std::string temporary_;  ///< empty once renamed
  Descriptor file_;
};

}  // namespace multihead::safetensors
