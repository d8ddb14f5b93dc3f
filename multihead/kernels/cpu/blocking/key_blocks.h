// SPDX-License-Identifier: MIT
//
// The walk over keys.
#pragma once

#include "multihead/kernels/cpu/blocking/visible_keys.h"

namespace multihead::kernels {
namespace {

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
struct LaneVisibility {
  Interval any, all;
};

/// Keys of a block that the vectors first ≤ c < last of a tile compute.
/// `plain`: all their lanes see all these keys.
struct Segment {
  Interval keys;
  int first, last;
  bool fully_visible;
};
/// Four ends for each vector, and one more.
inline constexpr int kMaxSegments = 4 * kMaxVectors + 1;

/// Cuts `keys` into segments at multiples of `step`, ascending, leaving out
/// keys that no vector sees. Returns how many. The views' ends must be monotone
/// in c.
inline int cut_segments(Interval keys, int64_t step,
                        const LaneVisibility* views, int vectors,
                        Segment* segments) {
  int count = 0;
  for (int64_t at = keys.begin; at < keys.end;) {
    int64_t next = keys.end;
    const auto stop_at = [&](int64_t key) {
      if (key > at) next = min(next, key);
    };
    for (int c = 0; c < vectors; ++c) {
      stop_at(round_down(views[c].any.begin, step));
      stop_at(round_up(views[c].all.begin, step));
      stop_at(round_down(views[c].all.end, step));
      stop_at(round_up(views[c].any.end, step));
    }
    Segment segment{{at, next}, vectors, 0, true};
    for (int c = 0; c < vectors; ++c) {
      if (overlap(segment.keys, views[c].any).empty()) continue;
      segment.first = c < segment.first ? c : segment.first;
      segment.last = c + 1;
      segment.fully_visible &=
          views[c].all.begin <= at && next <= views[c].all.end;
    }
    if (segment.first < segment.last) segments[count++] = segment;
    at = next;
  }
  return count;
}

}  // namespace
}  // namespace multihead::kernels
