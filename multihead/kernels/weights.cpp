// SPDX-License-Identifier: MIT
//
// Attention weights on request, and what they say of a row, without a matrix of
// all scores: a second pass over q·k, with the logsumexp of the first,
//   w_j = exp(s_j − logsumexp).
//
// Walk. A task is some rows of one head, or of all heads where the weights are
// averaged; tiles of up to three vectors, one row per lane (scores.h). For each
// block of kKeyBlock keys, each head's scores become weights in the lanes and
// are added to a sum over heads; the sum is turned once, from lanes into rows,
// and written. So the scratch is one block per tile, and each weight is
// written once: H·Lq·D bytes of queries are read per block, nothing else is
// repeated.
#include "multihead/kernels/dropout.h"
#include "multihead/kernels/scores.h"
#include "multihead/kernels/target.h"

namespace multihead::kernels {
namespace {

template <class M, class S>
struct WeightsScratch {
  using F = typename M::F;
  using T = typename F::Scalar;
  ScoreScratch<T> score;
  T* queries;  ///< (heads, depth, lanes)
  T* sum;      ///< (kKeyBlock, lanes)
  T* shift;    ///< (heads, lanes), logsumexp as it may be subtracted
  T* key;      ///< a block, packed; null: in place

  WeightsScratch(const Attention& a, const Plan& plan, int64_t heads,
                 Arena& arena)
      : score(a, kTileLanes<F>, arena),
        queries(arena.take<T>(heads * M::depth(a.D) * kTileLanes<F>)),
        sum(arena.take<T>(kKeyBlock * kTileLanes<F>)),
        shift(arena.take<T>(heads * kTileLanes<F>)),
        key(plan.pack_key
                ? arena.take<T>(Panels<M, S>::key_size(kKeyBlock, a.D))
                : nullptr) {}
};

/// Rows `first`… of the heads first_head ≤ h < last_head of batch row b.
struct HeadRange {
  int64_t b, first_head, last_head, first, count;
};

template <class F>
inline RowTile<F> tile_of(const Attention& a, const HeadRange& rows,
                          int64_t head) {
  return RowTile<F>(
      a, {rows.b, head / group_of(a), head, 1, rows.first, rows.count});
}

/// logsumexp of the rows of a tile, 0 where it is −inf.
template <class F>
inline void load_shift(const Attention& a, const RowTile<F>& tile,
                       const void* logsumexp, typename F::Scalar* shift) {
  using T = typename F::Scalar;
  const auto* lse = static_cast<const T*>(logsumexp);
  for (int64_t r = 0; r < kTileLanes<F>; ++r) {
    const T x = lse[(tile.b * a.H + tile.head[r]) * a.Lq + tile.query[r]];
    shift[r] = x == T(-INFINITY) ? 0 : x;
  }
}

template <class M, class S>
class WeightsTask {
 public:
  using F = typename M::F;
  using T = typename F::Scalar;
  static constexpr int64_t kLanes = kTileLanes<F>;

  WeightsTask(const Weights& w, WeightsScratch<M, S>& scratch)
      : w_(w), a_(w.attention), s_(scratch) {}

  void run(const HeadRange& rows) {
    for (int64_t h = rows.first_head; h < rows.last_head; ++h) {
      const auto tile = tile_of<F>(a_, rows, h);
      const int64_t n = h - rows.first_head;
      load_queries<M, S>(a_, tile, s_.queries + n * M::depth(a_.D) * kLanes);
      load_shift<F>(a_, tile, w_.logsumexp, s_.shift + n * kLanes);
    }
    for (int64_t at = 0; at < a_.Lk; at += kKeyBlock) {
      const Interval block{at, least(at + kKeyBlock, a_.Lk)};
      memset(s_.sum, 0, kKeyBlock * kLanes * sizeof(T));
      for (int64_t h = rows.first_head; h < rows.last_head; ++h) {
        add(rows, h, block);
      }
      write(rows, block);
    }
  }

 private:
  /// sum += the weights of one head.
  void add(const HeadRange& rows, int64_t h, Interval block) {
    const auto tile = tile_of<F>(a_, rows, h);
    const Interval keys = overlap(block, tile.keys);
    if (keys.empty()) return;
    const int64_t n = h - rows.first_head;
    s_.score.query = s_.queries + n * M::depth(a_.D) * kLanes;
    const auto panel =
        Panels<M, S>::keys(a_.key, tile.b, tile.g, keys, a_.D, s_.key);
    const ScoreBlock scores = score_block<M>(a_, tile, panel, keys, s_.score);
    for (int i = 0; i < scores.count; ++i) {
      const Segment& segment = scores.segments[i];
      for (int c = segment.first; c < segment.last; ++c) {
        exponentiate(segment, scores.anchor, c, s_.shift + n * kLanes);
        if (a_.dropout.probability > 0) {
          drop(a_, tile, segment, c, s_.score.scores - scores.anchor * kLanes);
        }
        accumulate(segment, scores.anchor, c);
      }
    }
  }

  void exponentiate(const Segment& segment, int64_t anchor, int c,
                    const T* shift) {
    const auto lse = F::load(shift + c * F::kLanes);
    for (int64_t j = segment.keys.begin; j < segment.keys.end; ++j) {
      T* score = s_.score.scores + (j - anchor) * kLanes + c * F::kLanes;
      F::store(score, exp<F>(F::sub(F::load(score), lse)));
    }
  }

  void accumulate(const Segment& segment, int64_t anchor, int c) {
    for (int64_t j = segment.keys.begin; j < segment.keys.end; ++j) {
      const int64_t at = (j - anchor) * kLanes + c * F::kLanes;
      F::store(s_.sum + at,
               F::add(F::load(s_.sum + at), F::load(s_.score.scores + at)));
    }
  }

  /// The mean over heads, from lanes into rows.
  void write(const HeadRange& rows, Interval block) {
    const double heads = static_cast<double>(rows.last_head - rows.first_head);
    const double p = a_.dropout.probability;
    const auto factor =
        F::broadcast(static_cast<T>(p < 1 ? 1 / (heads * (1 - p)) : 0));
    for (int64_t from = 0; from < rows.count; from += F::kLanes) {
      typename S::Type* out[F::kLanes];
      for (int i = 0; i < F::kLanes; ++i) {
        out[i] = from + i < rows.count
                     ? row_of<typename S::Type>(
                           w_.weights, rows.b, w_.average ? 0 : rows.first_head,
                           rows.first + from + i) +
                           block.begin
                     : nullptr;
      }
      store_lanes<S>(s_.sum + from, factor, block.end - block.begin, out);
    }
  }

  const Weights& w_;
  const Attention& a_;
  WeightsScratch<M, S>& s_;
};

template <class M, class S>
struct WeightsKernel {
  using Type = Kernel<Weights>;
  using F = typename M::F;

  static int64_t heads(const Weights& w) {
    return w.average ? most(w.attention.H, 1) : 1;
  }
  static TaskGrid grid(const Weights& w) {
    const Attention& a = w.attention;
    return {a.B, a.H / heads(w), a.Lq, kTileLanes<F>, false};
  }
  static Plan plan(const Weights& w, int) {
    Plan plan;
    plan.rows_per_task = kTileLanes<F>;
    plan.tasks = grid(w).tasks();
    plan.pack_key = !Panels<M, S>::kInPlace;
    Arena arena(nullptr);
    WeightsScratch<M, S>(w.attention, plan, heads(w), arena);
    plan.scratch_bytes = arena.used();
    return plan;
  }
  static void run(const Weights& w, const Plan& plan, int64_t first,
                  int64_t last, void* scratch) {
    const typename Product<M>::Registers registers;
    Arena arena(scratch);
    WeightsScratch<M, S> s(w.attention, plan, heads(w), arena);
    for (int64_t n = first; n < last; ++n) {
      const auto task = grid(w)[n];
      const int64_t head = task.head * heads(w);
      WeightsTask<M, S>(w, s).run(
          {task.b, head, head + heads(w), task.first, task.count});
    }
  }
};

/// The `count` largest weights of each lane, descending.
template <typename T>
struct TopScratch {
  T* weights;     ///< (lanes, count)
  int64_t* keys;  ///< (lanes, count)
  T* smallest;    ///< (lanes), −1 until a lane has `count`
  T* entropy;     ///< (lanes)
};

template <class M, class S>
class SummaryTask {
 public:
  using F = typename M::F;
  using T = typename F::Scalar;
  static constexpr int64_t kLanes = kTileLanes<F>;

  SummaryTask(const Summary& y, WeightsScratch<M, S>& scratch,
              TopScratch<T>& top)
      : y_(y), a_(y.attention), s_(scratch), top_(top) {}

  void run(const HeadRange& rows) {
    const auto tile = tile_of<F>(a_, rows, rows.first_head);
    load_queries<M, S>(a_, tile, s_.queries);
    load_shift<F>(a_, tile, y_.logsumexp, s_.shift);
    s_.score.query = s_.queries;
    for (int64_t r = 0; r < kLanes; ++r) {
      top_.smallest[r] = y_.count > 0 ? T(-1) : T(INFINITY);
      top_.entropy[r] = 0;
    }
    for (int64_t i = 0; i < kLanes * y_.count; ++i) {
      top_.weights[i] = T(-1);
      top_.keys[i] = -1;
    }
    for (int64_t at = round_down(tile.keys.begin, kKeyBlock);
         at < tile.keys.end; at += kKeyBlock) {
      const Interval keys = overlap(tile.keys, {at, at + kKeyBlock});
      const auto panel =
          Panels<M, S>::keys(a_.key, tile.b, tile.g, keys, a_.D, s_.key);
      const ScoreBlock scores = score_block<M>(a_, tile, panel, keys, s_.score);
      for (int n = 0; n < scores.count; ++n) {
        const Segment& segment = scores.segments[n];
        for (int c = segment.first; c < segment.last; ++c) {
          look_at(segment, scores.anchor, c);
        }
      }
    }
    write(tile);
  }

 private:
  void look_at(const Segment& segment, int64_t anchor, int c) {
    const int64_t from = c * F::kLanes;
    const auto lse = F::load(s_.shift + from);
    const auto none = F::broadcast(T(-INFINITY)), zero = F::broadcast(0);
    auto entropy = F::load(top_.entropy + from);
    for (int64_t j = segment.keys.begin; j < segment.keys.end; ++j) {
      const auto s = F::load(s_.score.scores + (j - anchor) * kLanes + from);
      const auto hidden = F::equal(s, none);
      const auto difference = F::select(hidden, zero, F::sub(s, lse));
      const auto w = F::select(hidden, none, exp<F>(difference));
      entropy = F::sub(entropy, F::select(hidden, zero, F::mul(w, difference)));
      if (F::any(F::less(F::load(top_.smallest + from), w))) {
        alignas(64) T weights[F::kLanes];
        F::store(weights, w);
        for (int i = 0; i < F::kLanes; ++i) insert(from + i, weights[i], j);
      }
    }
    F::store(top_.entropy + from, entropy);
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

  void write(const RowTile<F>& tile) {
    for (int r = 0; r < tile.count; ++r) {
      const int64_t row =
          (tile.b * a_.H + tile.head[r]) * a_.Lq + tile.query[r];
      static_cast<T*>(y_.entropy)[row] = top_.entropy[r];
      for (int64_t n = 0; n < y_.count; ++n) {
        const int64_t from = r * y_.count + n, to = row * y_.count + n;
        y_.keys[to] = top_.keys[from];
        static_cast<T*>(y_.weights)[to] =
            top_.keys[from] < 0 ? 0 : top_.weights[from];
      }
    }
  }

  const Summary& y_;
  const Attention& a_;
  WeightsScratch<M, S>& s_;
  TopScratch<T>& top_;
};

template <class M, class S>
struct SummaryKernel {
  using Type = Kernel<Summary>;
  using F = typename M::F;
  using T = typename F::Scalar;

  static TaskGrid grid(const Attention& a) {
    return {a.B, a.H, a.Lq, kTileLanes<F>, false};
  }
  static TopScratch<T> top(const Summary& y, Arena& arena) {
    const int64_t lanes = kTileLanes<F>;
    return {arena.take<T>(lanes * y.count),
            arena.take<int64_t>(lanes * y.count), arena.take<T>(lanes),
            arena.take<T>(lanes)};
  }
  static Plan plan(const Summary& y, int) {
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
  static void run(const Summary& y, const Plan& plan, int64_t first,
                  int64_t last, void* scratch) {
    const typename Product<M>::Registers registers;
    Arena arena(scratch);
    WeightsScratch<M, S> s(y.attention, plan, 1, arena);
    TopScratch<T> t = top(y, arena);
    for (int64_t n = first; n < last; ++n) {
      const auto task = grid(y.attention)[n];
      SummaryTask<M, S>(y, s, t).run(
          {task.b, task.head, task.head + 1, task.first, task.count});
    }
  }
};

}  // namespace

Kernel<Weights> MULTIHEAD_FOR_TARGET(weights)(Dtype dtype) {
  return visit<WeightsKernel>(dtype);
}

Kernel<Summary> MULTIHEAD_FOR_TARGET(summary)(Dtype dtype) {
  return visit<SummaryKernel>(dtype);
}

}  // namespace multihead::kernels
