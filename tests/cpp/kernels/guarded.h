// SPDX-License-Identifier: MIT
//
// Memory that betrays whoever leaves it: a block that ends right before a page
// that nobody may touch, or starts right after one.
#pragma once

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <utility>
#if __has_include(<valgrind/memcheck.h>)
#include <valgrind/memcheck.h>
#else
#define VALGRIND_MAKE_MEM_UNDEFINED(address, size) \
  static_cast<void>(address), static_cast<void>(size)
#endif

namespace kernel_test {

enum class Edge { kEnd, kStart };

/// `size` bytes of zeros, reserved but not committed until they are touched.
/// What is left of their pages holds a pattern that must not change.
class Guarded {
 public:
  explicit Guarded(size_t size, Edge edge = Edge::kEnd) : size_(size) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    slack_size_ = (page - size % page) % page;
    mapped_ = size + slack_size_ + 2 * page;
    void* base = mmap(nullptr, mapped_, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) fail("mmap");
    base_ = static_cast<std::byte*>(base);
    std::byte* inside = base_ + page;
    if (size > 0 &&
        mprotect(inside, size + slack_size_, PROT_READ | PROT_WRITE) != 0) {
      fail("mprotect");
    }
    if (size == 0) slack_size_ = 0;
    data_ = edge == Edge::kEnd ? inside + slack_size_ : inside;
    slack_ = edge == Edge::kEnd ? inside : inside + size;
    memset(slack_, kPattern, slack_size_);
  }
  Guarded() = default;  ///< nothing, not even pages
  Guarded(Guarded&& other) noexcept { swap(other); }
  Guarded& operator=(Guarded&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Guarded() {
    if (base_) munmap(base_, mapped_);
  }

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

  /// Nobody has written beside the block, as far as its pages reach.
  bool intact() const {
    for (size_t i = 0; i < slack_size_; ++i) {
      if (slack_[i] != std::byte{kPattern}) return false;
    }
    return true;
  }

  /// The contents mean nothing: valgrind reports whatever depends on them.
  void forget() const { VALGRIND_MAKE_MEM_UNDEFINED(data_, size_); }

 private:
  static constexpr unsigned char kPattern = 0xA5;

  static void fail(const char* call) {
    perror(call);
    abort();
  }
  void swap(Guarded& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(data_, other.data_);
    std::swap(slack_, other.slack_);
    std::swap(mapped_, other.mapped_);
    std::swap(size_, other.size_);
    std::swap(slack_size_, other.slack_size_);
  }

  std::byte* base_ = nullptr;
  std::byte* data_ = nullptr;
  std::byte* slack_ = nullptr;
  size_t mapped_ = 0, size_ = 0, slack_size_ = 0;
};

}  // namespace kernel_test
