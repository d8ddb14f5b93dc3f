// SPDX-License-Identifier: MIT
//
// Scratch memory of a kernel: sized and handed out by the same code.
#pragma once

#include <stddef.h>

#include "multihead/kernels/cpu/blocking/visible_keys.h"

namespace multihead::kernels {
namespace {

/// Memory handed out from a block, 64-byte aligned; without a block it only
/// counts, so that one function says both what is needed and where it lies.
class Arena {
 public:
  explicit Arena(void* block) : block_(static_cast<char*>(block)) {}

  template <typename T>
  T* take(int64_t count) {
    char* at = block_ ? block_ + used_ : nullptr;
    used_ += static_cast<size_t>(round_up(count * sizeof(T), 64));
    return reinterpret_cast<T*>(at);
  }
  size_t used() const { return used_; }

 private:
  char* block_;
  size_t used_ = 0;
};

}  // namespace
}  // namespace multihead::kernels
