// SPDX-License-Identifier: MIT
//
// Attention forward: FlashAttention (Dao et al., 2022) on a CPU.
//
// For each row of queries:
//   s_j = transform(scale·q·k_j),  m = max_j s_j,  p_j = exp(s_j − m),
//   l = Σ p_j,  out = Σ drop(p_j)·v_j / l,  logsumexp = m + ln l.
//
// A task is some rows of one key/value head, cut into tiles (query_tile.h) that
// walk over the keys split by split and block by block (key_blocks.h). For each
// block:
//   1. scores         S = K·Qᵀ, transformed and masked (scores.h)
//   2. raise_maximum  m; l is scaled by exp(m_old − m)
//   3. exponentiate   P = exp(S − m) in the place of S, l += P; dropout sets P
//                     to 0 where Philox says so
//   4. add_values     O = exp(m_old − m)·O + Vᵀ·Pᵀ
// The splits' online softmaxes are merged; `finish` adds the sink, divides O by
// l and writes it.
//
// A tile of 48 rows needs, in float32, 192·D bytes for Q and for O each and
// 24 KiB for S. K and V are read where they lie, 8·D bytes per key and tile;
// they are packed (pack.h) when they must be widened or their rows lie apart.
//
// A weight of 0 does not silence a NaN or an infinity in a value. The rows of a
// tile see different keys, so a value that one row must not see may be
// multiplied by its weight 0 all the same. Testing every value would cost more
// than anything else here. Instead the result is tested: only if it is not
// finite, the task runs a second time with kMaskNonFinite. Then hidden keys
// have the weight −0, and against −0 a value counts as 0. Both ways give the
// same bits for finite values.
#include "multihead/kernels/cpu/decode/decode.h"
#include "multihead/kernels/cpu/dispatch.h"
#include "multihead/kernels/cpu/forward/dropout.h"
#include "multihead/kernels/cpu/forward/online_softmax.h"
#include "multihead/kernels/cpu/gemm/nonfinite.h"
#include "multihead/kernels/cpu/gemm/stored_rows.h"
#include "multihead/kernels/cpu/scores/scores.h"

namespace multihead::kernels {
namespace {

template <class M, class S>
struct ForwardScratch {
  using F = typename M::F;
  using T = typename F::Scalar;
  /// Per tile of a task.
  struct OfTile {
    T* query;
    OnlineSoftmax<F> total;
  };
  OfTile tiles[kMaxTiles];
  OnlineSoftmax<F> split;
  ScoreScratch<T> score;
  T* block_sum;  ///< (lanes), of the weights of a block
  T* shift;      ///< (lanes), m as it may be subtracted
  T* factor;     ///< (lanes), what O is scaled by
  T* packed;     ///< (kKeyBlock / 2, lanes), P where M packs it
  T* key;        ///< a split, packed; null: in place
  T* value;      ///< the same
  /// A split of keys and values that are stored otherwise.
  typename S::Type *stored_key, *stored_value;

  ForwardScratch(const ForwardArgs& f, const Plan& plan, Arena& arena)
      : score(f.attention, kTileLanes<F>, arena) {
    constexpr int64_t lanes = kTileLanes<F>;
    const AttentionArgs& a = f.attention;
    const auto softmax = [&] {
      return OnlineSoftmax<F>(M::columns(a.Dv), arena);
    };
    const int64_t count = (plan.rows_per_task + lanes - 1) / lanes;
    for (int64_t n = 0; n < count; ++n) {
      tiles[n] = {arena.take<T>(M::depth(a.D) * lanes), softmax()};
    }
    split = softmax();
    block_sum = arena.take<T>(lanes);
    shift = arena.take<T>(lanes);
    factor = arena.take<T>(lanes);
    packed = arena.take<T>(kKeyBlock / 2 * lanes);
    key = plan.pack_key ? arena.take<T>(Panels<M, S>::key_size(kKeySplit, a.D))
                        : nullptr;
    value = plan.pack_value
                ? arena.take<T>(Panels<M, S>::value_size(kKeySplit, a.Dv))
                : nullptr;
    stored_key = arena.take<typename S::Type>(SplitRows<S>::room_size(a, a.D));
    stored_value =
        arena.take<typename S::Type>(SplitRows<S>::room_size(a, a.Dv));
  }
};

/// M: the multiplier; S: how tensors are stored; kMaskNonFinite: see
/// above.
template <class M, class S, bool kMaskNonFinite>
class ForwardTask {
 public:
  using F = typename M::F;
  using T = typename F::Scalar;
  using Tile = QueryTile<F>;
  static constexpr int64_t kLanes = kTileLanes<F>;

  ForwardTask(const ForwardArgs& f, ForwardScratch<M, S>& scratch)
      : f_(f), a_(f.attention), s_(scratch) {}

  /// False: a result is not finite, perhaps by a key that its row cannot see.
  bool run(const TaskGrid::Task& task) {
    Tile tiles[kMaxTiles];
    bool started[kMaxTiles] = {};
    int count = 0;
    const int64_t group = group_of(a_);
    const int64_t rows = min(task.count, rows_of_head(a_, task.b) - task.first);
    Interval all{a_.Lk, 0};
    for (int64_t r = 0; r < rows; r += kLanes, ++count) {
      Tile& tile = tiles[count];
      tile.assign(a_, {task.b, task.head, task.head * group, group,
                       task.first + r, min(kLanes, rows - r)});
      prepare(tile, s_.tiles[count]);
      if (tile.keys.empty()) continue;
      all = {min(all.begin, tile.keys.begin), max(all.end, tile.keys.end)};
    }
    for_each_key_block(all, kKeySplit, [&](Interval split) {
      keys_.read(a_, a_.key, task.b, task.head, split, a_.D, s_.stored_key);
      values_.read(a_, a_.value, task.b, task.head, split, a_.Dv,
                   s_.stored_value);
      const auto key = Panels<M, S>::keys(keys_.rows, keys_.batch, keys_.head,
                                          split, a_.D, s_.key);
      const auto value = Panels<M, S>::template values<kMaskNonFinite>(
          values_.rows, values_.batch, values_.head, split, a_.Dv, s_.value);
      for (int n = 0; n < count; ++n) {
        const Interval keys = overlap(split, tiles[n].keys);
        if (keys.empty()) continue;
        s_.score.query = s_.tiles[n].query;
        auto& total = s_.tiles[n].total;
        auto& state = started[n] ? s_.split : total;
        if (started[n]) s_.split.reset(tiles[n].lanes(), a_.Dv);
        attend(tiles[n], state, keys, key, value);
        if (started[n]) total.merge(s_.split, tiles[n].lanes(), a_.Dv);
        started[n] = true;
      }
    });
    bool finite = true;
    for (int n = 0; n < count; ++n) {
      finite &= finish(tiles[n], s_.tiles[n].total);
    }
    return finite;
  }

 private:
  void prepare(const Tile& tile, typename ForwardScratch<M, S>::OfTile& to) {
    to.total.reset(tile.lanes(), a_.Dv);
    load_queries<M, S>(a_, tile, to.query);
  }

  /// The online softmax of a tile over `keys`, which lie in one split.
  void attend(const Tile& tile, OnlineSoftmax<F>& state, Interval keys,
              const Panel<T>& key, const Panel<T>& value) {
    for_each_key_block(keys, kKeyBlock, [&](Interval here) {
      for (int64_t r = 0; r < tile.lanes(); ++r) {
        s_.score.maximum[r] = state.maximum[r];
      }
      const ScoreBlock block = score_block<M>(a_, tile, key, here, s_.score);
      if (block.count == 0) return;
      raise_maximum(tile, state);
      for_each_vector<F>(block, [&](const VectorSpan& span) {
        if constexpr (M::kPacksWeights && !kMaskNonFinite) {
          if (packs_at_once()) return exponentiate_pairs(block.anchor, span);
        }
        exponentiate(span);
        if (a_.dropout.probability > 0) {
          drop(a_, tile, span, s_.score.scores + span.begin);
        }
      });
      state.add(s_.block_sum, tile.lanes());
      for (int n = 0; n < block.count; ++n) {
        add_values(tile, state, block, block.segments[n], value);
      }
    });
  }

  /// Raises m. l is scaled at once; O by the same factor when P·V is next
  /// added.
  void raise_maximum(const Tile& tile, OnlineSoftmax<F>& state) {
    for (int64_t r = 0; r < tile.lanes(); r += F::kLanes) {
      const auto m = F::load(s_.score.maximum + r);
      const auto shift = shift_of<F>(m);
      const auto factor = exp<F>(F::sub(F::load(state.maximum + r), shift));
      F::store(state.maximum + r, m);
      F::store(s_.shift + r, shift);
      F::store(s_.factor + r, factor);
      F::store(state.sum + r, F::mul(F::load(state.sum + r), factor));
      F::store(s_.block_sum + r, F::broadcast(0));
    }
  }

  /// S → P, in place.
  void exponentiate(const VectorSpan& span) {
    const int64_t r = span.c * F::kLanes;
    const auto shift = F::load(s_.shift + r);
    auto sum = F::load(s_.block_sum + r);
#pragma GCC unroll 4
    for (int64_t at = span.begin; at < span.end; at += kLanes) {
      const auto s = F::load(s_.score.scores + at);
      auto p = exp<F>(F::sub(s, shift));
      sum = F::add(sum, p);
      if constexpr (kMaskNonFinite) {
        p = F::select(F::equal(s, F::broadcast(T(-INFINITY))),
                      F::broadcast(T(-0.0)), p);
      }
      F::store(s_.score.scores + at, p);
    }
    F::store(s_.block_sum + r, sum);
  }

  /// Whether P is rounded and packed as it is computed, not in a pass of its
  /// own: with dropout it has to be seen once more.
  bool packs_at_once() const {
    return M::kPacksWeights && !kMaskNonFinite && a_.dropout.probability == 0;
  }

  /// S → P in pairs of keys. The same P and sums as exponentiate.
  void exponentiate_pairs(int64_t anchor, const VectorSpan& span) {
    const int64_t r = span.c * F::kLanes;
    const auto shift = F::load(s_.shift + r);
    auto sum = F::load(s_.block_sum + r);
    T* pairs = s_.packed + (span.keys.begin - anchor) / 2 * kLanes + r;
#pragma GCC unroll 4
    for (int64_t at = span.begin; at < span.end; at += 2 * kLanes) {
      const T* s = s_.score.scores + at;
      const auto even = exp<F>(F::sub(F::load(s), shift));
      const auto odd = exp<F>(F::sub(F::load(s + kLanes), shift));
      sum = F::add(F::add(sum, even), odd);
      F::store(pairs, M::pair(even, odd));
      pairs += kLanes;
    }
    F::store(s_.block_sum + r, sum);
  }

  /// O = factor·O + Vᵀ·Pᵀ.
  void add_values(const Tile& tile, OnlineSoftmax<F>& state,
                  const ScoreBlock& block, const Segment& segment,
                  const Panel<T>& value) {
    const int64_t from = segment.first * F::kLanes;
    const int vectors = segment.last - segment.first;
    const int64_t count = segment.keys.end - segment.keys.begin;
    const int64_t row = segment.keys.begin - block.anchor;
    T* weights = s_.score.scores + from + row * kLanes;
    const T* packed = packs_at_once()
                          ? s_.packed + from + row / 2 * kLanes
                          : M::pack_weights(weights, count, vectors, s_.packed);
    Gemm<M>::template pv<kMaskNonFinite>(
        {.value = value.row(M::depth(segment.keys.begin)),
         .value_stride = value.stride,
         .weights = packed,
         .depth = M::depth(count),
         .context = state.context + from,
         .factor = s_.factor + from},
        a_.Dv, vectors, rows_of(tile, segment));
    if constexpr (kMaskNonFinite && M::kPackDropsNonFinite) {
      const Interval keys = overlap(segment.keys, tile.keys);
      for (int64_t j = keys.begin; j < keys.end; ++j) {
        add_nonfinite<S>(row_of<typename S::Type>(values_.rows, values_.batch,
                                                  values_.head, j),
                         a_.Dv, weights + (j - segment.keys.begin) * kLanes,
                         vectors, state.context + from);
      }
    }
    const auto one = F::broadcast(1);
    for (int c = segment.first; c < segment.last; ++c) {
      F::store(s_.factor + c * F::kLanes, one);
    }
  }

  /// out and logsumexp of a tile; false where a row's is not finite.
  bool finish(const Tile& tile, OnlineSoftmax<F>& total) {
    const double p = a_.dropout.probability;
    const auto kept = F::broadcast(static_cast<T>(p < 1 ? 1 / (1 - p) : 0));
    bool finite = true;
    for (int c = 0; c < tile.vectors; ++c) {
      const int64_t r = c * F::kLanes;
      auto m = F::load(total.maximum + r), l = F::load(total.sum + r);
      auto factor = F::broadcast(1);
      if (a_.sinks) {
        alignas(64) T sinks[F::kLanes];
        for (int i = 0; i < F::kLanes; ++i) {
          sinks[i] = static_cast<T>(a_.sinks[tile.head[r + i]]);
        }
        const auto sink = F::load(sinks), raised = F::max(sink, m);
        const auto shift = shift_of<F>(raised);
        factor = exp<F>(F::sub(m, shift));
        l = F::fma(l, factor, exp<F>(F::sub(sink, shift)));
        m = raised;
      }
      const auto zero = F::broadcast(0);
      const auto inverse =
          F::select(F::equal(l, zero), zero, F::div(factor, l));
      finite &= kMaskNonFinite || is_finite(tile, total.context + r, r);
      store_out(tile, total.context + r, F::mul(inverse, kept), r);
      if (f_.logsumexp) {
        store_logsumexp(tile, F::add(shift_of<F>(m), log<F>(l)), r);
      }
    }
    return finite;
  }

  bool is_finite(const Tile& tile, const T* context, int64_t from) {
    // 0·x is 0 or NaN; four sums, as one chain would only wait for itself.
    const auto zero = F::broadcast(0);
    typename F::Vector sums[4] = {zero, zero, zero, zero};
    int64_t e = 0;
    for (; e + 4 <= a_.Dv; e += 4) {
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) {
        sums[n] = F::fma(F::load(context + (e + n) * kLanes), zero, sums[n]);
      }
    }
    for (; e < a_.Dv; ++e) {
      sums[0] = F::fma(F::load(context + e * kLanes), zero, sums[0]);
    }
    alignas(64) T lanes[F::kLanes];
    F::store(lanes, F::add(F::add(sums[0], sums[1]), F::add(sums[2], sums[3])));
    for (int i = 0; i < F::kLanes && from + i < tile.count; ++i) {
      if (!(lanes[i] == 0)) return false;
    }
    return true;
  }

  void store_out(const Tile& tile, const T* context, typename F::Vector factor,
                 int64_t from) {
    typename S::Type* rows[F::kLanes];
    for (int i = 0; i < F::kLanes; ++i) {
      const int64_t r = from + i;
      rows[i] = r < tile.count
                    ? row_of<typename S::Type>(f_.out, tile.b, tile.head[r],
                                               tile.query[r])
                    : nullptr;
    }
    store_lanes<S>(context, factor, a_.Dv, rows);
  }

  void store_logsumexp(const Tile& tile, typename F::Vector lse, int64_t from) {
    alignas(64) T lanes[F::kLanes];
    F::store(lanes, lse);
    auto* out = static_cast<T*>(f_.logsumexp);
    for (int i = 0; i < F::kLanes && from + i < tile.count; ++i) {
      const int64_t r = from + i;
      out[query_index(a_, tile.b, tile.head[r], tile.query[r])] = lanes[i];
    }
  }

  const ForwardArgs& f_;
  const AttentionArgs& a_;
  ForwardScratch<M, S>& s_;
  SplitRows<S> keys_, values_;
};

TaskGrid grid_of(const AttentionArgs& a, const Plan& plan) {
  return {a.B, a.G, most_rows_of_head(a), plan.rows_per_task,
          plan.longest_first};
}

/// The forward pass; calls of few rows are decoded (decode.h).
template <class M, class S>
struct ForwardKernel {
  using Type = Kernel<ForwardArgs>;

  static Plan plan(const ForwardArgs& f, int threads) {
    const AttentionArgs& a = f.attention;
    constexpr int64_t kLanes = kTileLanes<typename M::F>;
    const int64_t rows = most_rows_of_head(a);
    Plan plan;
    const int64_t tiles = tiles_per_task(rows, a.B * a.G, kLanes, threads);
    plan.rows_per_task = tiles * kLanes;
    plan.longest_first = a.visibility.is_causal;
    // Rows that lie apart cost cache lines and pages; a copy pays as soon as
    // two tiles share it. Pages have no stride to read them in place.
    const auto packs = [&](const StridedRows& x, int64_t width) {
      return !Panels<M, S>::kInPlace || x.block_table ||
             a.storage != Storage::kAsQuery || (x.row != width && tiles > 1);
    };
    plan.pack_key = packs(a.key, a.D);
    plan.pack_value = packs(a.value, a.Dv);
    plan.tasks = grid_of(a, plan).tasks();
    Arena arena(nullptr);
    ForwardScratch<M, S>(f, plan, arena);
    if constexpr (M::kHasRowProducts) {
      if (is_decoding(a, rows)) {
        plan_decoding<M, S>(a, threads, arena, plan);
      } else if (a.query.starts) {
        DecodeScratch<M, S>(a, arena);
      }
    }
    plan.scratch_bytes = arena.used();
    return plan;
  }

  static void run(const ForwardArgs& f, const Plan& plan, int64_t first,
                  int64_t last, void* scratch) {
    const typename Gemm<M>::Registers registers;
    Arena arena(scratch);
    ForwardScratch<M, S> s(f, plan, arena);
    if constexpr (M::kHasRowProducts) {
      if (plan.is_decoding) {
        return run_decoding(f, plan, first, last, arena, s, /*merge=*/false);
      }
    }
    const AttentionArgs& a = f.attention;
    const TaskGrid grid = grid_of(a, plan);
    // For the sequences of a ragged batch that are decoded beside longer ones.
    [[maybe_unused]] void* rest = static_cast<char*>(scratch) + arena.used();
    for (int64_t n = first; n < last; ++n) {
      const TaskGrid::Task task = grid[n];
      if constexpr (M::kHasRowProducts) {
        const int64_t rows = rows_of_head(a, task.b);
        if (a.query.starts && is_decoding(a, rows)) {
          if (task.first == 0 && rows > 0) decode_head(f, plan, task, rest, s);
          continue;
        }
      }
      if (n + 1 < last && !grid[n + 1].same_head(task) &&
          a.storage == Storage::kAsQuery) {
        fetch_ahead<S>(f, grid[n + 1]);
      }
      if (!ForwardTask<M, S, false>(f, s).run(task)) {
        ForwardTask<M, S, true>(f, s).run(task);
      }
    }
  }

  /// A sequence of few rows in a ragged batch of longer ones.
  static void decode_head(const ForwardArgs& f, const Plan& plan,
                          const TaskGrid::Task& task, void* memory,
                          ForwardScratch<M, S>& careful) {
    Arena arena(memory);
    DecodeScratch<M, S> scratch(f.attention, arena);
    const int64_t head = task.b * f.attention.G + task.head;
    if (decode(f, plan, head, scratch)) return;
    ForwardTask<M, S, true>(f, careful).run(task);
  }

  /// Decodes, or merges what was decoded in splits. Where a result is not
  /// finite, the head is computed again.
  static void run_decoding(const ForwardArgs& f, const Plan& plan,
                           int64_t first, int64_t last, Arena& arena,
                           ForwardScratch<M, S>& careful, bool merge) {
    const AttentionArgs& a = f.attention;
    DecodeScratch<M, S> scratch(a, arena);
    for (int64_t n = first; n < last; ++n) {
      const bool finite = merge ? merge_splits(f, plan, n, scratch)
                                : decode(f, plan, n, scratch);
      if (finite) continue;
      ForwardTask<M, S, true>(f, careful)
          .run({n / a.G, n % a.G, 0, most_rows_of_head(a)});
    }
  }
};

/// The last step where splits are decoded one by one.
template <class M, class S>
struct MergeKernel {
  using Type = Kernel<ForwardArgs>;
  using Forward = ForwardKernel<M, S>;

  static Plan plan(const ForwardArgs& f, int threads) {
    Plan plan = Forward::plan(f, threads);
    plan.tasks = plan.splits > 0 ? f.attention.B * f.attention.G : 0;
    return plan;
  }

  static void run(const ForwardArgs& f, const Plan& plan, int64_t first,
                  int64_t last, void* scratch) {
    if constexpr (M::kHasRowProducts) {
      Arena arena(scratch);
      ForwardScratch<M, S> careful(f, plan, arena);
      Forward::run_decoding(f, plan, first, last, arena, careful,
                            /*merge=*/true);
    }
  }
};

}  // namespace

Kernel<ForwardArgs> MULTIHEAD_FOR_TARGET(forward)(Dtype dtype) {
  return visit<ForwardKernel>(dtype);
}
Kernel<ForwardArgs> MULTIHEAD_FOR_TARGET(merge)(Dtype dtype) {
  return visit<MergeKernel>(dtype);
}

}  // namespace multihead::kernels
