// SPDX-License-Identifier: MIT
//
// The safetensors format (https://github.com/huggingface/safetensors): an
// 8-byte little-endian header length, a JSON header, the tensors' bytes. Reading
// never runs code from the file, never maps it, and never allocates more than
// the file's own size.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <span>
#include <stdexcept>
#include <string>

namespace torch::nn {
class Module;
}

namespace [[gnu::visibility("default")]] multihead {

/// What is wrong with a file; one kind per rule of the format.
enum class SafetensorsFault {
  kUnreadable,        ///< the file cannot be opened, read or written
  kHeaderTooSmall,    ///< fewer than 8 bytes
  kHeaderTooLarge,    ///< header length above 100,000,000
  kHeaderLength,      ///< header length beyond the end of the file
  kHeaderStart,       ///< header does not start with '{'
  kHeaderUtf8,        ///< header is not UTF-8
  kHeaderJson,        ///< header is not JSON, nests too deep, repeats a key
  kMetadata,          ///< __metadata__ is not an object of strings
  kTensorInfo,        ///< an entry lacks or mistypes dtype, shape, data_offsets
  kDtype,             ///< unknown dtype
  kShape,             ///< a size is negative or too large
  kOverflow,          ///< the product of sizes overflows
  kOffsets,           ///< begin > end, a hole, an overlap, or beyond the data
  kSize,              ///< bytes do not equal shape × dtype
  kTrailing,          ///< data after the last tensor
  kMissing,           ///< a tensor that was asked for is not there
  kMismatch,          ///< name, shape or dtype does not fit the module
};

/// Thrown by everything in this file. what() names file, tensor and values.
class SafetensorsError : public std::runtime_error {
 public:
  SafetensorsError(SafetensorsFault fault, const std::string& what)
      : std::runtime_error(what), fault_(fault) {}
  SafetensorsFault fault() const { return fault_; }

 private:
  SafetensorsFault fault_;
};

/// The content of a file: tensors by name, and free text.
struct Safetensors {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

/// Reads a whole file into new CPU tensors. BOOL U8 I8 I16 U16 I32 U32 I64 U64
/// F16 BF16 F32 F64 F8_E4M3 F8_E5M2 C64; throws SafetensorsError.
Safetensors read_safetensors(const std::string& path);

/// The same from memory; what the fuzzer drives. The tensors own copies.
Safetensors parse_safetensors(std::span<const std::byte> bytes);

/// Writes atomically: a temporary file beside `path`, fsync, rename. On failure
/// an existing file stays as it was. Tensors may lie on any device and have any
/// strides. Bytes are deterministic (dtype width descending, then name).
void write_safetensors(const std::string& path, const Safetensors& content);

/// Copies a file's tensors into the module's parameters and buffers by name
/// (those of the module's state_dict in Python). Every name must be on both
/// sides and every shape equal, or nothing is changed and SafetensorsError
/// names all differences; values are converted to the module's dtype and device.
void load_safetensors(torch::nn::Module& module, const std::string& path);

/// Writes the module's parameters and buffers under their names.
void save_safetensors(const torch::nn::Module& module,
                      const std::string& path);

}  // namespace multihead
