// SPDX-License-Identifier: MIT
//
// Files for the safetensors tests: built byte by byte, kept in a folder that is
// removed with the test.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "multihead/safetensors.h"

namespace multihead::test {

/// 8 bytes of `length`, little-endian.
inline std::string length_field(uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) {
    bytes += static_cast<char>(length >> (8 * i) & 0xFF);
  }
  return bytes;
}

/// A file with this header and this data.
inline std::string make_file(const std::string& header,
                             const std::string& data = "") {
  return length_field(header.size()) + header + data;
}

/// The same with `size` bytes of data, all zero.
inline std::string make_file(const std::string& header, size_t size) {
  return make_file(header, std::string(size, '\0'));
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = ::testing::TempDir() + "safetensors-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) {
      throw std::filesystem::filesystem_error(
          "mkdtemp", name, std::error_code(errno, std::generic_category()));
    }
    path_ = name;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string operator/(const std::string& name) const { return path_ / name; }
  size_t file_count() const {
    return std::distance(std::filesystem::directory_iterator(path_), {});
  }

 private:
  std::filesystem::path path_;
};

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Passes if `call` throws SafetensorsError of this kind, whose text contains
/// every fragment.
inline void expect_fault(auto&& call, SafetensorsFault fault,
                         std::initializer_list<std::string> fragments) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const SafetensorsError& error) {
    const std::string what = error.what();
    EXPECT_EQ(error.fault(), fault) << what;
    for (const std::string& fragment : fragments) {
      EXPECT_NE(what.find(fragment), std::string::npos)
          << "expected: " << fragment << "\nin: " << what;
    }
  }
}

}  // namespace multihead::test
