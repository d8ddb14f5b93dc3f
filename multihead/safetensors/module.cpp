// SPDX-License-Identifier: MIT
#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <cstring>

#include "multihead/safetensors.h"
#include "multihead/safetensors/header_json.h"

namespace multihead {
namespace {

using safetensors::fail;
using safetensors::format_shape;
using safetensors::quote;
using enum SafetensorsFault;

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
class Differences {
 public:
  void missing(const std::string& name) { add(missing_, quote(name)); }
  void unexpected(const std::string& name) { add(unexpected_, quote(name)); }
  void misfit(const std::string& name, const std::string& why) {
    add(misfits_, quote(name) + " " + why);
  }

  void compare(const std::string& name, const at::Tensor& source,
               const at::Tensor& target) {
    if (source.sizes() != target.sizes()) {
      misfit(name, c10::str("must have shape ", format_shape(target.sizes()),
                            ", got ", format_shape(source.sizes())));
    }
    if (!c10::canCast(source.scalar_type(), target.scalar_type())) {
      misfit(name,
             c10::str("must have a dtype that casts to ", target.scalar_type(),
                      ", got ", source.scalar_type()));
    }
  }

  void throw_if_any(const std::string& where) const {
    std::string all;
    const auto add_list = [&](const char* title, const std::string& list) {
      if (!list.empty()) all += c10::str(all.empty() ? "" : "; ", title, list);
    };
    add_list("missing: ", missing_);
    add_list("unexpected: ", unexpected_);
    add_list("", misfits_);
    if (all.empty()) return;
    fail(missing_.empty() ? kMismatch : kMissing, where,
         "tensors must be those of the module, got ", all);
  }

 private:
  static void add(std::string& list, const std::string& item) {
    list += (list.empty() ? "" : ", ") + item;
  }
  std::string missing_, unexpected_, misfits_;
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
      differences.unexpected(name);
      continue;
    }
    differences.compare(name, source, target->second);
    const auto [first, is_first] =
        given.emplace(target->second.unsafeGetTensorImpl(), source);
    if (!is_first && !same_values(first->second, source)) {
      differences.misfit(name,
                         "must equal the same tensor under its other name");
    }
  }
  for (const auto& [name, target] : targets) {
    if (!given.contains(target.unsafeGetTensorImpl()))
      differences.missing(name);
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
