// SPDX-License-Identifier: MIT
//
// Recomputation: P and dS of a tile of queries and a block of keys. They are
// made from Q, K, V, dO and two numbers per row, and all gradients are made
// from them:
//   S = transform(K·Qᵀ)       P = exp(S − shift)·inv_sum
//   dP = V·dOᵀ, times dropout's factor
//   dS = P∘(dP − Δ)           before the slope of softcap
// Where a row does not see a key, P and dS are −0.
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
  SoftmaxStats<T> stats;  ///< (lanes)
  T* delta;               ///< (lanes)
  T* exact_delta;         ///< (lanes), 1 where Δ comes from P and dP, else 0
  Interval exact_delta_keys;  ///< keys that such rows see

  ScoreGradient(const AttentionArgs& a, Arena& arena)
      : score(a, kLanes, arena) {
    score.query = arena.take<T>(M::depth(a.D) * kLanes);
    if (a.softcap != 0) score.softcap_slope = arena.take<T>(kKeyBlock * kLanes);
    dscores = arena.take<T>(kKeyBlock * kLanes);
    dropped = a.dropout.probability > 0 ? arena.take<T>(kKeyBlock * kLanes)
                                        : score.scores;
    dout = arena.take<T>(M::depth(a.Dv) * kLanes);
    stats = {arena.take<T>(kLanes), arena.take<T>(kLanes)};
    delta = arena.take<T>(kLanes);
    exact_delta = arena.take<T>(kLanes);
  }

  /// Q, dO and the numbers per row of a tile.
  void load(const BackwardArgs& b, const Workspace<F>& w, const Tile& tile) {
    const AttentionArgs& a = b.attention;
    load_queries<M, S>(a, tile, score.query);
    load_operand<M, S>(b.dout, tile, a.Dv, 1, dout);
    const auto* dlse = static_cast<const T*>(b.dlogsumexp);
    exact_delta_keys = {a.Lk, 0};
    for (int64_t r = 0; r < tile.lanes(); ++r) {
      const int64_t row = query_index(a, tile.b, tile.head[r], tile.query[r]);
      stats.shift[r] = w.stats.shift[row];
      stats.inv_sum[r] = w.stats.inv_sum[row];
      delta[r] = w.delta[row];
      exact_delta[r] = 0;
      if (b.is_part || !wants_exact_delta(tile.sees[r])) continue;
      exact_delta[r] = 1;
      delta[r] = dlse ? -dlse[row] : 0;
      exact_delta_keys = {min(exact_delta_keys.begin, tile.sees[r].begin),
                          max(exact_delta_keys.end, tile.sees[r].end)};
    }
  }

  /// Δ is Σ out·dout, but out was rounded to 16 bits. For n keys that rounding
  /// is 1/√n of dP in size, so it matters for few keys: if all keys of a row
  /// lie in one step, Δ is summed again as Σ P·dP (docs/kernels.md, Backward).
  static bool wants_exact_delta(Interval keys) {
    constexpr int64_t kExactDeltaKeys = 32;
    return sizeof(typename S::Type) < sizeof(T) && !keys.empty() &&
           keys.begin / kExactDeltaKeys == (keys.end - 1) / kExactDeltaKeys;
  }

  /// P, and if wanted dS, of `keys`, which lie in one block of kKeyBlock. If a
  /// row has an exact Δ, `keys` holds all keys that it sees, or none.
  ScoreBlock compute(const AttentionArgs& a, const Tile& tile,
                     const Panel<T>& key, const Panel<T>& value, Interval keys,
                     bool with_dscores) {
    const ScoreBlock block = score_block<M, false>(a, tile, key, keys, score);
    const bool drops = a.dropout.probability > 0;
    const bool exact = with_dscores && !overlap(keys, exact_delta_keys).empty();
    const bool at_once = with_dscores && !drops && !exact;
    for (int n = 0; n < block.count; ++n) {
      const Segment& segment = block.segments[n];
      if (with_dscores) multiply_values(a, tile, block, segment, value);
      for_each_vector<F>(block, segment, [&](const VectorSpan& span) {
        at_once ? probabilities<true>(block.scale, span)
                : probabilities<false>(block.scale, span);
        if (!drops) return;
        drop_weights(a, tile, span);
        if (with_dscores) drop_gradients(a, span);
      });
    }
    if (!with_dscores || at_once) return block;
    if (exact) {
      for_each_vector<F>(block,
                         [&](const VectorSpan& span) { add_delta(span); });
    }
    for_each_vector<F>(block,
                       [&](const VectorSpan& span) { differentiate(span); });
    return block;
  }

 private:
  /// dP = V·dOᵀ.
  void multiply_values(const AttentionArgs& a, const Tile& tile,
                       const ScoreBlock& block, const Segment& segment,
                       const Panel<T>& value) {
    const int64_t from = segment.first * F::kLanes;
    Gemm<M>::template qk<false>(
        {.key = value.row(segment.keys.begin),
         .key_stride = value.stride,
         .query = dout + from,
         .depth = M::depth(a.Dv),
         .scores =
             dscores + (segment.keys.begin - block.anchor) * kLanes + from,
         .maximum = score.maximum + from,
         .scale = 1},
        segment.keys.end - segment.keys.begin, segment.last - segment.first,
        rows_of(tile, segment));
  }

  /// S → P, and kDifferentiate dP → dS.
  template <bool kDifferentiate>
  void probabilities(double block_scale, const VectorSpan& span) {
    const int64_t r = span.c * F::kLanes;
    const auto m = F::load(stats.shift + r), f = F::load(stats.inv_sum + r);
    const auto mean = F::load(delta + r);
    const auto scale = F::broadcast(static_cast<T>(block_scale));
    const auto hidden = F::broadcast(T(-0.0));
    const auto none = F::broadcast(T(-INFINITY));
#pragma GCC unroll 4
    for (int64_t at = span.begin; at < span.end; at += kLanes) {
      const auto s = F::load(score.scores + at);
      const auto scaled = M::kScalesScores ? F::mul(s, scale) : s;
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
                    const VectorSpan& span) {
    for (int64_t at = span.begin; at < span.end; at += kLanes) {
      F::store(dropped + at, F::load(score.scores + at));
    }
    drop(a, tile, span, dropped + span.begin);
  }

  /// dP times dropout's factor, 0 or 1 / (1 − p).
  void drop_gradients(const AttentionArgs& a, const VectorSpan& span) {
    const double probability = a.dropout.probability;
    const auto keep = F::broadcast(
        static_cast<T>(probability < 1 ? 1 / (1 - probability) : 0));
    const auto zero = F::broadcast(0);
    for (int64_t at = span.begin; at < span.end; at += kLanes) {
      const auto dp = F::mul(F::load(dscores + at), keep);
      F::store(dscores + at,
               F::select(F::equal(F::load(dropped + at), zero), zero, dp));
    }
  }

  /// Δ += Σ_j P_j·dP_j for rows with an exact Δ.
  void add_delta(const VectorSpan& span) {
    const auto zero = F::broadcast(0);
    auto sum = zero;
    for (int64_t at = span.begin; at < span.end; at += kLanes) {
      const auto p = F::load(score.scores + at);
      const auto dp =
          F::select(F::is_negative_zero(p), zero, F::load(dscores + at));
      sum = F::fma(p, dp, sum);
    }
    T* mean = delta + span.c * F::kLanes;
    const auto is_exact =
        F::less(zero, F::load(exact_delta + span.c * F::kLanes));
    F::store(mean, F::add(F::load(mean), F::select(is_exact, sum, zero)));
  }

  /// dP → dS.
  void differentiate(const VectorSpan& span) {
    const auto mean = F::load(delta + span.c * F::kLanes);
    for (int64_t at = span.begin; at < span.end; at += kLanes) {
      const auto p = F::load(score.scores + at);
      const auto ds = F::mul(p, F::sub(F::load(dscores + at), mean));
      F::store(dscores + at, F::select(F::is_negative_zero(p), p, ds));
    }
  }
};

}  // namespace
}  // namespace multihead::kernels
