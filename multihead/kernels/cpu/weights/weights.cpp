// SPDX-License-Identifier: MIT
//
// Attention weights on request, computed again from the logsumexp of the
// forward pass (from_logsumexp.h).
//
// A task is one tile of a head, or of all heads where the weights are averaged.
// It goes over all Lk keys in blocks: each head's scores become weights in the
// lanes and are added to a sum over heads; the sum is transposed once, from
// lanes into rows, and written. So the scratch is one block per tile and the
// queries of the heads, and each weight is written once.
#include <string.h>

#include "multihead/kernels/cpu/dispatch.h"
#include "multihead/kernels/cpu/weights/from_logsumexp.h"

namespace multihead::kernels {
namespace {

template <class M, class S>
class WeightsTask {
 public:
  using F = typename M::F;
  using T = typename F::Scalar;
  static constexpr int64_t kLanes = kTileLanes<F>;

  WeightsTask(const WeightsArgs& w, WeightsScratch<M, S>& scratch)
      : w_(w), a_(w.attention), s_(scratch) {}

  void run(const HeadRange& rows) {
    for (int64_t h = rows.first_head; h < rows.last_head; ++h) {
      const auto tile = tile_of<F>(a_, rows, h);
      const int64_t n = h - rows.first_head;
      s_.score.query = s_.queries + n * M::depth(a_.D) * kLanes;
      load_queries<M, S>(a_, tile, s_.score.query);
      load_stats<M, S>(a_, tile, w_.logsumexp, s_, stats(n));
    }
    for_each_key_block({0, a_.Lk}, kKeyBlock, [&](Interval block) {
      memset(s_.sum, 0, (block.end - block.begin) * kLanes * sizeof(T));
      for (int64_t h = rows.first_head; h < rows.last_head; ++h) {
        add(rows, h, block);
      }
      write(rows, block);
    });
  }

 private:
  /// sum += the weights of one head.
  void add(const HeadRange& rows, int64_t h, Interval block) {
    const auto tile = tile_of<F>(a_, rows, h);
    const Interval keys = overlap(block, tile.keys);
    if (keys.empty()) return;
    const int64_t n = h - rows.first_head;
    s_.score.query = s_.queries + n * M::depth(a_.D) * kLanes;
    const ScoreBlock scores = pack_and_score<M, S>(a_, tile, keys, s_);
    for_each_vector<F>(scores, [&](const VectorSpan& span) {
      exponentiate(span, stats(n));
      if (a_.dropout.probability > 0) {
        drop(a_, tile, span, s_.score.scores + span.begin);
      }
      for (int64_t at = span.begin; at < span.end; at += kLanes) {
        F::store(s_.sum + at,
                 F::add(F::load(s_.sum + at), F::load(s_.score.scores + at)));
      }
    });
  }

  SoftmaxStats<T> stats(int64_t n) const {
    return {s_.stats.shift + n * kLanes, s_.stats.inv_sum + n * kLanes};
  }

  void exponentiate(const VectorSpan& span, SoftmaxStats<T> n) {
    const auto shift = F::load(n.shift + span.c * F::kLanes);
    const auto factor = F::load(n.inv_sum + span.c * F::kLanes);
    const auto none = F::broadcast(T(-INFINITY));
    for (int64_t at = span.begin; at < span.end; at += kLanes) {
      // Where the logsumexp is NaN, what is hidden still has the weight 0.
      const auto s = F::load(s_.score.scores + at);
      const auto w = F::mul(exp<F>(F::sub(s, shift)), factor);
      F::store(s_.score.scores + at,
               F::select(F::equal(s, none), F::broadcast(0), w));
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

  const WeightsArgs& w_;
  const AttentionArgs& a_;
  WeightsScratch<M, S>& s_;
};

template <class M, class S>
struct WeightsKernel {
  using Type = Kernel<WeightsArgs>;
  using F = typename M::F;

  static int64_t heads(const WeightsArgs& w) {
    return w.average ? max(w.attention.H, 1) : 1;
  }
  static TaskGrid grid(const WeightsArgs& w) {
    const AttentionArgs& a = w.attention;
    return {a.B, a.H / heads(w), a.Lq, kTileLanes<F>, false};
  }
  static Plan plan(const WeightsArgs& w, int) {
    Plan plan;
    plan.rows_per_task = kTileLanes<F>;
    plan.tasks = grid(w).tasks();
    plan.pack_key = !Panels<M, S>::kInPlace;
    Arena arena(nullptr);
    WeightsScratch<M, S>(w.attention, plan, heads(w), arena);
    plan.scratch_bytes = arena.used();
    return plan;
  }
  static void run(const WeightsArgs& w, const Plan& plan, int64_t first,
                  int64_t last, void* scratch) {
    const typename Gemm<M>::Registers registers;
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

}  // namespace

Kernel<WeightsArgs> MULTIHEAD_FOR_TARGET(weights)(Dtype dtype) {
  return visit<WeightsKernel>(dtype);
}

}  // namespace multihead::kernels
