// SPDX-License-Identifier: MIT
#include "multihead/safetensors/header.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "multihead/text/printable.h"

namespace multihead::safetensors {
namespace {

using enum SafetensorsFault;

static_assert(std::endian::native == std::endian::little,
              "the format is little-endian and numbers are copied as they are");

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;

using NamedEntry = std::pair<const std::string, Entry>;

// ---- Dtypes ----------------------------------------------------------------

struct DtypeRow {
  std::string_view name;
  c10::ScalarType dtype;
  int64_t bytes;
};

/// Every dtype of the format that torch has, in the format's order.
constexpr std::array<DtypeRow, 19> kDtypes = {{
    {"BOOL", c10::ScalarType::Bool, 1},
    {"U8", c10::ScalarType::Byte, 1},
    {"I8", c10::ScalarType::Char, 1},
    {"F8_E5M2", c10::ScalarType::Float8_e5m2, 1},
    {"F8_E4M3", c10::ScalarType::Float8_e4m3fn, 1},
    {"F8_E8M0", c10::ScalarType::Float8_e8m0fnu, 1},
    {"F8_E4M3FNUZ", c10::ScalarType::Float8_e4m3fnuz, 1},
    {"F8_E5M2FNUZ", c10::ScalarType::Float8_e5m2fnuz, 1},
    {"I16", c10::ScalarType::Short, 2},
    {"U16", c10::ScalarType::UInt16, 2},
    {"F16", c10::ScalarType::Half, 2},
    {"BF16", c10::ScalarType::BFloat16, 2},
    {"I32", c10::ScalarType::Int, 4},
    {"U32", c10::ScalarType::UInt32, 4},
    {"F32", c10::ScalarType::Float, 4},
    {"C64", c10::ScalarType::ComplexFloat, 8},
    {"F64", c10::ScalarType::Double, 8},
    {"I64", c10::ScalarType::Long, 8},
    {"U64", c10::ScalarType::UInt64, 8},
}};

std::string dtype_names() {
  std::string names;
  for (const DtypeRow& row : kDtypes) {
    names.append(names.empty() ? "" : ", ").append(row.name);
  }
  return names;
}

/// The row of a dtype; kDtype if the format or this table lacks it.
const DtypeRow& dtype_row(c10::ScalarType dtype, const std::string& where,
                          const std::string& tensor) {
  const auto row = std::ranges::find(kDtypes, dtype, &DtypeRow::dtype);
  if (row == kDtypes.end()) {
    fail(kDtype, where, "tensor ", quote(tensor), ": dtype must be one of ",
         dtype_names(), ", got ", c10::toString(dtype));
  }
  return *row;
}

// ---- JSON ------------------------------------------------------------------

// No operation of torch takes more dimensions; without a limit, a shape of ones
// would take four times its bytes in the file.
constexpr size_t kMaxDims = 64;
constexpr std::string_view kMetadataKey = "__metadata__";

/// Position of the first byte that is not UTF-8, or npos.
size_t find_invalid_utf8(std::string_view text) {
  for (std::string_view rest = text; !rest.empty();) {
    const size_t at = text.size() - rest.size();
    if (take_code_point(rest) == kNoCodePoint) return at;
  }
  return std::string_view::npos;
}

/// Takes the header's JSON event by event. Only what the format allows moves it
/// on, so nothing nests deeper than a shape and no document tree is built. The
/// events that nlohmann::json would raise exceptions for end in parse_error.
class HeaderEvents final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderEvents(const std::string& where) : where_(where) {}
  Header take() { return std::move(header_); }

  bool null() override { reject("null"); }
  bool boolean(bool value) override { reject(value ? "true" : "false"); }
  bool number_integer(int64_t value) override { reject(std::to_string(value)); }
  bool number_float(double, const std::string& text) override {
    reject(text.substr(0, 40));
  }
  bool binary(binary_t&) override { reject("bytes"); }

  bool number_unsigned(uint64_t value) override {
    constexpr auto kMaxSize =
        static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (place_ == Place::kShape && value <= kMaxSize &&
        entry_->shape.size() < kMaxDims) {
      entry_->shape.push_back(static_cast<int64_t>(value));
    } else if (place_ == Place::kOffsets && offsets_ < 2) {
      (offsets_++ == 0 ? entry_->begin : entry_->end) = value;
    } else {
      reject(std::to_string(value));
    }
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::kMetadata) {
      header_.metadata[key_] = std::move(value);
      return true;
    }
    if (place_ != Place::kEntry || key_ != "dtype") reject(quote(value));
    const auto row = std::ranges::find(kDtypes, value, &DtypeRow::name);
    if (row == kDtypes.end()) reject(quote(value));
    entry_->dtype = row->dtype;
    return true;
  }

  bool start_object(size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
    } else if (place_ == Place::kTop && key_ == kMetadataKey) {
      place_ = Place::kMetadata;
    } else if (place_ == Place::kTop) {
      place_ = Place::kEntry;
      name_ = key_;
      entry_ = &header_.tensors[name_];
      fields_.clear();
      offsets_ = 0;
    } else {
      reject("an object");
    }
    return true;
  }

  bool key(std::string& key) override {
    key_ = std::move(key);
    if (place_ == Place::kEntry) {
      check_field();
    } else if (place_ == Place::kMetadata) {
      check_unique(!header_.metadata.contains(key_));
    } else {
      check_unique(!header_.tensors.contains(key_) &&
                   !(key_ == kMetadataKey && has_metadata_));
      has_metadata_ = has_metadata_ || key_ == kMetadataKey;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kEntry && fields_.size() < 3) {
      fail(kTensorInfo, where_, "tensor ", quote(name_),
           " must have dtype, shape and data_offsets, got ", fields_.size(),
           " of them");
    }
    place_ = Place::kTop;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ == Place::kEntry && key_ == "shape") {
      place_ = Place::kShape;
    } else if (place_ == Place::kEntry && key_ == "data_offsets") {
      place_ = Place::kOffsets;
    } else {
      reject("an array");
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::kOffsets && offsets_ < 2) {
      reject(std::to_string(offsets_) + " of them");
    }
    place_ = Place::kEntry;
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::json::exception&) override {
    fail(kHeaderJson, where_,
         "header must be one JSON object, got an error at ", "byte ", position);
  }

 private:
  enum class Place { kStart, kTop, kMetadata, kEntry, kShape, kOffsets };

  void check_field() {
    if (key_ != "dtype" && key_ != "shape" && key_ != "data_offsets") {
      fail(kTensorInfo, where_, "tensor ", quote(name_),
           " must have dtype, shape and data_offsets, got ", quote(key_));
    }
    check_unique(fields_.insert(key_).second);
  }

  void check_unique(bool unique) {
    if (unique) return;
    fail(kHeaderJson, where_, "header must not repeat a key, got ", quote(key_),
         " twice", place_ == Place::kEntry ? " in tensor " + quote(name_) : "");
  }

  /// The value that came does not belong where it stands.
  [[noreturn]] void reject(const std::string& got) {
    const std::string tensor = "tensor " + quote(name_) + ": ";
    if (place_ == Place::kMetadata) {
      fail(kMetadata, where_, "__metadata__: ", quote(key_),
           " must be a string, got ", got);
    }
    if (place_ == Place::kTop && key_ == kMetadataKey) {
      fail(kMetadata, where_, "__metadata__ must be an object, got ", got);
    }
    if (place_ == Place::kTop) {
      fail(kTensorInfo, where_, "tensor ", quote(key_),
           " must be an object, got ", got);
    }
    if (key_ == "dtype") {
      fail(kDtype, where_, tensor, "dtype must be one of ", dtype_names(),
           ", got ", got);
    }
    if (key_ == "shape") {
      fail(kShape, where_, tensor, "shape must be an array of at most ",
           kMaxDims, " integers in [0, 2^63), got ", got);
    }
    fail(kOffsets, where_, tensor,
         "data_offsets must be an array of two unsigned integers, got ", got);
  }

  const std::string& where_;
  Header header_;
  Place place_ = Place::kStart;
  std::string key_;   ///< last key, at any level
  std::string name_;  ///< tensor that entry_ describes
  Entry* entry_ = nullptr;
  std::set<std::string> fields_;  ///< keys of entry_ so far
  int offsets_ = 0;               ///< data_offsets of entry_ so far
  bool has_metadata_ = false;
};

/// Header text to entries and metadata.
Header parse_json(const std::string& text, const std::string& where) {
  if (!text.starts_with('{')) {
    fail(kHeaderStart, where, "header must start with '{', got ",
         text.empty() ? "no header" : quote(text.substr(0, 1)));
  }
  if (const size_t at = find_invalid_utf8(text); at != std::string::npos) {
    fail(kHeaderUtf8, where, "header must be UTF-8, got an invalid byte at ",
         at);
  }
  // nlohmann::json takes a NUL byte for the end of its input.
  if (const size_t at = text.find('\0'); at != std::string::npos) {
    fail(kHeaderJson, where,
         "header must be one JSON object, got a NUL at byte ", at);
  }
  HeaderEvents events(where);
  nlohmann::json::sax_parse(text, &events);
  return events.take();
}

std::string json_string(const std::string& text, const std::string& where) {
  if (find_invalid_utf8(text) != std::string::npos) {
    fail(kHeaderUtf8, where, "names and metadata must be UTF-8, got ",
         quote(text));
  }
  return nlohmann::json(text).dump();
}

/// The inverse: metadata, then the header's entries in the order given.
std::string format_json(const Header& header,
                        std::span<NamedEntry* const> entries,
                        const std::string& where) {
  std::string text = "{";
  const auto add_key = [&](const std::string& key) {
    text += text.ends_with('{') ? "" : ",";
    text += json_string(key, where) + ":";
  };
  if (!header.metadata.empty()) {
    add_key(std::string(kMetadataKey));
    text += "{";
    for (const auto& [key, value] : header.metadata) {
      add_key(key);
      text += json_string(value, where);
    }
    text += "}";
  }
  for (const NamedEntry* named : entries) {
    const auto& [name, entry] = *named;
    if (name == kMetadataKey) {
      fail(kMetadata, where, "tensor name must not be \"__metadata__\"");
    }
    if (entry.shape.size() > kMaxDims) {
      fail(kShape, where, "tensor ", quote(name), ": shape must have at most ",
           kMaxDims, " sizes, got ", entry.shape.size());
    }
    add_key(name);
    const nlohmann::ordered_json described = {
        {"dtype", dtype_row(entry.dtype, where, name).name},
        {"shape", entry.shape},
        {"data_offsets", {entry.begin, entry.end}}};
    text += described.dump();
  }
  return text + "}";
}

// ---- Bytes and ranges ------------------------------------------------------

/// Whether the first bytes of a file are text: no safetensors file begins so.
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
  uint64_t length = 0;
  source.read_at(0, std::as_writable_bytes(std::span(&length, 1)));
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

std::string format_shape(std::span<const int64_t> shape) {
  return nlohmann::json(shape).dump();
}

std::string quote(std::string_view text) {
  constexpr size_t kMaxShown = 80;
  const nlohmann::json shown = std::string(text.substr(0, kMaxShown));
  return shown.dump(-1, ' ', /*ensure_ascii=*/true,
                    nlohmann::json::error_handler_t::replace) +
         (text.size() > kMaxShown ? "..." : "");
}

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
    return &kDtypes.back() - &dtype_row(named.second.dtype, where, named.first);
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
  const uint64_t length = text.size();
  header.data_start = kLengthBytes + length;
  return text.insert(0, reinterpret_cast<const char*>(&length), kLengthBytes);
}

}  // namespace multihead::safetensors
