// SPDX-License-Identifier: MIT
//
// Which keys a query sees: causal order, window, lengths and offsets are the
// two ends of one interval. Pure arithmetic on 64-bit integers.
#pragma once

#include "multihead/kernels/kernels.h"

namespace multihead::kernels {
namespace {

/// Keys begin ≤ j < end; empty when they are equal.
struct Interval {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t round_down(int64_t x, int64_t step) { return x - x % step; }
constexpr int64_t round_up(int64_t x, int64_t step) {
  return round_down(x + step - 1, step);
}
inline Interval overlap(Interval a, Interval b) {
  return {max(a.begin, b.begin), min(a.end, b.end)};
}

/// Keys that exist for batch row b.
inline int64_t key_length(const AttentionArgs& a, int64_t b) {
  return a.visibility.key_lengths ? a.visibility.key_lengths[b] : a.Lk;
}

/// The key at which query i of batch row b stands.
inline int64_t position(const AttentionArgs& a, int64_t b, int64_t i) {
  const int64_t* offsets = a.visibility.query_offsets;
  return offsets ? i + offsets[b] : i;
}

/// Both ends are monotone in i, for empty intervals too.
inline Interval visible_keys(const AttentionArgs& a, int64_t b, int64_t i) {
  const Visibility& v = a.visibility;
  const int64_t length = key_length(a, b), at = position(a, b, i);
  Interval keys{0, length};
  if (v.is_causal) keys.end = min(keys.end, at + 1);
  // Compared by differences: at + right may exceed 64 bits.
  if (v.right >= 0 && length - at > v.right) {
    keys.end = min(keys.end, at + v.right + 1);
  }
  if (v.left >= 0 && at > v.left) keys.begin = min(at - v.left, length);
  keys.end = max(keys.end, keys.begin);
  return keys;
}

}  // namespace
}  // namespace multihead::kernels
