// SPDX-License-Identifier: MIT
#include "multihead/backend.h"

#include <c10/util/Exception.h>

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

}  // namespace multihead
