// SPDX-License-Identifier: MIT
//
// P and dS of a tile and a block of keys: what every gradient is made of.
#pragma once

#include "multihead/kernels/cpu/backward/workspace.h"

namespace multihead::kernels {
namespace {

template <class M, class S>
struct ScoreGradient {
  using F = typename M::F;
  using T = typename F::Scalar;
  using Tile = QueryTile<F>;
  static constexpr int64_t kLanes = kTileLanes<F>;

  ScoreScratch<T> score;  ///< S, then P; query is Qᵀ
  T* dscores;  ///< (kKeyBlock, lanes): dP, then dS before softcap's slope
  T* dropped;  ///< (kKeyBlock, lanes): P after dropout; P without
  T* dout;     ///< (depth of Dv, lanes)
  T *shift, *factor, *delta;  ///< (lanes)
  T* exact_delta;             ///< (lanes), 1 where Δ is summed up anew, else 0
  Interval exact_delta_keys;  ///< those that such rows see

  ScoreGradient(const AttentionArgs& a, Arena& arena)
      : score(a, kLanes, arena) {
    score.query = arena.take<T>(M::depth(a.D) * kLanes);
    if (a.softcap != 0) score.softcap_slope = arena.take<T>(kKeyBlock * kLanes);
    dscores = arena.take<T>(kKeyBlock * kLanes);
    dropped = a.dropout.probability > 0 ? arena.take<T>(kKeyBlock * kLanes)
                                        : score.scores;
    dout = arena.take<T>(M::depth(a.Dv) * kLanes);
    shift = arena.take<T>(kLanes);
    factor = arena.take<T>(kLanes);
    delta = arena.take<T>(kLanes);
    exact_delta = arena.take<T>(kLanes);
  }

  /// What is needed of the rows of a tile.
  void load(const BackwardArgs& b, const Workspace<F>& w, const Tile& tile) {
    const AttentionArgs& a = b.attention;
    load_queries<M, S>(a, tile, score.query);
    load_depth<M, S>(b.dout, tile, a.Dv, 1, dout);
    const auto* dlse = static_cast<const T*>(b.dlogsumexp);
    exact_delta_keys = {a.Lk, 0};
    for (int64_t r = 0; r < tile.lanes(); ++r) {
      const int64_t row = (tile.b * a.H + tile.head[r]) * a.Lq + tile.query[r];
      shift[r] = w.stats.shift[row];
      factor[r] = w.stats.inv_sum[row];
      delta[r] = w.delta[row];
      exact_delta[r] = 0;
      if (!wants_exact_delta(tile.sees[r])) continue;
      exact_delta[r] = 1;
      delta[r] = dlse ? -dlse[row] : 0;
      exact_delta_keys = {min(exact_delta_keys.begin, tile.sees[r].begin),
                          max(exact_delta_keys.end, tile.sees[r].end)};
    }
  }

  /// Whether a row's Δ is better taken from P and dP, which are at hand at once
  /// for all its keys, than from out, which was rounded to 16 bits: of n keys
  /// that rounding is 1/√n of what dP is.
  static bool wants_exact_delta(Interval keys) {
    constexpr int64_t kExactDeltaKeys = 32;
    return sizeof(typename S::Type) < sizeof(T) && !keys.empty() &&
           keys.begin / kExactDeltaKeys == (keys.end - 1) / kExactDeltaKeys;
  }

  /// P, and with_dscores dS, of `keys`, which lie in one block of kKeyBlock and
  /// hold all that a row with few keys sees, or nothing of it.
  ScoreBlock compute(const AttentionArgs& a, const Tile& tile,
                     const Panel<T>& key, const Panel<T>& value, Interval keys,
                     bool with_dscores) {
    const ScoreBlock block = score_block<M, false>(a, tile, key, keys, score);
    const bool drops = a.dropout.probability > 0;
    const bool anew = with_dscores && !overlap(keys, exact_delta_keys).empty();
    for (int n = 0; n < block.count; ++n) {
      const Segment& segment = block.segments[n];
      const int64_t from = segment.first * F::kLanes;
      const int64_t row = segment.keys.begin - block.anchor;
      if (with_dscores) {  // dP = V·dOᵀ
        Gemm<M>::template qk<false>({.key = value.row(segment.keys.begin),
                                     .key_stride = value.stride,
                                     .query = dout + from,
                                     .depth = M::depth(a.Dv),
                                     .scores = dscores + row * kLanes + from,
                                     .maximum = score.maximum + from,
                                     .scale = 1},
                                    segment.keys.end - segment.keys.begin,
                                    segment.last - segment.first,
                                    rows_of(tile, segment));
      }
      for (int c = segment.first; c < segment.last; ++c) {
        const bool at_once = with_dscores && !drops && !anew;
        at_once ? probabilities<true>(block, segment, c)
                : probabilities<false>(block, segment, c);
        if (drops) drop_weights(a, tile, block, segment, c);
        if (drops && with_dscores) drop_gradients(a, block, segment, c);
      }
    }
    if (anew) for_each_vector(block, &ScoreGradient::add_delta);
    if (with_dscores && (drops || anew)) {
      for_each_vector(block, &ScoreGradient::differentiate);
    }
    return block;
  }

 private:
  void for_each_vector(const ScoreBlock& block,
                       void (ScoreGradient::*use)(const ScoreBlock&,
                                                  const Segment&, int)) {
    for (int n = 0; n < block.count; ++n) {
      const Segment& segment = block.segments[n];
      for (int c = segment.first; c < segment.last; ++c) {
        (this->*use)(block, segment, c);
      }
    }
  }

  /// S → P = exp(S − shift)·factor, and kDifferentiate dP → dS = P∘(dP − Δ);
  /// both −0 where a row does not see the key.
  template <bool kDifferentiate>
  void probabilities(const ScoreBlock& block, const Segment& segment, int c) {
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
      if constexpr (kDifferentiate) {
        const auto ds = F::mul(p, F::sub(F::load(dscores + at), mean));
        F::store(dscores + at, F::select(unseen, hidden, ds));
      }
      F::store(score.scores + at, F::select(unseen, hidden, p));
    }
  }

  void drop_weights(const AttentionArgs& a, const Tile& tile,
                    const ScoreBlock& block, const Segment& segment, int c) {
    const int64_t offset = c * F::kLanes - block.anchor * kLanes;
    for (int64_t j = segment.keys.begin; j < segment.keys.end; ++j) {
      F::store(dropped + offset + j * kLanes,
               F::load(score.scores + offset + j * kLanes));
    }
    drop(a, tile, segment, c, dropped - block.anchor * kLanes);
  }

  /// dP → drop(dP).
  void drop_gradients(const AttentionArgs& a, const ScoreBlock& block,
                      const Segment& segment, int c) {
    const double probability = a.dropout.probability;
    const auto keep = F::broadcast(
        static_cast<T>(probability < 1 ? 1 / (1 - probability) : 0));
    const auto zero = F::broadcast(0);
    const int64_t offset = c * F::kLanes - block.anchor * kLanes;
    for (int64_t j = segment.keys.begin; j < segment.keys.end; ++j) {
      const int64_t at = offset + j * kLanes;
      const auto dp = F::mul(F::load(dscores + at), keep);
      F::store(dscores + at,
               F::select(F::equal(F::load(dropped + at), zero), zero, dp));
    }
  }

  /// Δ += Σ_j P_j·dP_j for rows with few keys.
  void add_delta(const ScoreBlock& block, const Segment& segment, int c) {
    const auto zero = F::broadcast(0);
    const int64_t offset = c * F::kLanes - block.anchor * kLanes;
    auto sum = zero;
    for (int64_t j = segment.keys.begin; j < segment.keys.end; ++j) {
      const int64_t at = offset + j * kLanes;
      const auto p = F::load(score.scores + at);
      const auto dp =
          F::select(F::is_negative_zero(p), zero, F::load(dscores + at));
      sum = F::fma(p, dp, sum);
    }
    T* mean = delta + c * F::kLanes;
    const auto is_few = F::less(zero, F::load(exact_delta + c * F::kLanes));
    F::store(mean, F::add(F::load(mean), F::select(is_few, sum, zero)));
  }

  /// dP → dS = P∘(dP − Δ); −0 where a row does not see the key.
  void differentiate(const ScoreBlock& block, const Segment& segment, int c) {
    const auto mean = F::load(delta + c * F::kLanes);
    const int64_t offset = c * F::kLanes - block.anchor * kLanes;
    for (int64_t j = segment.keys.begin; j < segment.keys.end; ++j) {
      const int64_t at = offset + j * kLanes;
      const auto p = F::load(score.scores + at);
      const auto ds = F::mul(p, F::sub(F::load(dscores + at), mean));
      F::store(dscores + at, F::select(F::is_negative_zero(p), p, ds));
    }
  }
};

}  // namespace
}  // namespace multihead::kernels
