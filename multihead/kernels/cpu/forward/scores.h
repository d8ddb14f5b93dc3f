// SPDX-License-Identifier: MIT
//
// The scores of a tile: which rows it holds, what each may see, and everything
// that happens between q·k and the softmax.
#pragma once

#include <string.h>

#include "multihead/kernels/cpu/blocking/arena.h"
#include "multihead/kernels/cpu/blocking/query_tile.h"
#include "multihead/kernels/cpu/blocking/tasks.h"
#include "multihead/kernels/cpu/forward/mask_block.h"
#include "multihead/kernels/cpu/gemm/gemm.h"
#include "multihead/kernels/cpu/gemm/load_store.h"
#include "multihead/kernels/cpu/gemm/pack.h"
#include "multihead/kernels/cpu/simd/math.h"

namespace multihead::kernels {
namespace {

/// A block of scores: key j of row r at scores[(j − anchor)·lanes + r].
struct ScoreBlock {
  int64_t anchor = 0;
  Segment segments[kMaxSegments];
  int count = 0;
  double scale = 1;  ///< that scores still lack
};

template <typename T>
struct ScoreScratch {
  T* query;    ///< (depth, lanes), of the tile at hand
  T* scores;   ///< (kKeyBlock, lanes)
  T* maximum;  ///< (lanes), raised
  /// (kKeyBlock, lanes), 1 − tanh² of what softcap changed; null: not wanted.
  T* softcap_slope = nullptr;
  MaskScratch<T> mask;

  ScoreScratch(const AttentionArgs& a, int64_t lanes, Arena& arena)
      : query(nullptr),
        scores(arena.take<T>(kKeyBlock * lanes)),
        maximum(arena.take<T>(lanes)),
        mask{} {
    if (a.mask.kind == ScoreMask::Kind::kNone && !a.key_mask.data) return;
    mask = {arena.take<T>(lanes * kKeyBlock), arena.take<T>(kKeyBlock * lanes)};
  }
};

/// What rules need to know of a block.
template <typename T>
struct BlockTransform {
  const T* mask;  ///< (kKeyBlock, lanes) or null
  T softcap, inverse_softcap;
  bool has_softcap, has_alibi;

  bool any() const { return mask || has_softcap || has_alibi; }
};

/// Softcap, bias, ALiBi and the ends of the intervals, on the scores of one
/// vector of rows; −inf where a row does not see the key, whatever stood there.
template <class F>
inline void transform_scores(const QueryTile<F>& tile, const ScoreBlock& block,
                             const BlockTransform<typename F::Scalar>& rules,
                             const Segment& segment, int c,
                             const ScoreScratch<typename F::Scalar>& scratch) {
  using T = typename F::Scalar;
  const int64_t from = c * F::kLanes;
  alignas(64) T begin[F::kLanes], end[F::kLanes], at[F::kLanes];
  for (int i = 0; i < F::kLanes; ++i) {
    const Interval sees =
        overlap(tile.sees[from + i], {block.anchor, block.anchor + kKeyBlock});
    begin[i] = static_cast<T>(sees.begin - block.anchor);
    end[i] = static_cast<T>(max(sees.end - block.anchor, 0));
    at[i] = rules.has_alibi
                ? static_cast<T>(tile.position[from + i] - block.anchor)
                : 0;
  }
  const auto none = F::broadcast(T(-INFINITY));
  const auto first = F::load(begin), last = F::load(end), here = F::load(at);
  const auto slope =
      rules.has_alibi ? F::load(tile.negative_slope + from) : F::broadcast(0);
  auto maximum = F::load(scratch.maximum + from);
  for (int64_t j = segment.keys.begin - block.anchor;
       j < segment.keys.end - block.anchor; ++j) {
    const auto key = F::broadcast(static_cast<T>(j));
    T* score = scratch.scores + j * kTileLanes<F> + from;
    auto s = F::load(score);
    if (rules.has_softcap) {
      const auto x = F::mul(s, F::broadcast(rules.inverse_softcap));
      s = F::mul(tanh<F>(x), F::broadcast(rules.softcap));
      if (scratch.softcap_slope) {
        F::store(scratch.softcap_slope + j * kTileLanes<F> + from,
                 tanh_slope<F>(x));
      }
    }
    if (rules.mask) {
      const auto bias = F::load(rules.mask + j * kTileLanes<F> + from);
      s = F::select(F::equal(bias, none), none, F::add(s, bias));
    }
    if (rules.has_alibi) {
      s = F::fma(slope, F::abs(F::sub(here, key)), s);
    }
    s = F::select(F::less(key, first), none, s);
    s = F::select(F::less(key, last), s, none);
    maximum = F::max(s, maximum);
    F::store(score, s);
  }
  F::store(scratch.maximum + from, maximum);
}

/// Scores of the rows of `tile` and the keys of `block`, which lies in one
/// block of kKeyBlock keys. kMaximum: raises maximum to the largest of each
/// row; else scores may have to be multiplied by the result's scale.
template <class M, bool kMaximum = true>
inline ScoreBlock score_block(
    const AttentionArgs& a, const QueryTile<typename M::F>& tile,
    const Panel<typename M::F::Scalar>& keys, Interval block,
    const ScoreScratch<typename M::F::Scalar>& scratch) {
  using F = typename M::F;
  using T = typename F::Scalar;
  ScoreBlock result;
  result.anchor = round_down(block.begin, kKeyBlock);
  const auto mask = read_masks<F>(a, tile.b, {tile.mask_offset, tile.count},
                                  block, M::kKeyGroup, scratch.mask);
  if (mask.keys.empty()) return result;
  // Beyond these bounds softcap or its inverse would leave float32's range.
  const double softcap = a.softcap < 1e-30  ? 1e-30
                         : a.softcap > 1e30 ? 1e30
                                            : a.softcap;
  const BlockTransform<T> rules{mask.values, static_cast<T>(softcap),
                                static_cast<T>(1 / softcap), a.softcap != 0,
                                a.alibi_slopes != nullptr};
  // Scores of pairs are scaled in a pass of their own, unless that can wait.
  if (!kMaximum && M::kPair > 1 && !rules.any() && a.scale > 0) {
    result.scale = a.scale;
  }
  // What is computed beyond the mask's keys lies outside of all intervals.
  const Interval computed{round_down(mask.keys.begin, M::kKeyGroup),
                          round_up(mask.keys.end, M::kKeyGroup)};
  result.count = cut_segments(computed, max(kKeyStep, M::kKeyGroup), tile.views,
                              tile.vectors, result.segments);
  for (int n = 0; n < result.count; ++n) {
    const Segment& segment = result.segments[n];
    const int64_t from = segment.first * F::kLanes;
    const int64_t row = segment.keys.begin - result.anchor;
    const QkTile<T> product{
        .key = keys.row(segment.keys.begin),
        .key_stride = keys.stride,
        .query = scratch.query + from,
        .depth = M::depth(a.D),
        .scores = scratch.scores + row * kTileLanes<F> + from,
        .maximum = scratch.maximum + from,
        .scale = static_cast<T>(result.scale == 1 ? a.scale : 1)};
    const int64_t count = segment.keys.end - segment.keys.begin;
    const int vectors = segment.last - segment.first;
    const int64_t rows = rows_of(tile, segment);
    if (segment.fully_visible && !rules.any()) {
      Gemm<M>::template qk<kMaximum>(product, count, vectors, rows);
      continue;
    }
    Gemm<M>::template qk<false>(product, count, vectors, rows);
    for (int c = segment.first; c < segment.last; ++c) {
      transform_scores<F>(tile, result, rules, segment, c, scratch);
    }
  }
  return result;
}

/// How the rows of queries are stored for a product.
template <class M, class S>
struct QueryStorage {
  using Type = S;
};
#ifdef __AVX512BF16__
template <class S>
struct QueryStorage<BFloat16Dot, S> {
  using Type = StoredPairs;
};
#endif
#ifdef __AMX_BF16__
template <class S>
struct QueryStorage<BFloat16Tiles, S> {
  using Type = StoredPairs;
};
#endif

/// The rows of a tile from memory into lanes, times `scale`: (width, lanes).
template <class S>
inline void load_tile(const StridedRows& x,
                      const QueryTile<typename S::F>& tile, int64_t width,
                      typename S::F::Scalar scale,
                      typename S::F::Scalar* columns) {
  using F = typename S::F;
  for (int c = 0; c < tile.vectors; ++c) {
    const typename S::Type* rows[F::kLanes];
    for (int i = 0; i < F::kLanes; ++i) {
      const int64_t r = c * F::kLanes + i;
      rows[i] = r < tile.count ? row_of<typename S::Type>(
                                     x, tile.b, tile.head[r], tile.query[r])
                               : nullptr;
    }
    load_lanes<S>(rows, width, scale, columns + c * F::kLanes);
  }
}

/// Rows of the width that a product multiplies by keys: times `scale`, except
/// for pairs, which stay as they are.
template <class M, class S>
inline void load_depth(const StridedRows& x,
                       const QueryTile<typename M::F>& tile, int64_t width,
                       typename M::F::Scalar scale,
                       typename M::F::Scalar* rows) {
  using F = typename M::F;
  load_tile<typename QueryStorage<M, S>::Type>(x, tile, width, scale, rows);
  // Padding of the depth meets the padding of the keys, which is 0.
  const int64_t used = (width + M::kPair - 1) / M::kPair;
  memset(rows + used * kTileLanes<F>, 0,
         (M::depth(width) - used) * kTileLanes<F> * sizeof *rows);
}

/// Queries; of pairs the scores are scaled instead.
template <class M, class S>
inline void load_queries(const AttentionArgs& a,
                         const QueryTile<typename M::F>& tile,
                         typename M::F::Scalar* query) {
  load_depth<M, S>(a.query, tile, a.D,
                   static_cast<typename M::F::Scalar>(a.scale), query);
}

}  // namespace
}  // namespace multihead::kernels
