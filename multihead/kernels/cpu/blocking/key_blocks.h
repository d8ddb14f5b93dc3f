// SPDX-License-Identifier: MIT
//
// The walk over keys, which every kernel takes as FlashAttention does (Dao et
// al., "FlashAttention: Fast and Memory-Efficient Exact Attention", 2022): a
// tile of queries stays while the keys come block by block, and the scores of a
// block never leave the L1 cache.
//
//                         keys →
//             ├──────── split ────────┤├──────── split ────────┤
//             ┌─────┬─────┬─────┬─────┬─────┬─────┬─────┬─────┐
//   a tile ↓  │█████│█████│█████│███░░│     │     │     │     │   vector 0
//   of        │█████│█████│█████│█████│░░   │     │     │     │   vector 1
//   queries   │█████│█████│█████│█████│██░░░│     │     │     │   vector 2
//             └─────┴─────┴─────┴─────┴─────┴─────┴─────┴─────┘
//             │block│            └─┴─ segments of a block
//
//   █ every row of the vector sees the key   ░ only some do   (blank) none does
//
// A split (kKeySplit) is what all tiles of a task read before the next one, so
// that it comes from the L2 cache, or is packed once. As in split-KV decoding
// each split has an online softmax of its own, and they are merged in ascending
// order. A block (kKeyBlock) is computed at once: score_block (scores.h) makes
// its scores, except those that no vector sees. It cuts the block into segments
// where a vector begins or ends to see keys; only segments that are not fully
// visible are masked. What follows takes one vector of rows at a time.
#pragma once

#include "multihead/kernels/cpu/blocking/visible_keys.h"
#include "multihead/kernels/cpu/simd/simd.h"

namespace multihead::kernels {
namespace {

/// Splits and blocks begin at multiples of these numbers, whatever the tile,
/// the task or the instruction set: each score is a sum of chains over D, each
/// output a chain over the keys of a split, rescaled where a block ends, so
/// these numbers are part of the result. The scores of 48 rows and a block are
/// 24 KiB, half an L1 cache; keys and values of a split, D = 128, fill half an
/// L2 cache.
inline constexpr int64_t kKeyBlock = 128;
inline constexpr int64_t kKeySplit = 512;

/// Segments begin and end at multiples of it. A finer grid would cost more in
/// the GEMMs than it saves.
inline constexpr int64_t kKeyStep = 8;

/// Vectors of rows of a tile.
inline constexpr int kMaxVectors = 3;

/// Distance between rows of a tile's scratch, however many vectors it uses: a
/// constant, because address arithmetic inside the GEMMs costs 5 %.
template <class F>
inline constexpr int64_t kTileLanes = kMaxVectors * F::kLanes;

/// Keys that any row of a vector sees, and those that all its rows see.
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

/// Cuts `keys` into segments at multiples of `step`, in ascending order; keys
/// that no vector sees are in none. Returns their number. The ends of `views`
/// must be monotone in c.
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

/// The scores of a tile and a block of keys: that of key j and row r lies at
/// (j − anchor)·kTileLanes + r, in the segments only.
struct ScoreBlock {
  int64_t anchor = 0;
  Segment segments[kMaxSegments];
  int count = 0;
  double scale = 1;  ///< that scores still lack
};

/// One vector of rows and the keys of one segment. Scores of one key after the
/// other lie at `begin`, begin + kTileLanes and so on, before `end`.
struct VectorSpan {
  Interval keys;
  int c;  ///< the vector: rows c·kLanes and following
  int64_t begin, end;
};

/// Visits `keys` block by block: what of them lies between two multiples of
/// `step`.
template <class Visit>
SIMD_INLINE void for_each_key_block(Interval keys, int64_t step,
                                    const Visit& visit) {
  if (keys.empty()) return;  // they may lie between two multiples
  for (int64_t at = round_down(keys.begin, step); at < keys.end; at += step) {
    visit(overlap(keys, {at, at + step}));
  }
}

/// Visits the vectors of a segment, or of all segments of a block.
template <class F, class Visit>
SIMD_INLINE void for_each_vector(const ScoreBlock& block,
                                 const Segment& segment, const Visit& visit) {
  const int64_t begin = (segment.keys.begin - block.anchor) * kTileLanes<F>;
  const int64_t end = (segment.keys.end - block.anchor) * kTileLanes<F>;
  for (int c = segment.first; c < segment.last; ++c) {
    visit(VectorSpan{segment.keys, c, begin + c * F::kLanes,
                     end + c * F::kLanes});
  }
}
template <class F, class Visit>
SIMD_INLINE void for_each_vector(const ScoreBlock& block, const Visit& visit) {
  for (int n = 0; n < block.count; ++n) {
    for_each_vector<F>(block, block.segments[n], visit);
  }
}

}  // namespace
}  // namespace multihead::kernels
