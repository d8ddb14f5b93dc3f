// SPDX-License-Identifier: MIT
//
// What a tile of queries adds to the gradients, from P and dS of one block:
//   dV += Pᵀ·dO       dK += dSᵀ·Q       dQ += dS·K
// Single numbers here; pairs of bfloat16 in accumulate_bf16.h.
#pragma once

#include <string.h>

#include "multihead/kernels/cpu/backward/recompute.h"

namespace multihead::kernels {
namespace {

/// A split of keys: how GEMMs read it, and the sums that rows add to.
template <typename T>
struct KeySplit {
  int64_t b, g;
  Interval keys;         ///< those that some row sees
  Panel<T> key, value;   ///< by keys
  Panel<T> key_columns;  ///< keys as pv takes values
  bool finite;           ///< whether all of them are
  T *dkey, *dvalue;      ///< (kGradientSplit, width), in whole vectors

  /// The key whose sums come first.
  int64_t first() const { return round_down(keys.begin, kGradientSplit); }
};

/// Row r of a tile.
template <class S>
inline const typename S::Type* row_of_tile(const QueryTile<typename S::F>& tile,
                                           const StridedRows& x, int64_t r) {
  return row_of<typename S::Type>(x, tile.b, tile.head[r], tile.query[r]);
}

/// Takes P and dS as they are computed:
///   for each group of M::kOuterTiles tiles: for each tile: begin_tile; add for
///   each step of keys; end_tile, or else skip_tile; then end_group.
/// Here a segment is multiplied by `add`, while it lies in the L1 cache;
/// nothing is left for the calls after it.
template <class M, class S, bool kPacksWeights = M::kPacksWeights>
class GradientAccumulator {
 public:
  using F = typename M::F;
  using T = typename F::Scalar;
  using Tile = QueryTile<F>;
  static constexpr int64_t kLanes = kTileLanes<F>;
  static constexpr int64_t kStep = kKeyBlock;  ///< keys that `add` takes
  /// dK and dV are written for whole groups of so many keys.
  static constexpr int64_t kSumKeys = 1;

  T* dquery;  ///< (D + 1, lanes), of a tile and a split

  GradientAccumulator(const BackwardArgs& b, Arena& arena)
      : dquery(arena.take<T>((b.attention.D + 1) * kLanes)),
        b_(b),
        width_(padded<F>(b.attention.D)),
        value_width_(padded<F>(b.attention.Dv)),
        query_rows_(arena.take<T>(kLanes * width_)),
        dout_rows_(arena.take<T>(kLanes * value_width_)),
        one_(arena.take<T>(kLanes)) {}

  /// `add` is now for tile n of the group. Whether its rows are finite.
  bool begin_tile(const Tile& tile, int /*n*/) {
    const AttentionArgs& a = b_.attention;
    memset(dquery, 0, (a.D + 1) * kLanes * sizeof(T));
    for (int64_t r = 0; r < kLanes; ++r) one_[r] = 1;
    bool finite = true;
    for (int64_t r = 0; r < tile.count; ++r) {
      finite &= widen_row(row_of_tile<S>(tile, a.query, r), a.D,
                          query_rows_ + r * width_);
      finite &= widen_row(row_of_tile<S>(tile, b_.dout, r), a.Dv,
                          dout_rows_ + r * value_width_);
    }
    return finite;
  }
  /// There is no tile n, or it sees nothing of the split.
  void skip_tile(const KeySplit<T>&, int /*n*/) {}

  /// The step of keys that begins at `at`; `block` was computed of it.
  template <bool kMaskNonFinite>
  void add(const KeySplit<T>& split, const Tile& tile,
           const ScoreGradient<M, S>& scores, const ScoreBlock& block,
           int64_t /*at*/) {
    for (int i = 0; i < block.count; ++i) {
      const Segment& segment = block.segments[i];
      const int64_t from = segment.first * F::kLanes;
      const int64_t at = (segment.keys.begin - block.anchor) * kLanes + from;
      const int64_t keys = segment.keys.end - segment.keys.begin;
      const int64_t rows = min(tile.count, segment.last * F::kLanes) - from;
      const int64_t row = segment.keys.begin - split.first();
      if (b_.dvalue.data) {
        Gemm<M>::template outer<kMaskNonFinite>(
            {scores.dropped + at, dout_rows_ + from * value_width_, rows,
             value_width_, split.dvalue + row * value_width_},
            keys);
      }
      if (b_.dkey.data) {
        Gemm<M>::template outer<kMaskNonFinite>(
            {scores.dscores + at, query_rows_ + from * width_, rows, width_,
             split.dkey + row * width_},
            keys);
      }
      if (b_.dquery.data) {
        Gemm<M>::template pv<kMaskNonFinite>(
            {.value = split.key_columns.row(segment.keys.begin),
             .value_stride = split.key_columns.stride,
             .weights = scores.dscores + at,
             .depth = keys,
             .context = dquery + from,
             .factor = one_ + from},
            b_.attention.D, segment.last - segment.first,
            rows_of(tile, segment));
      }
    }
  }

  void end_tile(const KeySplit<T>&, const Tile&) {}
  void end_group(const KeySplit<T>&) {}

 private:
  /// Padded with zeros; whether it is finite.
  static bool widen_row(const typename S::Type* from, int64_t width, T* to) {
    F::store(to + padded<F>(width) - F::kLanes, F::broadcast(0));
    widen<S>(from, width, to);
    return is_finite<S>(from, width);
  }

  const BackwardArgs& b_;
  int64_t width_, value_width_;  ///< D and Dv in whole vectors
  T* query_rows_;                ///< (lanes, width_)
  T* dout_rows_;                 ///< (lanes, value_width_)
  T* one_;                       ///< (lanes), 1
};

}  // namespace
}  // namespace multihead::kernels
