// SPDX-License-Identifier: MIT
//
// Scratch memory of a kernel. The same code says how much is needed and where
// each buffer lies: without a block an arena only counts. Built with
// AddressSanitizer, 64 bytes behind each buffer may not be touched.
#pragma once

#include <stddef.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include "multihead/kernels/cpu/blocking/visible_keys.h"

namespace multihead::kernels {
namespace {

#ifdef __SANITIZE_ADDRESS__
inline constexpr int64_t kRedZone = 64;
#else
inline constexpr int64_t kRedZone = 0;
#endif

class Arena {
 public:
  explicit Arena(void* block) : block_(static_cast<char*>(block)) {}
  ~Arena() { protect(block_, used_, 0); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// A buffer of `count` numbers, 64-byte aligned; null without a block.
  template <typename T>
  T* take(int64_t count) {
    char* at = block_ ? block_ + used_ : nullptr;
    const int64_t bytes = round_up(count * sizeof(T), 64);
    used_ += static_cast<size_t>(bytes + kRedZone);
    protect(at, static_cast<size_t>(bytes), kRedZone);
    return reinterpret_cast<T*>(at);
  }
  size_t used() const { return used_; }

 private:
  /// Allows `bytes` bytes, and forbids `more` bytes after them.
  static void protect([[maybe_unused]] char* at, [[maybe_unused]] size_t bytes,
                      [[maybe_unused]] size_t more) {
#ifdef __SANITIZE_ADDRESS__
    if (!at) return;
    ASAN_UNPOISON_MEMORY_REGION(at, bytes);
    ASAN_POISON_MEMORY_REGION(at + bytes, more);
#endif
  }

  char* block_;
  size_t used_ = 0;
};

}  // namespace
}  // namespace multihead::kernels
