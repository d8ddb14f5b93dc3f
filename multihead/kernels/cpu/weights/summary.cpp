// SPDX-License-Identifier: MIT
//
// What each query attends to, without a matrix of its weights: the largest ones
// with their keys, and the entropy −Σ w·ln w.
//
// A task is one tile of a head; it walks over the keys (key_blocks.h) and turns
// scores into weights (from_logsumexp.h). With w = exp(s − shift)·inv_sum,
//   −Σ w·ln w = −Σ w·(s − shift) − ln(inv_sum)·Σ w,
// where the second term is 0 for rows that trust their logsumexp. A weight that
// is larger than a row's smallest kept one is inserted by hand, which happens
// O(k·log Lk) times to a row of random scores. Memory is O(k) per row.
#include <string.h>

#include "multihead/kernels/cpu/dispatch.h"
#include "multihead/kernels/cpu/weights/from_logsumexp.h"

namespace multihead::kernels {
namespace {

/// The `count` largest weights of each lane, descending.
template <typename T>
struct TopScratch {
  T* weights;     ///< (lanes, count)
  int64_t* keys;  ///< (lanes, count)
  T* smallest;    ///< (lanes), −1 until a lane has `count`
  T* entropy;     ///< (lanes), −Σ w·(s − shift)
  T* mass;        ///< (lanes), Σ w
};

template <class M, class S>
class SummaryTask {
 public:
  using F = typename M::F;
  using T = typename F::Scalar;
  static constexpr int64_t kLanes = kTileLanes<F>;

  SummaryTask(const SummaryArgs& y, WeightsScratch<M, S>& scratch,
              TopScratch<T>& top)
      : y_(y), a_(y.attention), s_(scratch), top_(top) {}

  void run(const HeadRange& rows) {
    const auto tile = tile_of<F>(a_, rows, rows.first_head);
    s_.score.query = s_.queries;
    load_queries<M, S>(a_, tile, s_.queries);
    load_stats<M, S>(a_, tile, y_.logsumexp, s_, s_.stats);
    for (int64_t r = 0; r < kLanes; ++r) {
      top_.smallest[r] = y_.count > 0 ? T(-1) : T(INFINITY);
      top_.entropy[r] = top_.mass[r] = 0;
    }
    for (int64_t i = 0; i < kLanes * y_.count; ++i) {
      top_.weights[i] = T(-1);
      top_.keys[i] = -1;
    }
    for_each_key_block(tile.keys, kKeyBlock, [&](Interval keys) {
      const ScoreBlock block = pack_and_score<M, S>(a_, tile, keys, s_);
      for_each_vector<F>(block, [&](const VectorSpan& span) { look_at(span); });
    });
    write(tile);
  }

 private:
  void look_at(const VectorSpan& span) {
    const int64_t from = span.c * F::kLanes;
    const auto shift = F::load(s_.stats.shift + from);
    const auto factor = F::load(s_.stats.inv_sum + from);
    const auto none = F::broadcast(T(-INFINITY)), zero = F::broadcast(0);
    auto entropy = F::load(top_.entropy + from);
    auto mass = F::load(top_.mass + from);
    int64_t key = span.keys.begin;
    for (int64_t at = span.begin; at < span.end; at += kLanes, ++key) {
      const auto s = F::load(s_.score.scores + at);
      const auto hidden = F::equal(s, none);
      const auto difference = F::select(hidden, zero, F::sub(s, shift));
      const auto w =
          F::select(hidden, none, F::mul(exp<F>(difference), factor));
      const auto counted = F::select(hidden, zero, w);
      entropy = F::sub(entropy, F::mul(counted, difference));
      mass = F::add(mass, counted);
      if (F::any(F::less(F::load(top_.smallest + from), w))) {
        alignas(64) T weights[F::kLanes];
        F::store(weights, w);
        for (int i = 0; i < F::kLanes; ++i) insert(from + i, weights[i], key);
      }
    }
    F::store(top_.entropy + from, entropy);
    F::store(top_.mass + from, mass);
  }

  /// Keys come in ascending order, so of equal weights the lower key stays.
  void insert(int64_t lane, T weight, int64_t key) {
    if (!(weight > top_.smallest[lane])) return;
    T* weights = top_.weights + lane * y_.count;
    int64_t* keys = top_.keys + lane * y_.count;
    int64_t at = y_.count - 1;
    for (; at > 0 && weights[at - 1] < weight; --at) {
      weights[at] = weights[at - 1];
      keys[at] = keys[at - 1];
    }
    weights[at] = weight;
    keys[at] = key;
    top_.smallest[lane] = weights[y_.count - 1];
  }

  void write(const QueryTile<F>& tile) {
    for (int r = 0; r < tile.count; ++r) {
      const int64_t row =
          (tile.b * a_.H + tile.head[r]) * a_.Lq + tile.query[r];
      static_cast<T*>(y_.entropy)[row] =
          top_.entropy[r] - ::log(s_.stats.inv_sum[r]) * top_.mass[r];
      for (int64_t n = 0; n < y_.count; ++n) {
        const int64_t from = r * y_.count + n, to = row * y_.count + n;
        y_.keys[to] = top_.keys[from];
        static_cast<T*>(y_.weights)[to] = isnan(top_.mass[r]) ? top_.mass[r]
                                          : top_.keys[from] < 0
                                              ? 0
                                              : top_.weights[from];
      }
    }
  }

  const SummaryArgs& y_;
  const AttentionArgs& a_;
  WeightsScratch<M, S>& s_;
  TopScratch<T>& top_;
};

template <class M, class S>
struct SummaryKernel {
  using Type = Kernel<SummaryArgs>;
  using F = typename M::F;
  using T = typename F::Scalar;

  static TaskGrid grid(const AttentionArgs& a) {
    return {a.B, a.H, a.Lq, kTileLanes<F>, false};
  }
  static TopScratch<T> top(const SummaryArgs& y, Arena& arena) {
    const int64_t lanes = kTileLanes<F>;
    return {arena.take<T>(lanes * y.count),
            arena.take<int64_t>(lanes * y.count), arena.take<T>(lanes),
            arena.take<T>(lanes), arena.take<T>(lanes)};
  }
  static Plan plan(const SummaryArgs& y, int) {
    Plan plan;
    plan.rows_per_task = kTileLanes<F>;
    plan.tasks = grid(y.attention).tasks();
    plan.pack_key = !Panels<M, S>::kInPlace;
    Arena arena(nullptr);
    WeightsScratch<M, S>(y.attention, plan, 1, arena);
    top(y, arena);
    plan.scratch_bytes = arena.used();
    return plan;
  }
  static void run(const SummaryArgs& y, const Plan& plan, int64_t first,
                  int64_t last, void* scratch) {
    const typename Gemm<M>::Registers registers;
    Arena arena(scratch);
    WeightsScratch<M, S> s(y.attention, plan, 1, arena);
    TopScratch<T> t = top(y, arena);
    // Lanes without a row are looked at too, though not for what they hold.
    memset(s.score.scores, 0, kKeyBlock * kTileLanes<F> * sizeof(T));
    for (int64_t n = first; n < last; ++n) {
      const auto task = grid(y.attention)[n];
      SummaryTask<M, S>(y, s, t).run(
          {task.b, task.head, task.head + 1, task.first, task.count});
    }
  }
};

}  // namespace

Kernel<SummaryArgs> MULTIHEAD_FOR_TARGET(summary)(Dtype dtype) {
  return visit<SummaryKernel>(dtype);
}

}  // namespace multihead::kernels
