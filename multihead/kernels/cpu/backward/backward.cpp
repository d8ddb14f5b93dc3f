// SPDX-License-Identifier: MIT
//
// Attention backward: FlashAttention-2's (Dao, 2023), forward.cpp
// differentiated line by line.
//
// For each row of queries, with what forward returned; quoted is the line of
// forward.cpp whose gradient it is:
//   Δ = Σ out·dout − dlogsumexp                        once per row
//   P = exp(S − logsumexp)                             recomputed
//   dV += Pᵀ·dO                          "O += Vᵀ·Pᵀ"
//   dP = V·dOᵀ                           "O += Vᵀ·Pᵀ"
//   dP = dP·drop/(1 − p)                 "dropout sets P to 0"
//   dS = P∘(dP − Δ)                      "P = exp(S − m)", "out = … / l"
//   dS = dS·(1 − tanh²)                  "transform(…)": softcap; not the bias
//   dQ += scale·dS·K, dK += scale·dSᵀ·Q  "S = K·Qᵀ"
// Δ stands for Σ_j P_j·dP_j, because out = Σ_j P_j·v_j; where out was rounded
// to 16 bits and a row sees few keys, it is that sum (recompute.h).
//
//                 keys →
//              split 0   split 1   split 2      A task owns dK and dV of a
//              split
//            ┌─────────┬─────────┬─────────┐    (kGradientSplit keys), or of
//            all
//   tile 0   │    │    │         │         │    splits of a head, one by one.
//   All tile 1   │    ▼    │    │    │         │    rows add to them in
//   ascending tile 2   │ dK, dV  │    ▼    │    │    │ →  order. dQ of a tile
//   is the sum
//            └─────────┴─────────┴─────────┘    over the splits.
//
// A tile takes the keys of a split in steps of kStep: it recomputes P and dS
// (recompute.h) and adds to dV, dK and its own dQ (accumulate.h). So no two
// tasks ever write one number. Where there are enough heads, a task is a head.
// Where there are not, a task is a split of a head: waves of some splits leave
// their shares of dQ in the workspace, and a second stage (prepare.cpp) adds
// them up in the same order. So bits depend neither on threads nor on the size
// of a wave.
//
// A tile of 48 rows needs, in float32, 5 times 192·D bytes: Q and dO twice
// (lanes and rows), and dQ; S and dP 24 KiB each. K, V, dK and dV of a split
// are 1024·D bytes each, half an L2 cache at D = 128. In pairs of bfloat16 Q,
// dO, K and V are half of that, but K is packed twice, by keys for S and by
// columns for dQ. The workspace holds 12 bytes per row, and if splits are tasks
// (splits_per_wave + 1) times dQ.
//
// What is hidden must not reach the three sums: a tile that meets a number that
// is not finite in Q, K, V or dO runs with kMaskNonFinite: hidden keys have the
// weight −0, and against it anything counts as 0 (forward.cpp).
#include <string.h>

#include "multihead/kernels/cpu/backward/accumulate.h"
#include "multihead/kernels/cpu/dispatch.h"
#ifdef MULTIHEAD_BFLOAT16_MULTIPLIER
#include "multihead/kernels/cpu/backward/accumulate_bf16.h"
#endif

namespace multihead::kernels {
namespace {

template <class M, class S>
struct BackwardScratch {
  using F = typename M::F;
  using T = typename F::Scalar;
  int64_t key_width, value_width;  ///< D and Dv in whole vectors

  ScoreGradient<M, S> scores;
  GradientAccumulator<M, S> gradients;
  T *key, *value, *key_columns;  ///< a split, packed; null: in place
  struct Sums {
    T* dkey;    ///< (kGradientSplit, key_width)
    T* dvalue;  ///< (kGradientSplit, value_width)
  };
  Sums sums, total;  ///< of kRowSplit rows, of all; one where that suffices
  T* head;           ///< (rows, row_width): dQ of a head that is one task

  BackwardScratch(const BackwardRun& run, const Plan& plan, Arena& arena)
      : key_width(padded<F>(run.args.attention.D)),
        value_width(padded<F>(run.args.attention.Dv)),
        scores(run.args.attention, arena),
        gradients(run.args, arena) {
    const AttentionArgs& a = run.args.attention;
    const auto panel = [&](bool packed, int64_t size) {
      return packed ? arena.take<T>(size) : nullptr;
    };
    using P = Panels<M, S>;
    key = panel(plan.pack_key, P::key_size(kGradientSplit, a.D));
    value = panel(plan.pack_value, P::key_size(kGradientSplit, a.Dv));
    key_columns = panel(!P::kKeysAreValues, P::value_size(kGradientSplit, a.D));
    const auto take_sums = [&] {
      return Sums{arena.take<T>(kGradientSplit * key_width),
                  arena.take<T>(kGradientSplit * value_width)};
    };
    sums = take_sums();
    const int64_t rows = most_rows_of_head(a);
    total = rows > kRowSplit ? take_sums() : sums;
    head =
        panel(!run.split_parallel, rows * Workspace<F>::row_width_of(run.args));
  }
};

/// One split of keys of one key/value head against all its rows.
template <class M, class S>
class SplitTask {
 public:
  using F = typename M::F;
  using T = typename F::Scalar;
  using Tile = QueryTile<F>;
  static constexpr int64_t kLanes = kTileLanes<F>;

  SplitTask(const BackwardArgs& b, const Workspace<F>& workspace,
            BackwardScratch<M, S>& scratch)
      : b_(b), a_(b.attention), w_(workspace), s_(scratch) {}

  /// dK and dV of the split; its shares of dQ are added to `rows`
  /// (rows, row_width).
  void run(int64_t b, int64_t g, int64_t split, T* rows) {
    const int64_t begin = split * kGradientSplit;
    const Interval all{begin, min(begin + kGradientSplit, key_rows(a_, b))};
    used_ = round_up(all.end - begin, GradientAccumulator<M, S>::kSumKeys);
    folds_ = rows_of_head(a_, b) > kRowSplit;
    clear(s_.sums);
    if (folds_) clear(s_.total);
    const Interval keys =
        overlap(all, {visible_keys(a_, b, 0).begin,
                      visible_keys(a_, b, query_length(a_, b) - 1).end});
    if (!keys.empty()) add_rows(b, g, keys, rows);
    if (folds_) fold();
    const auto& sums = folds_ ? s_.total : s_.sums;
    store(b_.dkey, b, g, all, sums.dkey, s_.key_width, a_.scale, a_.D);
    const double p = a_.dropout.probability;
    store(b_.dvalue, b, g, all, sums.dvalue, s_.value_width,
          p < 1 ? 1 / (1 - p) : 0, a_.Dv);
  }

 private:
  void clear(const typename BackwardScratch<M, S>::Sums& sums) {
    memset(sums.dkey, 0, used_ * s_.key_width * sizeof(T));
    memset(sums.dvalue, 0, used_ * s_.value_width * sizeof(T));
  }

  /// total += sums, sums = 0.
  void fold() {
    const auto add = [](T* total, const T* sums, int64_t count) {
      for (int64_t i = 0; i < count; i += F::kLanes) {
        F::store(total + i, F::add(F::load(total + i), F::load(sums + i)));
      }
    };
    add(s_.total.dkey, s_.sums.dkey, used_ * s_.key_width);
    add(s_.total.dvalue, s_.sums.dvalue, used_ * s_.value_width);
    clear(s_.sums);
  }

  void store(const StridedOutRows& out, int64_t b, int64_t g, Interval keys,
             const T* rows, int64_t stride, double factor, int64_t width) {
    if (!out.data) return;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      store_row<S>(rows + (j - keys.begin) * stride, static_cast<T>(factor),
                   width, row_of<typename S::Type>(out, b, g, j));
    }
  }

  void add_rows(int64_t b, int64_t g, Interval keys, T* rows) {
    read(b, g, keys);
    constexpr int64_t kGroup = M::kOuterTiles * kLanes;
    static_assert(kRowSplit % kGroup == 0);
    const int64_t count = rows_of_head(a_, b);
    for (int64_t first = 0; first < count; first += kGroup) {
      const int64_t next = first + kGroup;
      add_group({first, min(next, count)}, rows);
      if (next % kRowSplit == 0 && next < count) fold();
    }
  }

  /// The split from memory.
  void read(int64_t b, int64_t g, Interval keys) {
    using P = Panels<M, S>;
    split_.b = b;
    split_.g = g;
    split_.keys = keys;
    split_.dkey = s_.sums.dkey;
    split_.dvalue = s_.sums.dvalue;
    split_.finite = is_finite(a_.key, b, g, keys, a_.D) &&
                    is_finite(a_.value, b, g, keys, a_.Dv);
    split_.key = P::keys(a_.key, b, g, keys, a_.D, s_.key);
    split_.value = P::keys(a_.value, b, g, keys, a_.Dv, s_.value);
    split_.key_columns = split_.key;
    if constexpr (!P::kKeysAreValues) {
      split_.key_columns =
          P::template values<true>(a_.key, b, g, keys, a_.D, s_.key_columns);
    }
  }

  /// The rows of some tiles, which add to dK and dV together.
  void add_group(Interval group, T* rows) {
    if (!is_seen_by(group)) return;
    for (int n = 0; n < M::kOuterTiles; ++n) {
      const int64_t first = group.begin + n * kLanes;
      const Interval here{first, min(first + kLanes, group.end)};
      if (here.empty() || !is_seen_by(here)) {
        s_.gradients.skip_tile(split_, n);
        continue;
      }
      const int64_t count = here.end - first, heads = group_of(a_);
      tile_.assign(a_,
                   {split_.b, split_.g, split_.g * heads, heads, first, count});
      s_.scores.load(b_, w_, tile_);
      const bool finite = s_.gradients.begin_tile(tile_, n) && split_.finite;
      finite ? add_tile<false>() : add_tile<true>();
      if (needs_dscores(b_)) {
        add_lanes<F>(s_.gradients.dquery, columns(), w_.row_width, count,
                     rows + first * w_.row_width);
      }
    }
    s_.gradients.end_group(split_);
  }

  /// Whether some of these rows sees some key of the split.
  bool is_seen_by(Interval rows) const {
    const int64_t heads = group_of(a_);
    const Interval seen{visible_keys(a_, split_.b, rows.begin / heads).begin,
                        visible_keys(a_, split_.b, (rows.end - 1) / heads).end};
    return !overlap(split_.keys, seen).empty();
  }

  /// Used of a row of dQ: with the gradient of its slope, if wanted.
  int64_t columns() const { return a_.D + (b_.dalibi_slopes ? 1 : 0); }

  static bool is_finite(const StridedRows& x, int64_t b, int64_t g,
                        Interval keys, int64_t width) {
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const auto* row = row_of<typename S::Type>(x, b, g, j);
      if (!kernels::is_finite<S>(row, width)) return false;
    }
    return true;
  }

  template <bool kMaskNonFinite>
  void add_tile() {
    constexpr int64_t kStep = GradientAccumulator<M, S>::kStep;
    for_each_key_block(split_.keys, kStep, [&](Interval step) {
      const int64_t at = round_down(step.begin, kStep);
      const Interval seen = overlap(step, tile_.keys);
      ScoreBlock block;
      block.anchor = round_down(at, kKeyBlock);
      if (!seen.empty()) {
        block = s_.scores.compute(a_, tile_, split_.key, split_.value, seen,
                                  needs_dscores(b_));
      }
      for_each_vector<F>(block, [&](const VectorSpan& span) {
        if (b_.dalibi_slopes) add_slopes(span, block.anchor);
        if (a_.softcap != 0) pass_softcap(span);
      });
      s_.gradients.template add<kMaskNonFinite>(split_, tile_, s_.scores, block,
                                                at);
    });
    s_.gradients.end_tile(split_, tile_);
  }

  /// "transform(…)", softcap·tanh(s / softcap): dS times 1 − tanh².
  void pass_softcap(const VectorSpan& span) {
    for (int64_t at = span.begin; at < span.end; at += kLanes) {
      T* ds = s_.scores.dscores + at;
      const auto slope = F::load(s_.scores.score.softcap_slope + at);
      F::store(ds, F::select(F::is_negative_zero(F::load(ds)), F::load(ds),
                             F::mul(F::load(ds), slope)));
    }
  }

  /// "transform(…)", s −= slope·|i + offset − j|: the column of dQ after its
  /// last.
  void add_slopes(const VectorSpan& span, int64_t anchor) {
    const int64_t r = span.c * F::kLanes;
    alignas(64) T here[F::kLanes];
    for (int i = 0; i < F::kLanes; ++i) {
      here[i] = static_cast<T>(tile_.position[r + i] - anchor);
    }
    const auto position = F::load(here);
    T* slopes = s_.gradients.dquery + a_.D * kLanes + r;
    auto sum = F::load(slopes);
    int64_t j = span.keys.begin - anchor;
    for (int64_t at = span.begin; at < span.end; at += kLanes, ++j) {
      const auto key = F::broadcast(static_cast<T>(j));
      const auto distance = F::abs(F::sub(position, key));
      const auto ds = F::load(s_.scores.dscores + at);
      sum = F::sub(sum, F::mul(ds, distance));
    }
    F::store(slopes, sum);
  }

  const BackwardArgs& b_;
  const AttentionArgs& a_;
  const Workspace<F>& w_;
  BackwardScratch<M, S>& s_;
  KeySplit<T> split_;
  int64_t used_ = 0;    ///< keys of the split, in whole groups of kSumKeys
  bool folds_ = false;  ///< sums of kRowSplit rows are added to a total
  Tile tile_;
};

template <class M, class S>
struct BackwardKernel {
  using Type = Kernel<BackwardRun>;
  using F = typename M::F;
  using T = typename F::Scalar;

  /// Tasks: heads, or (head, split of the wave).
  static Plan plan(const BackwardRun& run, int /*threads*/) {
    const BackwardArgs& b = run.args;
    const AttentionArgs& a = b.attention;
    Plan plan;
    const int64_t splits =
        min(run.splits_per_wave, splits_of(a.Lk) - run.first_split);
    plan.tasks = a.B * a.G * (run.split_parallel ? splits : 1);
    if (!needs_dscores(b) && !b.dvalue.data) plan.tasks = 0;
    constexpr bool kWiden = !Panels<M, S>::kInPlace;
    plan.pack_key = kWiden || a.key.row != a.D;
    plan.pack_value = kWiden || a.value.row != a.Dv;
    Arena arena(nullptr);
    BackwardScratch<M, S>(run, plan, arena);
    plan.scratch_bytes = arena.used();
    return plan;
  }

  static void run(const BackwardRun& run, const Plan& plan, int64_t first,
                  int64_t last, void* scratch) {
    const typename Gemm<M>::Registers registers;
    const BackwardArgs& b = run.args;
    const AttentionArgs& a = b.attention;
    Arena arena(scratch), shared(run.workspace);
    BackwardScratch<M, S> s(run, plan, arena);
    const Workspace<F> w(run, shared);
    SplitTask<M, S> task(b, w, s);
    const int64_t heads = a.B * a.G;
    for (int64_t n = first; n < last; ++n) {
      const int64_t head = n % heads, batch = head / a.G, g = head % a.G;
      const int64_t count = rows_of_head(a, batch),
                    splits = splits_of(key_rows(a, batch));
      const auto bytes = static_cast<size_t>(count * w.row_width) * sizeof(T);
      if (run.split_parallel) {
        const int64_t split = run.first_split + n / heads;
        if (split >= splits) continue;
        auto* rows =
            w.partial +
            (n / heads * rows_of_all(a) + rows_before(a, head)) * w.row_width;
        memset(rows, 0, bytes);
        task.run(batch, g, split, rows);
        continue;
      }
      memset(s.head, 0, bytes);
      for (int64_t split = 0; split < splits; ++split) {
        task.run(batch, g, split, s.head);
      }
      store_queries<S>(b, w, head, {0, count}, s.head);
    }
  }
};

}  // namespace

Kernel<BackwardRun> MULTIHEAD_FOR_TARGET(backward)(Dtype dtype) {
  return visit<BackwardKernel>(dtype);
}

}  // namespace multihead::kernels
