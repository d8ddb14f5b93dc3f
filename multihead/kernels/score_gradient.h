// SPDX-License-Identifier: MIT
//
// P and dS of a tile and a block of keys: what every gradient is made of.
#pragma once

#include "multihead/kernels/gradient.h"

namespace multihead::kernels {
namespace {

template <class M, class S>
struct ScoreGradient {
  using F = typename M::F;
  using T = typename F::Scalar;
  using Tile = RowTile<F>;
  static constexpr int64_t kLanes = kTileLanes<F>;

  ScoreScratch<T> score;  ///< S, then P; query is Qᵀ
  T* dscores;  ///< (kKeyBlock, lanes): dP, then dS before softcap's slope
  T* dropped;  ///< (kKeyBlock, lanes): P after dropout; P without
  T* dout;     ///< (depth of Dv, lanes)
  T *shift, *factor, *delta;  ///< (lanes)

  ScoreGradient(const Attention& a, Arena& arena) : score(a, kLanes, arena) {
    score.query = arena.take<T>(M::depth(a.D) * kLanes);
    if (a.softcap != 0) score.softcap_slope = arena.take<T>(kKeyBlock * kLanes);
    dscores = arena.take<T>(kKeyBlock * kLanes);
    dropped = a.dropout.probability > 0 ? arena.take<T>(kKeyBlock * kLanes)
                                        : score.scores;
    dout = arena.take<T>(M::depth(a.Dv) * kLanes);
    shift = arena.take<T>(kLanes);
    factor = arena.take<T>(kLanes);
    delta = arena.take<T>(kLanes);
  }

  /// What is needed of the rows of a tile.
  void load(const Backward& b, const Workspace<F>& w, const Tile& tile) {
    const Attention& a = b.attention;
    load_queries<M, S>(a, tile, score.query);
    load_depth<M, S>(b.dout, tile, a.Dv, 1, dout);
    for (int64_t r = 0; r < tile.lanes(); ++r) {
      const int64_t row = (tile.b * a.H + tile.head[r]) * a.Lq + tile.query[r];
      shift[r] = w.normalizer.shift[row];
      factor[r] = w.normalizer.factor[row];
      delta[r] = w.delta[row];
    }
  }

  /// P, and with_dscores dS, of `keys`, which lie in one block of kKeyBlock.
  ScoreBlock compute(const Attention& a, const Tile& tile, const Panel<T>& key,
                     const Panel<T>& value, Interval keys, bool with_dscores) {
    const ScoreBlock block = score_block<M, false>(a, tile, key, keys, score);
    for (int n = 0; n < block.count; ++n) {
      const Segment& segment = block.segments[n];
      const int64_t from = segment.first * F::kLanes;
      const int64_t row = segment.keys.begin - block.anchor;
      if (with_dscores) {  // dP = V·dOᵀ
        Product<M>::template score<false>(
            {.key = value.row(segment.keys.begin),
             .key_stride = value.stride,
             .query = dout + from,
             .depth = M::depth(a.Dv),
             .scores = dscores + row * kLanes + from,
             .maximum = score.maximum + from,
             .scale = 1},
            segment.keys.end - segment.keys.begin, segment.last - segment.first,
            rows_of(tile, segment));
      }
      for (int c = segment.first; c < segment.last; ++c) {
        if (a.dropout.probability > 0) {
          weigh<false>(block, segment, c);
          drop_weights(a, tile, block, segment, c);
          if (with_dscores) differentiate(a, block, segment, c);
        } else {
          with_dscores ? weigh<true>(block, segment, c)
                       : weigh<false>(block, segment, c);
        }
      }
    }
    return block;
  }

 private:
  /// S → P = exp(S − shift)·factor, and where nothing is dropped dP → dS =
  /// P∘(dP − Δ); both −0 where a row does not see the key.
  template <bool kDifferentiate>
  void weigh(const ScoreBlock& block, const Segment& segment, int c) {
    const int64_t r = c * F::kLanes;
    const auto m = F::load(shift + r), f = F::load(factor + r);
    const auto mean = F::load(delta + r);
    const auto scale = F::broadcast(static_cast<T>(block.scale));
    const auto hidden = F::broadcast(T(-0.0));
    const auto none = F::broadcast(T(-INFINITY));
    int64_t at = (segment.keys.begin - block.anchor) * kLanes + r;
    const int64_t end = (segment.keys.end - block.anchor) * kLanes;
#pragma GCC unroll 4
    for (; at < end; at += kLanes) {
      const auto s = F::load(score.scores + at);
      const auto scaled = M::kPair > 1 ? F::mul(s, scale) : s;
      const auto p = F::mul(exp<F>(F::sub(scaled, m)), f);
      const auto unseen = F::equal(s, none);
      F::store(score.scores + at, F::select(unseen, hidden, p));
      if constexpr (kDifferentiate) {
        const auto ds = F::mul(p, F::sub(F::load(dscores + at), mean));
        F::store(dscores + at, F::select(unseen, hidden, ds));
      }
    }
  }

  void drop_weights(const Attention& a, const Tile& tile,
                    const ScoreBlock& block, const Segment& segment, int c) {
    const int64_t offset = c * F::kLanes - block.anchor * kLanes;
    for (int64_t j = segment.keys.begin; j < segment.keys.end; ++j) {
      F::store(dropped + offset + j * kLanes,
               F::load(score.scores + offset + j * kLanes));
    }
    drop(a, tile, segment, c, dropped - block.anchor * kLanes);
  }

  /// dP → dS = P∘(drop(dP) − Δ); −0 where a row does not see the key.
  void differentiate(const Attention& a, const ScoreBlock& block,
                     const Segment& segment, int c) {
    const double probability = a.dropout.probability;
    const auto keep = F::broadcast(
        static_cast<T>(probability < 1 ? 1 / (1 - probability) : 0));
    const auto zero = F::broadcast(0);
    const auto mean = F::load(delta + c * F::kLanes);
    const int64_t offset = c * F::kLanes - block.anchor * kLanes;
    for (int64_t j = segment.keys.begin; j < segment.keys.end; ++j) {
      const int64_t at = offset + j * kLanes;
      const auto p = F::load(score.scores + at);
      const auto dp = F::select(F::equal(F::load(dropped + at), zero), zero,
                                F::mul(F::load(dscores + at), keep));
      const auto ds = F::mul(p, F::sub(dp, mean));
      F::store(dscores + at, F::select(F::is_negative_zero(p), p, ds));
    }
  }
};

}  // namespace
}  // namespace multihead::kernels
