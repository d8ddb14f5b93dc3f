// SPDX-License-Identifier: MIT
//
// Any bytes as a safetensors file: the header is refused with a
// SafetensorsError, or it covers the data exactly, and writing it and reading
// that again gives the same. Run it for five minutes:
//
//   cmake -S . -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++ \
//         -DMULTIHEAD_BUILD_FUZZERS=ON
//   cmake --build build/fuzz --target safetensors_fuzz
//   build/fuzz/tests/fuzz/safetensors_fuzz -max_total_time=300 -max_len=4096 \
//         -malloc_limit_mb=8
//
// The last option is a check as well: a file of 4 KiB has no use for 8 MiB.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "multihead/safetensors/header.h"

namespace {

using multihead::SafetensorsError;
using multihead::safetensors::Header;
using multihead::safetensors::Source;

/// A file that checks that nothing outside it is asked for. Its bytes are
/// copied so that the address sanitizer guards both ends.
Source make_source(const std::vector<std::byte>& file) {
  return {.where = "fuzz",
          .size = file.size(),
          .read_at = [&](uint64_t offset, std::span<std::byte> to) {
            if (offset > file.size() || to.size() > file.size() - offset) {
              std::abort();
            }
            std::copy_n(file.begin() + static_cast<ptrdiff_t>(offset),
                        to.size(), to.begin());
          }};
}

void require(bool condition, const char* what) {
  if (condition) return;
  std::cerr << "violated: " << what << '\n';
  std::abort();
}

bool same_content(const Header& a, const Header& b) {
  const auto same = [](const auto& one, const auto& other) {
    return one.first == other.first && one.second.dtype == other.second.dtype &&
           one.second.shape == other.second.shape;
  };
  return a.metadata == b.metadata &&
         std::ranges::equal(a.tensors, b.tensors, same);
}

void check_covered(const Header& header, uint64_t size) {
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (const auto& [name, entry] : header.tensors) {
    ranges.emplace_back(entry.begin, entry.end);
  }
  std::ranges::sort(ranges);
  uint64_t end = 0;
  for (const auto& range : ranges) {
    require(range.first == end && range.second >= end, "ranges are contiguous");
    end = range.second;
  }
  require(header.data_start + end == size, "ranges cover the data");
}

/// What write_header makes of a header that was accepted.
void check_round_trip(Header header) {
  const Header before = header;
  const std::string start = write_header(header, "fuzz");
  require(start.size() % 8 == 0, "the data is aligned");
  uint64_t data_size = 0;
  for (const auto& [name, entry] : header.tensors) {
    data_size = std::max(data_size, entry.end);
  }
  std::vector<std::byte> file(start.size() + data_size);
  std::memcpy(file.data(), start.data(), start.size());
  const Header again = read_header(make_source(file));
  require(same_content(before, again), "what is written is read again");
  require(again.data_start == start.size(), "data_start is the header's end");
}

constexpr std::array<std::string_view, 5> kHeaders = {
    R"({})", R"({"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})",
    R"({"__metadata__":{"format":"pt","\u00e9\n":""},)"
    R"("a":{"dtype":"BOOL","shape":[],"data_offsets":[0,1]},)"
    R"("b":{"dtype":"I64","shape":[0,7],"data_offsets":[1,1]}}   )",
    R"({"b":{"shape":[1],"data_offsets":[4,5],"dtype":"F8_E4M3"},)"
    R"("a":{"data_offsets":[0,4],"dtype":"BF16","shape":[2,1,1]}})",
    R"({"w":{"dtype":"U64","shape":[4294967296,4294967296],)"
    R"("data_offsets":[0,18446744073709551615]}})"};

/// Sets the first 8 bytes to the length of a header that ends with the last
/// '}'.
void repair_length(std::span<uint8_t> file) {
  const auto last = std::find(file.rbegin(), file.rend(), '}').base();
  const uint64_t length = std::max<ptrdiff_t>(last - file.begin(), 8) - 8;
  std::memcpy(file.data(), &length, sizeof(length));
}

}  // namespace

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Starts from kHeaders and keeps the length field true most of the time,
// without which hardly a mutation would get past it.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size,
                                          size_t max_size, unsigned seed) {
  std::minstd_rand random(seed);
  constexpr size_t kLengthBytes = 8, kDataBytes = 24;
  if (size <= kLengthBytes) {
    const std::string_view header = kHeaders[random() % kHeaders.size()];
    if (kLengthBytes + header.size() + kDataBytes > max_size) return size;
    std::memset(data, 0, kLengthBytes + header.size() + kDataBytes);
    std::ranges::copy(header, data + kLengthBytes);
    size = kLengthBytes + header.size() + random() % (kDataBytes + 1);
    repair_length({data, size});
    return size;
  }
  if (random() % 16 == 0) return LLVMFuzzerMutate(data, size, max_size);
  size =
      kLengthBytes + LLVMFuzzerMutate(data + kLengthBytes, size - kLengthBytes,
                                      max_size - kLengthBytes);
  repair_length({data, size});
  return size;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  const std::vector<std::byte> file(bytes, bytes + size);
  try {
    const Header header = read_header(make_source(file));
    check_covered(header, size);
    check_round_trip(header);
  } catch (const SafetensorsError& error) {
    require(std::strncmp(error.what(), "fuzz: ", 6) == 0, "errors say where");
  }
  return 0;
}
