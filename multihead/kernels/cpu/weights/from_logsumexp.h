// SPDX-License-Identifier: MIT
//
// A second pass over q·k, from the logsumexp of the first: what weights.cpp and
// summary.cpp share.
//   w_j = exp(s_j − logsumexp)
// Near a large logsumexp float32 has no room for what matters: of n scores of
// −1e9, as masks are made of, logsumexp rounds to −1e9 and forgets n. For such
// rows maximum and sum are taken anew, w_j = exp(s_j − m) / l.
#pragma once

#include <string.h>

#include "multihead/kernels/cpu/forward/dropout.h"
#include "multihead/kernels/cpu/forward/online_softmax.h"

namespace multihead::kernels {
namespace {

/// w = exp(s − shift)·inv_sum, per lane.
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

/// Maximum and sum of the rows of a tile whose logsumexp is large, sink
/// included; queries and keys as for any block.
template <class M, class S>
inline void recompute_stats(const AttentionArgs& a,
                            const QueryTile<typename M::F>& tile,
                            WeightsScratch<M, S>& s,
                            SoftmaxStats<typename M::F::Scalar> n) {
  using F = typename M::F;
  using T = typename F::Scalar;
  alignas(64) T m[kTileLanes<F>], l[kTileLanes<F>];
  for (int64_t r = 0; r < tile.lanes(); ++r) {
    m[r] = a.sinks ? static_cast<T>(a.sinks[tile.head[r]]) : T(-INFINITY);
    l[r] = a.sinks ? 1 : 0;
  }
  for (int64_t at = round_down(tile.keys.begin, kKeyBlock); at < tile.keys.end;
       at += kKeyBlock) {
    const Interval keys = overlap(tile.keys, {at, at + kKeyBlock});
    memcpy(s.score.maximum, m, sizeof m);
    const auto panel =
        Panels<M, S>::keys(a.key, tile.b, tile.g, keys, a.D, s.key);
    const ScoreBlock block = score_block<M>(a, tile, panel, keys, s.score);
    for (int i = 0; i < block.count; ++i) {
      const Segment& segment = block.segments[i];
      for (int64_t r = segment.first * F::kLanes; r < segment.last * F::kLanes;
           r += F::kLanes) {
        const auto raised = F::load(s.score.maximum + r);
        const auto shift = shift_of<F>(raised);
        auto sum =
            F::mul(F::load(l + r), exp<F>(F::sub(F::load(m + r), shift)));
        for (int64_t j = segment.keys.begin; j < segment.keys.end; ++j) {
          const T* score =
              s.score.scores + (j - block.anchor) * kTileLanes<F> + r;
          sum = F::add(sum, exp<F>(F::sub(F::load(score), shift)));
        }
        F::store(l + r, sum);
        F::store(m + r, raised);
      }
    }
  }
  for (int64_t r = 0; r < tile.lanes(); ++r) {
    if (!(fabs(n.shift[r]) > kLargeLogsumexp)) continue;
    n.shift[r] = m[r];
    n.inv_sum[r] = 1 / l[r];
  }
}

/// exp(−logsumexp) for the rows of a tile; whether one must be taken anew.
template <class F>
inline bool read_stats(const AttentionArgs& a, const QueryTile<F>& tile,
                       const void* logsumexp,
                       SoftmaxStats<typename F::Scalar> n) {
  using T = typename F::Scalar;
  const auto* lse = static_cast<const T*>(logsumexp);
  bool large = false;
  for (int64_t r = 0; r < tile.lanes(); ++r) {
    const T x = lse[(tile.b * a.H + tile.head[r]) * a.Lq + tile.query[r]];
    n.shift[r] = x == T(-INFINITY) ? 0 : x;
    n.inv_sum[r] = 1;
    large |= fabs(n.shift[r]) > kLargeLogsumexp;
  }
  return large;
}

/// The normalizer of a tile, whose queries are s.score.query.
template <class M, class S>
inline void load_stats(const AttentionArgs& a,
                       const QueryTile<typename M::F>& tile,
                       const void* logsumexp, WeightsScratch<M, S>& s,
                       SoftmaxStats<typename M::F::Scalar> n) {
  const bool large = read_stats<typename M::F>(a, tile, logsumexp, n);
  // Raised by products, and not looked at.
  for (int64_t r = 0; r < tile.lanes(); ++r) s.score.maximum[r] = 0;
  if (large) recompute_stats<M, S>(a, tile, s, n);
}

}  // namespace
}  // namespace multihead::kernels
