// SPDX-License-Identifier: MIT
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "multihead/safetensors.h"
#include "multihead/safetensors/header.h"

namespace multihead {
namespace {

using safetensors::Entry;
using safetensors::fail;
using safetensors::format_shape;
using safetensors::Header;
using safetensors::quote;
using safetensors::Source;
using enum SafetensorsFault;

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

// ---- Modules ---------------------------------------------------------------

namespace {

using NamedTensors = std::map<std::string, at::Tensor>;

NamedTensors named_tensors(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& named :
       {module.named_parameters(), module.named_buffers()}) {
    for (const auto& [name, tensor] : named.pairs()) {
      if (tensor.defined()) tensors.emplace(name, tensor);
    }
  }
  return tensors;
}

bool same_values(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

/// What a file lacks, and what does not fit.
struct Differences {
  std::string missing, unexpected, misfits;

  static void add(std::string& list, const std::string& name,
                  const std::string& why = "") {
    list += (list.empty() ? "" : ", ") + quote(name) + why;
  }

  void compare(const std::string& name, const at::Tensor& source,
               const at::Tensor& target) {
    if (source.sizes() != target.sizes()) {
      add(misfits, name,
          c10::str(" must have shape ", format_shape(target.sizes()), ", got ",
                   format_shape(source.sizes())));
    }
    if (!c10::canCast(source.scalar_type(), target.scalar_type())) {
      add(misfits, name,
          c10::str(" must have a dtype that casts to ", target.scalar_type(),
                   ", got ", source.scalar_type()));
    }
  }

  void throw_if_any(const std::string& where) const {
    std::string all;
    for (const auto& [title, list] : {std::pair("missing: ", missing),
                                      {"unexpected: ", unexpected},
                                      {"", misfits}}) {
      if (!list.empty()) all += c10::str(all.empty() ? "" : "; ", title, list);
    }
    if (all.empty()) return;
    fail(missing.empty() ? kMismatch : kMissing, where,
         "tensors must be those of the module, got ", all);
  }
};

}  // namespace

void load_safetensors(torch::nn::Module& module, const std::string& path) {
  const std::string where = "load_safetensors: " + path;
  const NamedTensors targets = named_tensors(module);
  const NamedTensors sources = read_safetensors(path).tensors;
  // The file's tensor for each of the module's, whatever names they share.
  std::map<const c10::TensorImpl*, at::Tensor> given;
  Differences differences;
  for (const auto& [name, source] : sources) {
    const auto target = targets.find(name);
    if (target == targets.end()) {
      Differences::add(differences.unexpected, name);
      continue;
    }
    differences.compare(name, source, target->second);
    const auto [first, is_first] =
        given.emplace(target->second.unsafeGetTensorImpl(), source);
    if (!is_first && !same_values(first->second, source)) {
      Differences::add(differences.misfits, name,
                       " must equal the same tensor under its other name");
    }
  }
  for (const auto& [name, target] : targets) {
    if (!given.contains(target.unsafeGetTensorImpl())) {
      Differences::add(differences.missing, name);
    }
  }
  differences.throw_if_any(where);

  const at::NoGradGuard no_grad;
  for (const auto& [name, target] : targets) {
    target.copy_(given.at(target.unsafeGetTensorImpl()));
  }
}

void save_safetensors(const torch::nn::Module& module,
                      const std::string& path) {
  write_safetensors(path, {.tensors = named_tensors(module)});
}

}  // namespace multihead
