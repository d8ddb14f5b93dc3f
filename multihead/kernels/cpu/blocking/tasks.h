// SPDX-License-Identifier: MIT
//
// How a call is cut into tasks. Pure: the same call and number of threads give
// the same plan, and no plan changes a bit of the result.
#pragma once

#include "multihead/kernels/cpu/blocking/visible_keys.h"

namespace multihead::kernels {
namespace {

/// Query heads to a key/value head; 1 where there are none at all.
inline int64_t group_of(const AttentionArgs& a) {
  return a.G > 0 ? a.H / a.G : 1;
}

/// Rows of a key/value head: the queries of all its heads; of one batch row, or
/// of the longest.
inline int64_t rows_of_head(const AttentionArgs& a, int64_t b) {
  return query_length(a, b) * group_of(a);
}
inline int64_t most_rows_of_head(const AttentionArgs& a) {
  return a.Lq * group_of(a);
}

/// Task numbers over (batch, head, chunks of rows): heads one after the other,
/// so that keys and values stay in the cache, or, longest first, the last chunk
/// of every head, then the one before it, and so on. `rows` are those of the
/// longest batch row: of another one some tasks have fewer, or none.
struct TaskGrid {
  int64_t batches, heads, rows, chunk;
  bool longest_first;

  struct Task {
    int64_t b, head, first, count;
    bool same_head(const Task& other) const {
      return b == other.b && head == other.head;
    }
  };

  int64_t chunks() const { return (rows + chunk - 1) / chunk; }
  int64_t tasks() const { return batches * heads * chunks(); }
  Task operator[](int64_t number) const {
    const int64_t all = batches * heads;
    const int64_t head = longest_first ? number % all : number / chunks();
    const int64_t n =
        longest_first ? chunks() - 1 - number / all : number % chunks();
    return {head / heads, head % heads, n * chunk,
            min(chunk, rows - n * chunk)};
  }
};

inline constexpr int64_t kMaxTiles = 8;

/// Tiles of 3 vectors that share a task, and so the packed panels and the split
/// of keys in the cache: up to kMaxTiles, fewer where threads would go idle.
inline int64_t tiles_per_task(int64_t rows, int64_t heads, int64_t tile,
                              int threads) {
  constexpr int64_t kTasksPerThread = 4;
  const int64_t tiles = (rows + tile - 1) / tile;
  const int64_t wanted = kTasksPerThread * (threads > 1 ? threads : 0);
  const int64_t chunks = max(1, (wanted + heads - 1) / max(heads, 1));
  return max(1, min(kMaxTiles, tiles / chunks));
}

}  // namespace
}  // namespace multihead::kernels
