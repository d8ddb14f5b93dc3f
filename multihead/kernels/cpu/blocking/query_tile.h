// SPDX-License-Identifier: MIT
//
// A tile of queries, one row per lane: the query block of FlashAttention, laid
// across the lanes so that no reduction ever crosses them.
//
//   lane      0     1     2     3     4     5   …      with a group of two
//   heads head      0     1     0     1     0     1          on each key/value
//   head query     7     7     8     8     9     9
#pragma once

#include "multihead/kernels/cpu/blocking/key_blocks.h"
#include "multihead/kernels/cpu/blocking/tasks.h"

namespace multihead::kernels {
namespace {

/// Rows of some query heads that read one key/value head, numbered query by
/// query: row r is query r / heads of head first_head + r % heads. So the heads
/// of a group share each key that is read, and a causal tile of several heads
/// is narrow.
struct RowRange {
  int64_t b, g, first_head, heads, first, count;
};

template <class F>
struct QueryTile {
  static constexpr int64_t kLanes = kTileLanes<F>;

  QueryTile() {}  // not initialised: arrays of these are large
  QueryTile(const AttentionArgs& a, const RowRange& range) { assign(a, range); }

  void assign(const AttentionArgs& a, const RowRange& range) {
    b = range.b;
    g = range.g;
    count = static_cast<int>(range.count);
    vectors = static_cast<int>((count + F::kLanes - 1) / F::kLanes);
    const bool has_mask = a.mask.kind != ScoreMask::Kind::kNone;
    int64_t h = range.first % range.heads, i = range.first / range.heads;
    for (int64_t r = 0; r < lanes(); ++r) {
      if (r >= count) {  // it repeats the last row, and is never written
        copy_lane(count - 1, r);
        continue;
      }
      head[r] = range.first_head + h;
      query[r] = i;
      if (r > 0 && (h > 0 || !a.visibility.depends_on_query())) {
        sees[r] = sees[r - 1];
      } else {
        sees[r] = visible_keys(a, b, i);
      }
      if (has_mask) {
        mask_offset[r] =
            b * a.mask.batch + head[r] * a.mask.head + i * a.mask.query;
      }
      if (a.alibi_slopes) position[r] = kernels::position(a, b, i);
      if (++h == range.heads) h = 0, ++i;
    }
    // Rows ascend, and so do both ends of what they see.
    for (int c = 0; c < vectors; ++c) {
      const Interval low = sees[c * F::kLanes];
      const Interval high = sees[(c + 1) * F::kLanes - 1];
      views[c] = {{low.begin, high.end}, {high.begin, low.end}};
    }
    keys = {sees[0].begin, sees[count - 1].end};
  }

  /// Lanes in use; what follows them is not initialised.
  int64_t lanes() const { return vectors * F::kLanes; }

  int64_t b, g;
  int count, vectors;
  int64_t head[kLanes], query[kLanes];
  Interval sees[kLanes];
  int64_t mask_offset[kLanes];  ///< with a mask only
  int64_t position[kLanes];     ///< with ALiBi only
  LaneVisibility views[kMaxVectors];
  Interval keys;  ///< visible to some row

 private:
  void copy_lane(int64_t from, int64_t to) {
    head[to] = head[from];
    query[to] = query[from];
    sees[to] = sees[from];
    mask_offset[to] = mask_offset[from];
    position[to] = position[from];
  }
};

/// Rows that a GEMM computes for a segment: those of the tile, where it
/// takes all its vectors; else whole vectors, so that it touches no others.
template <class F>
inline int64_t rows_of(const QueryTile<F>& tile, const Segment& segment) {
  const int vectors = segment.last - segment.first;
  return vectors == tile.vectors ? tile.count : kTileLanes<F>;
}

}  // namespace
}  // namespace multihead::kernels
