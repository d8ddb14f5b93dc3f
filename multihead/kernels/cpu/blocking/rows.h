// SPDX-License-Identifier: MIT
//
// Which keys a row of queries sees, and how a tile of rows walks over them.
// Pure arithmetic on 64-bit integers, included by every instruction set.
#pragma once

#include "multihead/kernels/kernels.h"

namespace multihead::kernels {
namespace {

/// Keys begin ≤ j < end; empty when they are equal.
struct Interval {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t round_down(int64_t x, int64_t step) { return x - x % step; }
constexpr int64_t round_up(int64_t x, int64_t step) {
  return round_down(x + step - 1, step);
}
inline Interval overlap(Interval a, Interval b) {
  return {most(a.begin, b.begin), least(a.end, b.end)};
}

/// Keys that exist for batch row b.
inline int64_t key_length(const Attention& a, int64_t b) {
  return a.visibility.key_lengths ? a.visibility.key_lengths[b] : a.Lk;
}

/// The key at which query i of batch row b stands.
inline int64_t position(const Attention& a, int64_t b, int64_t i) {
  const int64_t* offsets = a.visibility.query_offsets;
  return offsets ? i + offsets[b] : i;
}

/// Both ends are monotone in i, for empty intervals too.
inline Interval visible_keys(const Attention& a, int64_t b, int64_t i) {
  const Visibility& v = a.visibility;
  const int64_t length = key_length(a, b), at = position(a, b, i);
  Interval keys{0, length};
  if (v.is_causal) keys.end = least(keys.end, at + 1);
  // Compared by differences: at + right may exceed 64 bits.
  if (v.right >= 0 && length - at > v.right) {
    keys.end = least(keys.end, at + v.right + 1);
  }
  if (v.left >= 0 && at > v.left) keys.begin = least(at - v.left, length);
  keys.end = most(keys.end, keys.begin);
  return keys;
}

/// Every score is a sum of chains of multiply-adds over D; every output a chain
/// over the keys of a split, rescaled where a block ends; splits are merged in
/// ascending order. Blocks and splits start at multiples of these numbers,
/// whatever the tile, the task or the instruction set: they are part of the
/// result. A block of 48 rows is 24 KiB of scores, half an L1 cache; keys and
/// values of a split, D = 128, fill half an L2 cache.
inline constexpr int64_t kKeyBlock = 128;
inline constexpr int64_t kKeySplit = 512;

/// Where a tile stops computing keys for some of its vectors; also where
/// masking stops. Finer grids cost more in the products than they save.
inline constexpr int64_t kKeyStep = 8;

inline constexpr int kMaxVectors = 3;

/// What one vector of rows sees of the keys: some lane, every lane.
struct VectorView {
  Interval some, every;
};

/// Keys of a block that the vectors first ≤ c < last of a tile compute.
/// `plain`: all their lanes see all these keys.
struct Segment {
  Interval keys;
  int first, last;
  bool plain;
};
/// Four ends for each vector, and one more.
inline constexpr int kMaxSegments = 4 * kMaxVectors + 1;

/// Cuts `keys` into segments at multiples of `step`, ascending, leaving out
/// keys that no vector sees. Returns how many. The views' ends must be monotone
/// in c.
inline int cut_segments(Interval keys, int64_t step, const VectorView* views,
                        int vectors, Segment* segments) {
  int count = 0;
  for (int64_t at = keys.begin; at < keys.end;) {
    int64_t next = keys.end;
    const auto stop_at = [&](int64_t key) {
      if (key > at) next = least(next, key);
    };
    for (int c = 0; c < vectors; ++c) {
      stop_at(round_down(views[c].some.begin, step));
      stop_at(round_up(views[c].every.begin, step));
      stop_at(round_down(views[c].every.end, step));
      stop_at(round_up(views[c].some.end, step));
    }
    Segment segment{{at, next}, vectors, 0, true};
    for (int c = 0; c < vectors; ++c) {
      if (overlap(segment.keys, views[c].some).empty()) continue;
      segment.first = c < segment.first ? c : segment.first;
      segment.last = c + 1;
      segment.plain &= views[c].every.begin <= at && next <= views[c].every.end;
    }
    if (segment.first < segment.last) segments[count++] = segment;
    at = next;
  }
  return count;
}

}  // namespace
}  // namespace multihead::kernels
