// SPDX-License-Identifier: MIT
//
// Weights from the logsumexp, in a second pass over q·k, as FlashAttention's
// backward pass finds them: w_j = exp(s_j − logsumexp). prepare.cpp,
// weights.cpp and summary.cpp share it.
//
// Near a large logsumexp float32 has no room for what matters: if all n scores
// are −1e9, as masks make them, the logsumexp rounds to −1e9 and n is lost. For
// such rows maximum and sum are computed again, w_j = exp(s_j − m) / l.
#pragma once

#include <string.h>

#include "multihead/kernels/cpu/forward/dropout.h"
#include "multihead/kernels/cpu/forward/online_softmax.h"

namespace multihead::kernels {
namespace {

/// w = exp(s − shift)·inv_sum, per lane: (logsumexp, 1), or (m, 1 / l).
template <typename T>
struct SoftmaxStats {
  T* shift;
  T* inv_sum;
};

template <class M, class S>
struct WeightsScratch {
  using F = typename M::F;
  using T = typename F::Scalar;
  ScoreScratch<T> score;
  T* queries;             ///< (heads, depth, lanes)
  T* sum;                 ///< (kKeyBlock, lanes)
  SoftmaxStats<T> stats;  ///< (heads, lanes)
  T* key;                 ///< a block, packed; null: in place

  WeightsScratch(const AttentionArgs& a, const Plan& plan, int64_t heads,
                 Arena& arena)
      : score(a, kTileLanes<F>, arena),
        queries(arena.take<T>(heads * M::depth(a.D) * kTileLanes<F>)),
        sum(arena.take<T>(kKeyBlock * kTileLanes<F>)),
        stats{arena.take<T>(heads * kTileLanes<F>),
              arena.take<T>(heads * kTileLanes<F>)},
        key(plan.pack_key
                ? arena.take<T>(Panels<M, S>::key_size(kKeyBlock, a.D))
                : nullptr) {}
};

/// Rows `first`… of the heads first_head ≤ h < last_head of batch row b.
struct HeadRange {
  int64_t b, first_head, last_head, first, count;
};

template <class F>
inline QueryTile<F> tile_of(const AttentionArgs& a, const HeadRange& rows,
                            int64_t head) {
  return QueryTile<F>(
      a, {rows.b, head / group_of(a), head, 1, rows.first, rows.count});
}

/// The scores of a tile, whose queries are s.score.query, and `keys`.
template <class M, class S>
inline ScoreBlock pack_and_score(const AttentionArgs& a,
                                 const QueryTile<typename M::F>& tile,
                                 Interval keys, WeightsScratch<M, S>& s) {
  const auto panel =
      Panels<M, S>::keys(a.key, tile.b, tile.g, keys, a.D, s.key);
  return score_block<M>(a, tile, panel, keys, s.score);
}

/// Maximum and sum, sink included, of the rows of a tile whose logsumexp is
/// large.
template <class M, class S>
inline void recompute_stats(const AttentionArgs& a,
                            const QueryTile<typename M::F>& tile,
                            WeightsScratch<M, S>& s,
                            SoftmaxStats<ScalarOf<M>> n) {
  using F = typename M::F;
  using T = typename F::Scalar;
  alignas(64) T m[kTileLanes<F>], l[kTileLanes<F>];
  for (int64_t r = 0; r < tile.lanes(); ++r) {
    m[r] = a.sinks ? static_cast<T>(a.sinks[tile.head[r]]) : T(-INFINITY);
    l[r] = a.sinks ? 1 : 0;
  }
  for_each_key_block(tile.keys, kKeyBlock, [&](Interval keys) {
    memcpy(s.score.maximum, m, sizeof m);
    const ScoreBlock block = pack_and_score<M, S>(a, tile, keys, s);
    for_each_vector<F>(block, [&](const VectorSpan& span) {
      const int64_t r = span.c * F::kLanes;
      const auto raised = F::load(s.score.maximum + r);
      const auto shift = shift_of<F>(raised);
      auto sum = F::mul(F::load(l + r), exp<F>(F::sub(F::load(m + r), shift)));
      for (int64_t at = span.begin; at < span.end; at += kTileLanes<F>) {
        sum = F::add(sum, exp<F>(F::sub(F::load(s.score.scores + at), shift)));
      }
      F::store(l + r, sum);
      F::store(m + r, raised);
    });
  });
  for (int64_t r = 0; r < tile.lanes(); ++r) {
    if (!(fabs(n.shift[r]) > kLargeLogsumexp)) continue;
    n.shift[r] = m[r];
    n.inv_sum[r] = 1 / l[r];
  }
}

/// What the logsumexp says of a tile's rows; whether one of them must be
/// recomputed.
template <class F>
inline bool read_stats(const AttentionArgs& a, const QueryTile<F>& tile,
                       const void* logsumexp, SoftmaxStats<ScalarOf<F>> n) {
  using T = typename F::Scalar;
  const auto* lse = static_cast<const T*>(logsumexp);
  bool large = false;
  for (int64_t r = 0; r < tile.lanes(); ++r) {
    const T x = lse[query_index(a, tile.b, tile.head[r], tile.query[r])];
    n.shift[r] = x == T(-INFINITY) ? 0 : x;
    n.inv_sum[r] = 1;
    large |= fabs(n.shift[r]) > kLargeLogsumexp;
  }
  return large;
}

/// The stats of a tile, whose queries are s.score.query, recomputed where
/// needed.
template <class M, class S>
inline void load_stats(const AttentionArgs& a,
                       const QueryTile<typename M::F>& tile,
                       const void* logsumexp, WeightsScratch<M, S>& s,
                       SoftmaxStats<ScalarOf<M>> n) {
  const bool large = read_stats<typename M::F>(a, tile, logsumexp, n);
  // score_block raises it; nobody reads it.
  for (int64_t r = 0; r < tile.lanes(); ++r) s.score.maximum[r] = 0;
  if (large) recompute_stats<M, S>(a, tile, s, n);
}

}  // namespace
}  // namespace multihead::kernels
