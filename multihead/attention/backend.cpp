// SPDX-License-Identifier: MIT
#include "multihead/backend.h"

#include <c10/util/Exception.h>

#include <cstdlib>

#include "multihead/attention/isa.h"

namespace multihead {
namespace {

thread_local Backend thread_backend = Backend::kAuto;

}  // namespace

Backend backend_from_name(std::string_view name) {
  if (name == "auto") return Backend::kAuto;
  if (name == "exact") return Backend::kExact;
  if (name == "fused") return Backend::kFused;
  TORCH_CHECK_VALUE(false,
                    "backend must be \"auto\", \"exact\" or \"fused\", got \"",
                    name, "\"");
}

Backend current_backend() { return thread_backend; }

BackendGuard::BackendGuard(Backend backend) : previous_(thread_backend) {
  thread_backend = backend;
}

BackendGuard::~BackendGuard() { thread_backend = previous_; }

kernels::Isa current_isa() {
  const char* error = nullptr;
  const kernels::Isa isa = kernels::chosen_isa(&error);
  TORCH_CHECK(!error, error, ", got \"", std::getenv("MULTIHEAD_ISA"), "\"");
  return isa;
}

std::string kernel_isa() { return kernels::name_of(current_isa()); }

std::vector<std::string> kernel_isas() {
  std::vector<std::string> names;
  for (const kernels::Isa isa : kernels::kAllIsas) {
    if (kernels::cpu_has(isa)) names.emplace_back(kernels::name_of(isa));
  }
  return names;
}

}  // namespace multihead
