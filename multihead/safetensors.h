// SPDX-License-Identifier: MIT
//
// The safetensors format (https://github.com/huggingface/safetensors): an
// 8-byte little-endian header length, a JSON header, the tensors' bytes.
// Reading never runs code from the file, never maps it, and allocates no tensor
// before the whole header has proved consistent with the file's size.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <span>
#include <string>

#include "multihead/safetensors_error.h"

namespace torch::nn {
class Module;
}

namespace [[gnu::visibility("default")]] multihead {

/// The content of a file: tensors by name, and free text.
struct Safetensors {
  std::map<std::string, at::Tensor> tensors = {};
  std::map<std::string, std::string> metadata = {};
};

/// Reads a whole file into new CPU tensors. BOOL U8 I8 I16 U16 I32 U32 I64 U64
/// F16 BF16 F32 F64 C64 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ.
/// Stricter than the reference where the format's text is: '{' comes first, no
/// key twice, nothing unknown in an entry. Throws SafetensorsError.
Safetensors read_safetensors(const std::string& path);

/// The same from memory. The tensors own copies.
Safetensors parse_safetensors(std::span<const std::byte> bytes);

/// Writes atomically: a temporary file beside `path`, fsync, rename, fsync of
/// the directory. On failure an existing file stays as it was and nothing is
/// left behind. Tensors may lie on any device and have any strides; memory that
/// tensors share is written for each. The same content gives the same bytes,
/// those of Python's safetensors.torch.save_file (which writes several metadata
/// keys in random order; here they are sorted). Throws SafetensorsError.
void write_safetensors(const std::string& path, const Safetensors& content);

/// Copies a file's tensors into the module's parameters and buffers by name
/// (those of the module's state_dict in Python). Every name must be on both
/// sides and every shape equal, or nothing is changed and SafetensorsError
/// names all differences; values are converted to the module's dtype and device
/// where c10::canCast allows. A tensor that the module has under several names
/// needs one of them in the file; those that are there must agree.
void load_safetensors(torch::nn::Module& module, const std::string& path);

/// Writes the module's parameters and buffers under their names, as its
/// state_dict in Python has them: a shared tensor under each of its names.
void save_safetensors(const torch::nn::Module& module, const std::string& path);

}  // namespace multihead
