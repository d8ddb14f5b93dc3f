// SPDX-License-Identifier: MIT
#include "multihead/attention/provider.h"

#include <utility>

namespace multihead {
namespace {

thread_local const Provider* thread_provider = nullptr;

}  // namespace

const Provider* current_provider() { return thread_provider; }

const Provider* set_provider(const Provider* provider) {
  return std::exchange(thread_provider, provider);
}

void check_no_provider(const char* function, const char* what) {
  if (thread_provider == nullptr) return;
  TORCH_CHECK(false, function, ": ", thread_provider->name(), " has no ", what);
}

}  // namespace multihead
