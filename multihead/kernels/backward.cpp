// SPDX-License-Identifier: MIT
//
// Attention backward, forward.cpp differentiated line by line.
//
// Equations, per row of queries, with what forward returned; quoted is the line
// of forward whose gradient it is:
//   Δ = Σ out·dout − dlogsumexp                        once per row
//   P = exp(S − logsumexp)                             recomputed
//   dV += Pᵀ·dO                          "O += Vᵀ·Pᵀ"
//   dP = V·dOᵀ                           "O += Vᵀ·Pᵀ"
//   dP = dP·drop/(1 − p)                 "P = 0 where Philox says so"
//   dS = P∘(dP − Δ)                      "P = exp(S − m)", "out = … / l"
//   dS = dS·(1 − tanh²)                  "rules(…)", softcap; bias adds nothing
//   dQ += scale·dS·K, dK += scale·dSᵀ·Q  "S = K·Qᵀ"
// Δ stands for Σ_j P_j·dP_j, because out = Σ_j P_j·v_j.
//
// Walk. Keys are cut into splits of kGradientSplit. A split's dK and dV are
// sums of its own, in float32, that all rows add to in ascending order, so no
// two tasks ever write one number. The rows come in tiles, in lanes as in
// forward; for each block of kKeyBlock keys a tile computes S and dP (tile.h:
// rows in the lanes), turns them into P and dS, and adds to dV, dK
// (tile_outer.h: the head's width in the lanes) and to its own dQ of this
// split. What a query gets is the sum over the splits in ascending order. Where
// there are heads enough, a task is a head, split by split. Where there are
// not, a task is one split of a head: waves of some splits leave their shares
// of dQ in the workspace, and a second stage adds them up in the same order. So
// bits depend neither on threads nor on the width of a wave.
//
// Bytes per tile of 48 rows in float32: Q and dO twice (lanes and rows), dQ: 5
// times 192·D; S and dP 24 KiB each. Per split: K, V, dK, dV, 1024·D each: half
// an L2 cache at D = 128. The workspace holds 12 bytes per row, and in waves
// (width + 1) times dQ.
//
// What is hidden must not reach the three sums: where a tile meets a number
// that is not finite in Q, K, V or dO, it runs carefully, with weights of −0
// for hidden keys, against which anything counts as 0 (forward.cpp).
#include "multihead/kernels/score_gradient.h"
#include "multihead/kernels/target.h"

namespace multihead::kernels {
namespace {

template <class M, class S>
struct BackwardScratch {
  using F = typename M::F;
  using T = typename F::Scalar;
  static constexpr int64_t kLanes = kTileLanes<F>;
  int64_t key_width, value_width;  ///< D and Dv in whole vectors

  ScoreGradient<M, S> scores;
  T* query_rows;   ///< (lanes, key_width)
  T* dout_rows;    ///< (lanes, value_width)
  T* dquery;       ///< (D + 1, lanes), of a tile and a split
  T* one;          ///< (lanes), 1
  T *key, *value;  ///< a split, packed; null: in place
  struct Sums {
    T* dkey;    ///< (kGradientSplit, key_width)
    T* dvalue;  ///< (kGradientSplit, value_width)
  };
  Sums sums, total;  ///< of kRowSplit rows, of all; one where that suffices
  T* head;           ///< (rows, row_width): dQ of a head; not in waves

  BackwardScratch(const Backward& b, const Plan& plan, Arena& arena)
      : key_width(padded<F>(b.attention.D)),
        value_width(padded<F>(b.attention.Dv)),
        scores(b.attention, arena) {
    const Attention& a = b.attention;
    query_rows = arena.take<T>(kLanes * key_width);
    dout_rows = arena.take<T>(kLanes * value_width);
    dquery = arena.take<T>((a.D + 1) * kLanes);
    one = arena.take<T>(kLanes);
    const auto panel = [&](bool packed, int64_t width) {
      return packed
                 ? arena.take<T>(Panels<M, S>::key_size(kGradientSplit, width))
                 : nullptr;
    };
    key = panel(plan.pack_key, a.D);
    value = panel(plan.pack_value, a.Dv);
    const auto take_sums = [&] {
      return Sums{arena.take<T>(kGradientSplit * key_width),
                  arena.take<T>(kGradientSplit * value_width)};
    };
    sums = take_sums();
    total = rows_of_head(a) > kRowSplit ? take_sums() : sums;
    head = nullptr;
    if (!plan.waves) {
      const Workspace<F> w(b, false, arena);  // for its row_width
      head = arena.take<T>(rows_of_head(a) * w.row_width);
    }
  }
};

/// One split of keys of one key/value head against all its rows.
template <class M, class S>
class SplitTask {
 public:
  using F = typename M::F;
  using T = typename F::Scalar;
  using Tile = RowTile<F>;
  static constexpr int64_t kLanes = kTileLanes<F>;

  SplitTask(const Backward& b, const Workspace<F>& workspace,
            BackwardScratch<M, S>& scratch)
      : b_(b), a_(b.attention), w_(workspace), s_(scratch) {
    for (int64_t r = 0; r < kLanes; ++r) s_.one[r] = 1;
  }

  /// dK and dV of the split; its shares of dQ are added to `rows`
  /// (rows, row_width).
  void run(int64_t b, int64_t g, int64_t split, T* rows) {
    const int64_t begin = split * kGradientSplit;
    const Interval all{begin, least(begin + kGradientSplit, a_.Lk)};
    clear(s_.sums);
    if (s_.total.dkey != s_.sums.dkey) clear(s_.total);
    const Interval keys = overlap(all, {visible_keys(a_, b, 0).begin,
                                        visible_keys(a_, b, a_.Lq - 1).end});
    if (!keys.empty()) add_rows(b, g, keys, rows);
    if (s_.total.dkey != s_.sums.dkey) fold();
    store(b_.dkey, b, g, all, s_.total.dkey, s_.key_width, a_.scale, a_.D);
    const double p = a_.dropout.probability;
    store(b_.dvalue, b, g, all, s_.total.dvalue, s_.value_width,
          p < 1 ? 1 / (1 - p) : 0, a_.Dv);
  }

 private:
  void clear(const typename BackwardScratch<M, S>::Sums& sums) {
    memset(sums.dkey, 0, kGradientSplit * s_.key_width * sizeof(T));
    memset(sums.dvalue, 0, kGradientSplit * s_.value_width * sizeof(T));
  }

  /// total += sums, sums = 0.
  void fold() {
    const auto add = [](T* total, const T* sums, int64_t count) {
      for (int64_t i = 0; i < count; i += F::kLanes) {
        F::store(total + i, F::add(F::load(total + i), F::load(sums + i)));
      }
    };
    add(s_.total.dkey, s_.sums.dkey, kGradientSplit * s_.key_width);
    add(s_.total.dvalue, s_.sums.dvalue, kGradientSplit * s_.value_width);
    clear(s_.sums);
  }

  void store(const OutRows& out, int64_t b, int64_t g, Interval keys,
             const T* rows, int64_t stride, double factor, int64_t width) {
    if (!out.data) return;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      store_row<S>(rows + (j - keys.begin) * stride, static_cast<T>(factor),
                   width, row_of<typename S::Type>(out, b, g, j));
    }
  }

  void add_rows(int64_t b, int64_t g, Interval keys, T* rows) {
    first_key_ = round_down(keys.begin, kGradientSplit);
    const auto key = Panels<M, S>::keys(a_.key, b, g, keys, a_.D, s_.key);
    const auto value =
        Panels<M, S>::keys(a_.value, b, g, keys, a_.Dv, s_.value);
    const bool finite = is_finite(a_.key, b, g, keys, a_.D) &&
                        is_finite(a_.value, b, g, keys, a_.Dv);
    const int64_t group = group_of(a_), count = rows_of_head(a_);
    for (int64_t first = 0; first < count; first += kLanes) {
      const int64_t here = least(kLanes, count - first);
      const Interval seen{visible_keys(a_, b, first / group).begin,
                          visible_keys(a_, b, (first + here - 1) / group).end};
      if (!overlap(keys, seen).empty()) {
        tile_.hold(a_, {b, g, g * group, group, first, here});
        const bool careful = !(load_rows() && finite);
        careful ? add_tile<true>(keys, key, value)
                : add_tile<false>(keys, key, value);
        if (needs_dscores(b_)) {
          add_lanes<F>(s_.dquery, columns(), w_.row_width, here,
                       rows + first * w_.row_width);
        }
      }
      const int64_t next = first + kLanes;
      if (next % kRowSplit == 0 && next < count) fold();
    }
  }

  /// Of a row of dQ: with that of its slope, if it is wanted.
  int64_t columns() const { return a_.D + (b_.dalibi_slopes ? 1 : 0); }

  static bool is_finite(const Rows& x, int64_t b, int64_t g, Interval keys,
                        int64_t width) {
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const auto* row = row_of<typename S::Type>(x, b, g, j);
      if (!kernels::is_finite<S>(row, width)) return false;
    }
    return true;
  }

  /// The rows of the tile, in lanes and as they lie; whether they are finite.
  bool load_rows() {
    s_.scores.load(b_, w_, tile_);
    bool finite = true;
    for (int64_t r = 0; r < tile_.count; ++r) {
      finite &= widen_row(row(a_.query, r), a_.D, s_.key_width,
                          s_.query_rows + r * s_.key_width);
      finite &= widen_row(row(b_.dout, r), a_.Dv, s_.value_width,
                          s_.dout_rows + r * s_.value_width);
    }
    return finite;
  }
  const typename S::Type* row(const Rows& x, int64_t r) const {
    return row_of<typename S::Type>(x, tile_.b, tile_.head[r], tile_.query[r]);
  }
  /// Padded with zeros; whether it is finite.
  static bool widen_row(const typename S::Type* from, int64_t width,
                        int64_t padded_width, T* to) {
    F::store(to + padded_width - F::kLanes, F::broadcast(0));
    widen<S>(from, width, to);
    return kernels::is_finite<S>(from, width);
  }

  template <bool kCareful>
  void add_tile(Interval keys, const Panel<T>& key, const Panel<T>& value) {
    memset(s_.dquery, 0, (a_.D + 1) * kLanes * sizeof(T));
    const Interval seen = overlap(keys, tile_.keys);
    for (int64_t at = round_down(seen.begin, kKeyBlock); at < seen.end;
         at += kKeyBlock) {
      const ScoreBlock block = s_.scores.compute(
          a_, tile_, key, value, overlap(seen, {at, at + kKeyBlock}),
          needs_dscores(b_));
      for (int n = 0; n < block.count; ++n) {
        add_segment<kCareful>(block, block.segments[n], key);
      }
    }
  }

  template <bool kCareful>
  void add_segment(const ScoreBlock& block, const Segment& segment,
                   const Panel<T>& key) {
    const int64_t from = segment.first * F::kLanes;
    const int64_t at = (segment.keys.begin - block.anchor) * kLanes + from;
    const int64_t keys = segment.keys.end - segment.keys.begin;
    for (int c = segment.first; c < segment.last; ++c) {
      if (b_.dalibi_slopes) add_slopes(block, segment, c);
      if (a_.softcap != 0) pass_softcap(block, segment, c);
    }
    const int64_t rows = least(tile_.count, segment.last * F::kLanes) - from;
    const int64_t row = segment.keys.begin - first_key_;
    if (b_.dvalue.data) {  // dV += Pᵀ·dO
      collect<M, kCareful>(
          {s_.scores.dropped + at, s_.dout_rows + from * s_.value_width, rows,
           s_.value_width, s_.sums.dvalue + row * s_.value_width},
          keys);
    }
    if (b_.dkey.data) {  // dK += dSᵀ·Q
      collect<M, kCareful>(
          {s_.scores.dscores + at, s_.query_rows + from * s_.key_width, rows,
           s_.key_width, s_.sums.dkey + row * s_.key_width},
          keys);
    }
    if (b_.dquery.data) {  // dQ += dS·K
      Product<M>::template add_context<kCareful>(
          {.value = key.row(segment.keys.begin),
           .value_stride = key.stride,
           .weights = s_.scores.dscores + at,
           .depth = keys,
           .context = s_.dquery + from,
           .factor = s_.one + from},
          a_.D, segment.last - segment.first, rows_of(tile_, segment));
    }
  }

  /// "s = softcap·tanh(s / softcap)": dS times 1 − tanh².
  void pass_softcap(const ScoreBlock& block, const Segment& segment, int c) {
    const int64_t offset = c * F::kLanes - block.anchor * kLanes;
    for (int64_t j = segment.keys.begin; j < segment.keys.end; ++j) {
      T* ds = s_.scores.dscores + offset + j * kLanes;
      const auto slope =
          F::load(s_.scores.score.softcap_slope + offset + j * kLanes);
      F::store(ds, F::select(F::is_negative_zero(F::load(ds)), F::load(ds),
                             F::mul(F::load(ds), slope)));
    }
  }

  /// "s −= slope·|i + offset − j|": the column of dQ after its last.
  void add_slopes(const ScoreBlock& block, const Segment& segment, int c) {
    const int64_t r = c * F::kLanes;
    alignas(64) T here[F::kLanes];
    for (int i = 0; i < F::kLanes; ++i) {
      here[i] = static_cast<T>(tile_.position[r + i] - block.anchor);
    }
    const auto at = F::load(here);
    T* slopes = s_.dquery + a_.D * kLanes + r;
    auto sum = F::load(slopes);
    for (int64_t j = segment.keys.begin - block.anchor;
         j < segment.keys.end - block.anchor; ++j) {
      const auto distance = F::abs(F::sub(at, F::broadcast(static_cast<T>(j))));
      const auto ds = F::load(s_.scores.dscores + j * kLanes + r);
      sum = F::sub(sum, F::mul(ds, distance));
    }
    F::store(slopes, sum);
  }

  const Backward& b_;
  const Attention& a_;
  const Workspace<F>& w_;
  BackwardScratch<M, S>& s_;
  Tile tile_;
  int64_t first_key_ = 0;
};

template <class M, class S>
struct BackwardKernel {
  using Type = Kernel<Backward>;
  using F = typename M::F;

  /// Tasks: heads, or in waves (head, split of the wave).
  static Plan plan(const Backward& b, int threads) {
    const Attention& a = b.attention;
    Plan plan;
    plan.waves = in_waves(b, threads);
    const int64_t splits = least(b.width, splits_of(a) - b.first_split);
    plan.tasks = a.B * a.G * (plan.waves ? splits : 1);
    constexpr bool kWiden = !Panels<M, S>::kInPlace;
    plan.pack_key = kWiden || a.key.row != a.D;
    plan.pack_value = kWiden || a.value.row != a.Dv;
    Arena arena(nullptr);
    BackwardScratch<M, S>(b, plan, arena);
    plan.scratch_bytes = arena.used();
    return plan;
  }

  static void run(const Backward& b, const Plan& plan, int64_t first,
                  int64_t last, void* scratch) {
    const Attention& a = b.attention;
    Arena arena(scratch), shared(b.workspace);
    BackwardScratch<M, S> s(b, plan, arena);
    const Workspace<F> w(b, plan.waves, shared);
    SplitTask<M, S> task(b, w, s);
    const int64_t numbers = rows_of_head(a) * w.row_width;
    const int64_t heads = a.B * a.G;
    for (int64_t n = first; n < last; ++n) {
      const int64_t head = n % heads;
      if (plan.waves) {
        auto* rows = w.partial + (n / heads * heads + head) * numbers;
        memset(rows, 0, static_cast<size_t>(numbers) * sizeof *rows);
        task.run(head / a.G, head % a.G, b.first_split + n / heads, rows);
        continue;
      }
      memset(s.head, 0, static_cast<size_t>(numbers) * sizeof *s.head);
      for (int64_t split = 0; split < splits_of(a); ++split) {
        task.run(head / a.G, head % a.G, split, s.head);
      }
      store_queries<S>(b, w, head, {0, rows_of_head(a)}, s.head);
    }
  }
};

}  // namespace

Kernel<Backward> MULTIHEAD_FOR_TARGET(backward)(Dtype dtype) {
  return visit_wide<BackwardKernel>(dtype);
}

}  // namespace multihead::kernels
