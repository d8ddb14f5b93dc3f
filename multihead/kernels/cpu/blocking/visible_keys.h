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

/// Queries before batch row b, as their rows lie in memory.
inline int64_t first_query(const AttentionArgs& a, int64_t b) {
  return a.query.starts ? a.query.starts[b] : b * a.Lq;
}

/// Queries that exist for batch row b.
inline int64_t query_length(const AttentionArgs& a, int64_t b) {
  return first_query(a, b + 1) - first_query(a, b);
}

/// The place of query i of (b, h) where there is one number for each: in
/// (B, H, Lq), or (H, T) of ragged queries.
inline int64_t query_index(const AttentionArgs& a, int64_t b, int64_t h,
                           int64_t i) {
  const int64_t* starts = a.query.starts;
  return starts ? h * starts[a.B] + starts[b] + i : (b * a.H + h) * a.Lq + i;
}

/// Keys that exist for batch row b.
inline int64_t key_length(const AttentionArgs& a, int64_t b) {
  return a.visibility.key_lengths ? a.visibility.key_lengths[b] : a.Lk;
}

/// Key rows of batch row b that have a place in memory: those from its length
/// on are never read, and their gradient is 0.
inline int64_t key_rows(const AttentionArgs& a, int64_t b) {
  const int64_t* starts = a.key.starts;
  return starts ? starts[b + 1] - starts[b] : a.Lk;
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
