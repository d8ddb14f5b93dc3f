// SPDX-License-Identifier: MIT
#include "multihead/safetensors/header.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "multihead/safetensors/header_json.h"

namespace multihead::safetensors {
namespace {

using enum SafetensorsFault;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;

/// Whether it is text, of which no safetensors file can begin with 8 bytes.
bool is_text(std::string_view bytes) {
  return !bytes.empty() && std::ranges::all_of(bytes, [](unsigned char c) {
    return c >= ' ' ? c != 0x7F && c < 0xF8  // not in UTF-8
                    : c == '\t' || c == '\n' || c == '\r';
  });
}

/// What a file is that begins so and has no header; nullptr: nothing tells.
const char* other_format(std::string_view start) {
  static constexpr std::pair<std::string_view, const char*> kFormats[] = {
      {"PK\3\4", "a ZIP archive, as torch.save and numpy.savez write"},
      {"\x93NUMPY", "an array of numpy.save"},
      {"\x89HDF", "an HDF5 file"},
      {"\x1F\x8B", "a gzip file"},
      {"GGUF", "a GGUF file"},
      {"\x80\2", "a pickle"},
      {"\x80\3", "a pickle"},
      {"\x80\4", "a pickle"},
      {"\x80\5", "a pickle"}};
  for (const auto& [magic, name] : kFormats) {
    if (start.starts_with(magic)) return name;
  }
  return is_text(start) ? "text" : nullptr;
}

/// Says what it is, where that can be told.
void check_format(const Source& source, SafetensorsFault fault) {
  constexpr uint64_t kRead = 64;
  std::string start(std::min(source.size, kRead), '\0');
  source.read_at(0, std::as_writable_bytes(std::span(start)));
  if (const char* format = other_format(start)) {
    fail(fault, source.where, "file must be a safetensors file, got ", format);
  }
}

uint64_t read_length(const Source& source) {
  if (source.size < kLengthBytes) {
    check_format(source, kHeaderTooSmall);
    fail(kHeaderTooSmall, source.where, "file must have at least ",
         kLengthBytes, " bytes, got ", source.size);
  }
  std::array<std::byte, kLengthBytes> bytes;
  source.read_at(0, bytes);
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length |= std::to_integer<uint64_t>(bytes[i]) << (8 * i);
  }
  if (length > kMaxHeaderBytes) {
    check_format(source, kHeaderTooLarge);
    fail(kHeaderTooLarge, source.where, "header length must be at most ",
         kMaxHeaderBytes, ", got ", length);
  }
  const uint64_t rest = source.size - kLengthBytes;
  if (length > rest) {
    fail(kHeaderLength, source.where, "header length must be at most the ",
         rest, " bytes that follow it, got ", length);
  }
  return length;
}

std::string length_field(uint64_t length) {
  std::string bytes;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    bytes += static_cast<char>(length >> (8 * i) & 0xFF);
  }
  return bytes;
}

/// shape × dtype in bytes. An empty tensor's other sizes count too: torch
/// multiplies them into strides.
uint64_t byte_count(const NamedEntry& named, const std::string& where) {
  const auto& [name, entry] = named;
  int64_t bytes = dtype_row(entry.dtype, where, name).bytes;
  bool empty = false;
  for (int64_t size : entry.shape) {
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) {
      fail(kOverflow, where, "tensor ", quote(name),
           ": shape must have fewer than 2^63 bytes, got ",
           format_shape(entry.shape));
    }
    empty = empty || size == 0;
  }
  return empty ? 0 : static_cast<uint64_t>(bytes);
}

/// The tensors, sorted by what `key` says of a NamedEntry, then by name.
std::vector<NamedEntry*> sorted_entries(Header& header, auto key) {
  std::vector<NamedEntry*> entries;
  for (NamedEntry& entry : header.tensors) entries.push_back(&entry);
  std::ranges::stable_sort(
      entries, {}, [&](const NamedEntry* entry) { return key(*entry); });
  return entries;
}

/// Checks one tensor's range against the data and its shape, given where the
/// ranges before it end.
void check_range(const NamedEntry& named, uint64_t previous_end,
                 uint64_t data_size, const std::string& where) {
  const auto& [name, entry] = named;
  const auto require = [&](bool holds, SafetensorsFault fault,
                           const auto&... condition) {
    if (holds) return;
    fail(fault, where, "tensor ", quote(name), ": data_offsets must ",
         condition..., ", got [", entry.begin, ", ", entry.end, "]");
  };
  require(entry.begin <= entry.end, kOffsets, "not descend");
  require(entry.begin == previous_end, kOffsets, "begin at ", previous_end,
          ", where the tensor before it ends");
  require(entry.end <= data_size, kOffsets, "end within the data's ", data_size,
          " bytes");
  const uint64_t bytes = byte_count(named, where);
  require(entry.end - entry.begin == bytes, kSize, "span ", bytes,
          " bytes for shape ", format_shape(entry.shape));
}

}  // namespace

Header read_header(const Source& source) {
  std::string text(read_length(source), '\0');
  source.read_at(kLengthBytes, std::as_writable_bytes(std::span(text)));
  Header header = parse_json(text, source.where);
  header.data_start = kLengthBytes + text.size();
  const uint64_t data_size = source.size - header.data_start;

  uint64_t covered = 0;
  const auto by_range = [](const NamedEntry& named) {
    return std::pair(named.second.begin, named.second.end);
  };
  for (const NamedEntry* named : sorted_entries(header, by_range)) {
    check_range(*named, covered, data_size, source.where);
    covered = named->second.end;
  }
  if (covered != data_size) {
    fail(kTrailing, source.where, "data must end with the last tensor at ",
         covered, ", got ", data_size, " bytes");
  }
  return header;
}

std::string write_header(Header& header, const std::string& where) {
  const auto widest_first = [&](const NamedEntry& named) {
    return &dtype_table().back() -
           &dtype_row(named.second.dtype, where, named.first);
  };
  const auto entries = sorted_entries(header, widest_first);
  uint64_t end = 0;
  for (NamedEntry* named : entries) {
    named->second.begin = end;
    if (__builtin_add_overflow(end, byte_count(*named, where), &end)) {
      fail(kOverflow, where, "tensors must have fewer than 2^64 bytes");
    }
    named->second.end = end;
  }
  std::string text = format_json(header, entries, where);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kMaxHeaderBytes) {
    fail(kHeaderTooLarge, where, "header length must be at most ",
         kMaxHeaderBytes, ", got ", text.size());
  }
  header.data_start = kLengthBytes + text.size();
  return length_field(text.size()) + text;
}

}  // namespace multihead::safetensors
