// SPDX-License-Identifier: MIT
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "multihead/safetensors.h"
#include "multihead/safetensors/file.h"
#include "multihead/safetensors/header_json.h"

namespace multihead {
namespace {

using safetensors::Entry;
using safetensors::fail;
using safetensors::Header;
using safetensors::quote;
using safetensors::Source;
using enum SafetensorsFault;

static_assert(std::endian::native == std::endian::little,
              "the format is little-endian and tensors are copied as they are");

std::span<const std::byte> bytes_of(const at::Tensor& contiguous) {
  return {static_cast<const std::byte*>(contiguous.const_data_ptr()),
          contiguous.nbytes()};
}

at::Tensor read_tensor(const Source& source, uint64_t offset,
                       const std::string& name, const Entry& entry) {
  at::Tensor tensor =
      at::empty(entry.shape, at::TensorOptions(at::kCPU).dtype(entry.dtype));
  source.read_at(offset, {static_cast<std::byte*>(tensor.mutable_data_ptr()),
                          tensor.nbytes()});
  // Any other value would be undefined behaviour wherever it is read as bool.
  if (entry.dtype == at::kBool) {
    const auto is_bool = [](std::byte byte) { return byte <= std::byte{1}; };
    const auto bytes = bytes_of(tensor);
    if (const auto bad = std::ranges::find_if_not(bytes, is_bool);
        bad != bytes.end()) {
      fail(kValue, source.where, "tensor ", quote(name),
           ": BOOL must be 0 or 1, got ", std::to_integer<int>(*bad), " at ",
           bad - bytes.begin());
    }
  }
  return tensor;
}

Safetensors read_content(const Source& source) {
  Header header = safetensors::read_header(source);
  Safetensors content{.metadata = std::move(header.metadata)};
  for (const auto& [name, entry] : header.tensors) {
    content.tensors.emplace(
        name,
        read_tensor(source, header.data_start + entry.begin, name, entry));
  }
  return content;
}

Entry describe(const std::string& name, const at::Tensor& tensor,
               const std::string& where) {
  if (!tensor.defined() || tensor.layout() != at::kStrided ||
      tensor.is_meta()) {
    fail(kTensorInfo, where, "tensor ", quote(name),
         ": must be dense and have values, got ",
         !tensor.defined()  ? "an undefined tensor"
         : tensor.is_meta() ? "a meta tensor"
                            : c10::str("layout ", tensor.layout()));
  }
  return {.dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()};
}

/// The values in row-major order in CPU memory, copied only if need be.
at::Tensor materialise(const at::Tensor& tensor) {
  return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous();
}

}  // namespace

Safetensors read_safetensors(const std::string& path) {
  const std::string where = "read_safetensors: " + path;
  const safetensors::InputFile file(path, where);
  return read_content(
      {.where = where,
       .size = file.size(),
       .read_at = [&](uint64_t offset, std::span<std::byte> to) {
         file.read_at(offset, to);
       }});
}

Safetensors parse_safetensors(std::span<const std::byte> bytes) {
  return read_content(
      {.where = "parse_safetensors: memory",
       .size = bytes.size(),
       .read_at = [&](uint64_t offset, std::span<std::byte> to) {
         std::ranges::copy(bytes.subspan(offset, to.size()), to.begin());
       }});
}

void write_safetensors(const std::string& path, const Safetensors& content) {
  const std::string where = "write_safetensors: " + path;
  Header header{.metadata = content.metadata};
  for (const auto& [name, tensor] : content.tensors) {
    header.tensors.emplace(name, describe(name, tensor, where));
  }
  const std::string start = safetensors::write_header(header, where);
  safetensors::OutputFile file(path, where);
  file.write_at(0, std::as_bytes(std::span(start)));
  for (const auto& [name, entry] : header.tensors) {
    file.write_at(header.data_start + entry.begin,
                  bytes_of(materialise(content.tensors.at(name))));
  }
  file.commit();
}

}  // namespace multihead
