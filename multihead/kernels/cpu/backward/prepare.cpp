// SPDX-License-Identifier: MIT
//
// The stages of the backward pass that go over rows, before and after the one
// that goes over keys (backward.cpp):
//   prepare  Δ = Σ out·dout − dlogsumexp, and how P is found again
//   queries  after each wave of splits: dQ = their shares, in ascending order
//   heads    gradients of slopes and sinks: sums over the rows of a head
// Each reads and writes a few numbers per row; none is worth a GEMM.
#include <math.h>

#include "multihead/kernels/cpu/backward/workspace.h"
#include "multihead/kernels/cpu/dispatch.h"

namespace multihead::kernels {
namespace {

template <class M, class S>
struct PrepareKernel {
  using Type = Kernel<BackwardRun>;
  using F = typename M::F;
  using T = typename F::Scalar;
  static constexpr int64_t kLanes = kTileLanes<F>;

  struct Scratch {
    WeightsScratch<M, S> weights;
    T* out;   ///< (Dv, lanes)
    T* dout;  ///< (Dv, lanes)
    Scratch(const AttentionArgs& a, const Plan& plan, Arena& arena)
        : weights(a, plan, 1, arena),
          out(arena.take<T>(a.Dv * kLanes)),
          dout(arena.take<T>(a.Dv * kLanes)) {}
  };

  static TaskGrid grid(const AttentionArgs& a) {
    return {a.B, a.H, a.Lq, kLanes, false};
  }

  static Plan plan(const BackwardRun& run, int /*threads*/) {
    const BackwardArgs& b = run.args;
    Plan plan;
    plan.tasks = grid(b.attention).tasks();
    plan.pack_key = !Panels<M, S>::kInPlace;
    Arena arena(nullptr);
    Scratch(b.attention, plan, arena);
    plan.scratch_bytes = arena.used();
    Arena shared(nullptr);
    Workspace<F>(run, shared);
    plan.workspace_bytes = shared.used();
    return plan;
  }

  static void run(const BackwardRun& run, const Plan& plan, int64_t first,
                  int64_t last, void* scratch) {
    const BackwardArgs& b = run.args;
    const typename Gemm<M>::Registers registers;
    Arena arena(scratch), shared(run.workspace);
    Scratch s(b.attention, plan, arena);
    const Workspace<F> w(run, shared);
    for (int64_t n = first; n < last; ++n) {
      const auto task = grid(b.attention)[n];
      const int64_t count =
          min(task.count, query_length(b.attention, task.b) - task.first);
      if (count <= 0) continue;
      prepare(b, {task.b, task.head, task.head + 1, task.first, count}, s, w);
    }
  }

  static void prepare(const BackwardArgs& b, const HeadRange& rows, Scratch& s,
                      const Workspace<F>& w) {
    const AttentionArgs& a = b.attention;
    const auto tile = tile_of<F>(a, rows, rows.first_head);
    const auto stats = s.weights.stats;
    if (read_stats<F>(a, tile, b.logsumexp, stats) && !b.is_part) {
      s.weights.score.query = s.weights.queries;
      load_queries<M, S>(a, tile, s.weights.queries);
      recompute_stats<M, S>(a, tile, s.weights, stats);
    }
    load_tile<S>(b.out, tile, a.Dv, 1, s.out);
    load_tile<S>(b.dout, tile, a.Dv, 1, s.dout);
    const int64_t at = query_index(a, rows.b, rows.first_head, rows.first);
    const auto* dlse = static_cast<const T*>(b.dlogsumexp);
    for (int c = 0; c < tile.vectors; ++c) {
      auto sum = F::broadcast(0);
      for (int64_t e = 0; e < a.Dv; ++e) {
        const int64_t x = e * kLanes + c * F::kLanes;
        sum = F::fma(F::load(s.out + x), F::load(s.dout + x), sum);
      }
      alignas(64) T delta[F::kLanes];
      F::store(delta, sum);
      for (int64_t i = 0, r = c * F::kLanes; i < F::kLanes && r < tile.count;
           ++i, ++r) {
        w.delta[at + r] = delta[i] - (dlse ? dlse[at + r] : 0);
        w.stats.shift[at + r] = stats.shift[r];
        w.stats.inv_sum[at + r] = stats.inv_sum[r];
      }
    }
  }
};

/// total += the wave's shares; after the last wave, to where it belongs.
template <class M, class S>
struct QueriesKernel {
  using Type = Kernel<BackwardRun>;
  using F = typename M::F;
  static constexpr int64_t kRows = 64;

  static TaskGrid grid(const AttentionArgs& a) {
    return {a.B, a.G, most_rows_of_head(a), kRows, false};
  }
  static Plan plan(const BackwardRun& run, int /*threads*/) {
    const BackwardArgs& b = run.args;
    Plan plan;
    const bool wanted = b.dquery.data || b.dalibi_slopes;
    plan.tasks = run.split_parallel && wanted ? grid(b.attention).tasks() : 0;
    return plan;
  }
  static void run(const BackwardRun& run, const Plan&, int64_t first,
                  int64_t last, void*) {
    const BackwardArgs& b = run.args;
    const AttentionArgs& a = b.attention;
    Arena shared(run.workspace);
    const Workspace<F> w(run, shared);
    const int64_t share = rows_of_all(a) * w.row_width;
    for (int64_t n = first; n < last; ++n) {
      const auto task = grid(a)[n];
      const Interval rows = overlap({task.first, task.first + task.count},
                                    {0, rows_of_head(a, task.b)});
      const int64_t splits = splits_of(key_rows(a, task.b)) - run.first_split;
      if (rows.empty() || splits <= 0) continue;
      const int64_t here = min(run.splits_per_wave, splits);
      const int64_t head = task.b * a.G + task.head;
      const int64_t from = rows_before(a, head) * w.row_width;
      auto* total = w.total + from;
      const auto* shares = w.partial + from;
      for (int64_t x = rows.begin * w.row_width; x < rows.end * w.row_width;
           x += F::kLanes) {
        auto sum = run.first_split == 0 ? F::broadcast(0) : F::load(total + x);
        for (int64_t split = 0; split < here; ++split) {
          sum = F::add(sum, F::load(shares + split * share + x));
        }
        F::store(total + x, sum);
      }
      if (here == splits) store_queries<S>(b, w, head, rows, total);
    }
  }
};

template <class M, class S>
struct HeadsKernel {
  using Type = Kernel<BackwardRun>;
  using F = typename M::F;

  static Plan plan(const BackwardRun& run, int /*threads*/) {
    const BackwardArgs& b = run.args;
    Plan plan;
    plan.tasks =
        b.dalibi_slopes || b.dsinks ? b.attention.B * b.attention.H : 0;
    return plan;
  }
  static void run(const BackwardRun& run, const Plan&, int64_t first,
                  int64_t last, void*) {
    const BackwardArgs& b = run.args;
    const AttentionArgs& a = b.attention;
    Arena shared(run.workspace);
    const Workspace<F> w(run, shared);
    for (int64_t n = first; n < last; ++n) {
      double slope = 0, sink = 0;
      const int64_t begin = query_index(a, n / a.H, n % a.H, 0);
      const int64_t end = begin + query_length(a, n / a.H);
      for (int64_t r = begin; r < end; ++r) {
        if (b.dalibi_slopes) slope += static_cast<double>(w.slopes[r]);
        if (!b.dsinks) continue;
        // The sink's weight; it has no value, so its dP is 0.
        const double p =
            ::exp(a.sinks[n % a.H] - static_cast<double>(w.stats.shift[r])) *
            static_cast<double>(w.stats.inv_sum[r]);
        if (p != 0) sink -= p * static_cast<double>(w.delta[r]);
      }
      if (b.dalibi_slopes) b.dalibi_slopes[n] = slope;
      if (b.dsinks) b.dsinks[n] = sink;
    }
  }
};

}  // namespace

Kernel<BackwardRun> MULTIHEAD_FOR_TARGET(backward_prepare)(Dtype dtype) {
  return visit<PrepareKernel>(dtype);
}
Kernel<BackwardRun> MULTIHEAD_FOR_TARGET(backward_queries)(Dtype dtype) {
  return visit<QueriesKernel>(dtype);
}
Kernel<BackwardRun> MULTIHEAD_FOR_TARGET(backward_heads)(Dtype dtype) {
  return visit<HeadsKernel>(dtype);
}

}  // namespace multihead::kernels
