// SPDX-License-Identifier: MIT
//
// The scores of a tile of queries and a block of keys: q·k, and everything that
// happens to it before the softmax.
//
//   mask tensors are read first (mask_block.h): what they hide from every row
//   is not computed; then, for each segment of the block (key_blocks.h),
//   S = scale·K·Qᵀ; softcap; + bias; − slope·|distance|; −inf where hidden
#pragma once

#include <string.h>

#include "multihead/kernels/cpu/blocking/arena.h"
#include "multihead/kernels/cpu/blocking/query_tile.h"
#include "multihead/kernels/cpu/blocking/tasks.h"
#include "multihead/kernels/cpu/gemm/gemm.h"
#include "multihead/kernels/cpu/gemm/load_store.h"
#include "multihead/kernels/cpu/gemm/pack.h"
#include "multihead/kernels/cpu/scores/mask_block.h"
#include "multihead/kernels/cpu/simd/math.h"

namespace multihead::kernels {
namespace {

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

/// Beyond these bounds softcap or its inverse would leave float32's range.
template <typename T>
struct Softcap {
  T value, inverse;
  explicit Softcap(double given) {
    const double softcap = given < 1e-30 ? 1e-30 : given > 1e30 ? 1e30 : given;
    value = static_cast<T>(softcap);
    inverse = static_cast<T>(1 / softcap);
  }
};

/// What happens to the scores of a block after q·k, besides the ends of the
/// intervals.
template <typename T>
struct BlockTransform {
  const T* mask;  ///< (kKeyBlock, lanes) or null
  Softcap<T> softcap;
  bool has_softcap;
  const double* slopes;  ///< ALiBi's, of the heads of a batch row; null: none
  int64_t slope_stride;

  /// Without any, rows that see a whole segment skip transform_scores.
  bool any() const { return mask || has_softcap || slopes; }
};

/// Softcap, bias, ALiBi and the ends of the intervals, on the scores of one
/// vector of rows; −inf where a row does not see the key, whatever stood there.
template <class F>
inline void transform_scores(const QueryTile<F>& tile, int64_t anchor,
                             const BlockTransform<ScalarOf<F>>& transform,
                             const VectorSpan& span,
                             const ScoreScratch<ScalarOf<F>>& scratch) {
  using T = typename F::Scalar;
  const int64_t from = span.c * F::kLanes;
  alignas(64) T begin[F::kLanes], end[F::kLanes], at[F::kLanes] = {};
  alignas(64) T negative_slope[F::kLanes] = {};
  for (int i = 0; i < F::kLanes; ++i) {
    const Interval sees =
        overlap(tile.sees[from + i], {anchor, anchor + kKeyBlock});
    begin[i] = static_cast<T>(sees.begin - anchor);
    end[i] = static_cast<T>(max(sees.end - anchor, 0));
    if (!transform.slopes) continue;
    at[i] = static_cast<T>(tile.position[from + i] - anchor);
    negative_slope[i] = static_cast<T>(
        -transform.slopes[tile.head[from + i] * transform.slope_stride]);
  }
  const auto none = F::broadcast(T(-INFINITY));
  const auto first = F::load(begin), last = F::load(end), here = F::load(at);
  const auto slope = F::load(negative_slope);
  auto maximum = F::load(scratch.maximum + from);
  int64_t j = span.keys.begin - anchor;
  for (int64_t x = span.begin; x < span.end; x += kTileLanes<F>, ++j) {
    const auto key = F::broadcast(static_cast<T>(j));
    auto s = F::load(scratch.scores + x);
    if (transform.has_softcap) {
      const auto capped = F::mul(s, F::broadcast(transform.softcap.inverse));
      s = F::mul(tanh<F>(capped), F::broadcast(transform.softcap.value));
      if (scratch.softcap_slope) {
        F::store(scratch.softcap_slope + x, tanh_slope<F>(capped));
      }
    }
    if (transform.mask) {
      const auto bias = F::load(transform.mask + x);
      s = F::select(F::equal(bias, none), none, F::add(s, bias));
    }
    if (transform.slopes) {
      s = F::fma(slope, F::abs(F::sub(here, key)), s);
    }
    s = F::select(F::less(key, first), none, s);
    s = F::select(F::less(key, last), s, none);
    maximum = F::max(s, maximum);
    F::store(scratch.scores + x, s);
  }
  F::store(scratch.maximum + from, maximum);
}

/// The scores of `tile` and of the keys `block`, which lie in one block of
/// kKeyBlock. kMaximum: scratch.maximum is raised to the largest score of each
/// row; else scores may still have to be multiplied by the result's scale.
template <class M, bool kMaximum = true>
inline ScoreBlock score_block(const AttentionArgs& a,
                              const QueryTile<typename M::F>& tile,
                              const Panel<ScalarOf<M>>& keys, Interval block,
                              const ScoreScratch<ScalarOf<M>>& scratch) {
  using F = typename M::F;
  using T = typename F::Scalar;
  ScoreBlock result;
  result.anchor = round_down(block.begin, kKeyBlock);
  const auto mask = read_masks<F>(a, tile.b, {tile.mask_offset, tile.count},
                                  block, M::kKeyGroup, scratch.mask);
  if (mask.keys.empty()) return result;
  const Softcap<T> softcap(a.softcap);
  const BlockTransform<T> transform{
      .mask = mask.values,
      .softcap = softcap,
      .has_softcap = a.softcap != 0,
      .slopes =
          a.alibi_slopes ? a.alibi_slopes + tile.b * a.alibi_batch : nullptr,
      .slope_stride = a.alibi_head};
  // Scaling costs a pass over the scores, unless whoever asks can do it.
  if (!kMaximum && M::kScalesScores && !transform.any() && a.scale > 0) {
    result.scale = a.scale;
  }
  // Keys that are computed beyond those of the mask lie outside of all
  // intervals.
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
    if (segment.fully_visible && !transform.any()) {
      Gemm<M>::template qk<kMaximum>(product, count, vectors, rows);
      continue;
    }
    Gemm<M>::template qk<false>(product, count, vectors, rows);
    for_each_vector<F>(result, segment, [&](const VectorSpan& span) {
      transform_scores<F>(tile, result.anchor, transform, span, scratch);
    });
  }
  return result;
}

/// The rows of a tile from memory into lanes, times `scale`: (width, lanes).
template <class S>
inline void load_tile(const StridedRows& x,
                      const QueryTile<typename S::F>& tile, int64_t width,
                      ScalarOf<S> scale, ScalarOf<S>* columns) {
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

/// Rows as the second operand of qk: (depth, lanes), times `scale` unless
/// M::kScalesScores.
template <class M, class S>
inline void load_operand(const StridedRows& x,
                         const QueryTile<typename M::F>& tile, int64_t width,
                         ScalarOf<M> scale, ScalarOf<M>* rows) {
  using F = typename M::F;
  using Q = typename M::template QueryStorage<S>;
  load_tile<Q>(x, tile, width, scale, rows);
  // The padding of the depth meets that of the keys, which is 0.
  const int64_t used = (width + Q::kPair - 1) / Q::kPair;
  memset(rows + used * kTileLanes<F>, 0,
         (M::depth(width) - used) * kTileLanes<F> * sizeof *rows);
}

template <class M, class S>
inline void load_queries(const AttentionArgs& a,
                         const QueryTile<typename M::F>& tile,
                         ScalarOf<M>* query) {
  load_operand<M, S>(a.query, tile, a.D, static_cast<ScalarOf<M>>(a.scale),
                     query);
}

}  // namespace
}  // namespace multihead::kernels
