// SPDX-License-Identifier: MIT
//
// The gradient of an additive mask, which has any shape that broadcasts to
// (B, H, Lq, Lk): dS, summed over what the mask repeats.
//
// A task owns some numbers of the gradient: of one batch row or all, one head
// or all, a tile of rows or all, a block of keys or all, as the mask has them.
// It goes over everything that shares its numbers, recomputes dS (two of the
// five GEMMs of backward.cpp) and adds in one fixed order. So no two tasks ever
// sum one number, and no memory is needed but the result: a mask of (Lq, Lk)
// for a thousand heads takes one block of 24 KiB.
#include <string.h>

#include "multihead/kernels/cpu/backward/recompute.h"
#include "multihead/kernels/cpu/dispatch.h"

namespace multihead::kernels {
namespace {

template <class M, class S>
struct BiasScratch {
  using T = ScalarOf<M>;
  static constexpr int64_t kLanes = kTileLanes<typename M::F>;
  ScoreGradient<M, S> scores;
  T *key, *value;  ///< a block, packed; null: in place
  T* sum;          ///< (kKeyBlock, lanes), of a tile of rows
  T* keys_sum;     ///< (kKeyBlock), of all rows

  BiasScratch(const AttentionArgs& a, Arena& arena) : scores(a, arena) {
    const auto panel = [&](int64_t width) {
      return Panels<M, S>::kInPlace
                 ? nullptr
                 : arena.take<T>(Panels<M, S>::key_size(kKeyBlock, width));
    };
    key = panel(a.D);
    value = panel(a.Dv);
    sum = arena.take<T>(kKeyBlock * kLanes);
    keys_sum = arena.take<T>(kKeyBlock);
  }
};

/// What a task owns, in ranges of batch rows, heads, rows and keys.
struct BiasRegion {
  Interval batches, heads, rows, keys;
};

template <class M, class S>
class BiasTask {
 public:
  using F = typename M::F;
  using T = typename F::Scalar;
  static constexpr int64_t kLanes = kTileLanes<F>;

  BiasTask(const BackwardArgs& b, const Workspace<F>& workspace,
           BiasScratch<M, S>& scratch)
      : b_(b), a_(b.attention), w_(workspace), s_(scratch) {}

  void run(const BiasRegion& region) {
    const bool of_keys = b_.dbias.key != 0;
    clear();
    for_each_key_block(region.keys, kKeyBlock, [&](Interval block) {
      for (int64_t b = region.batches.begin; b < region.batches.end; ++b) {
        for (int64_t h = region.heads.begin; h < region.heads.end; ++h) {
          add_head(b, h, region.rows, block);
        }
      }
      if (of_keys) {
        write(region, block);
        clear();
      } else if (b_.dbias.query == 0) {
        for (int64_t j = 0; j < kKeyBlock; ++j) total_ += s_.keys_sum[j];
        memset(s_.keys_sum, 0, kKeyBlock * sizeof(T));
      }
    });
    if (!of_keys) {
      s_.keys_sum[0] = total_;
      write(region, {0, 1});
    }
  }

 private:
  void clear() {
    memset(s_.sum, 0, kKeyBlock * kLanes * sizeof(T));
    memset(s_.keys_sum, 0, kKeyBlock * sizeof(T));
  }

  void add_head(int64_t b, int64_t h, Interval rows, Interval block) {
    const Interval keys =
        overlap(block, {visible_keys(a_, b, rows.begin).begin,
                        visible_keys(a_, b, rows.end - 1).end});
    if (keys.empty()) return;
    const int64_t g = h / group_of(a_);
    const auto key = Panels<M, S>::keys(a_.key, b, g, keys, a_.D, s_.key);
    const auto value =
        Panels<M, S>::keys(a_.value, b, g, keys, a_.Dv, s_.value);
    for (int64_t first = rows.begin; first < rows.end; first += kLanes) {
      tile_.assign(a_, {b, g, h, 1, first, min(kLanes, rows.end - first)});
      const Interval seen = overlap(keys, tile_.keys);
      if (seen.empty()) continue;
      s_.scores.load(b_, w_, tile_);
      const ScoreBlock scores =
          s_.scores.compute(a_, tile_, key, value, seen, true);
      for_each_vector<F>(scores, [&](const VectorSpan& span) {
        add_vector(span, scores.anchor);
      });
    }
  }

  void add_vector(const VectorSpan& span, int64_t anchor) {
    const int64_t first = span.c * F::kLanes;
    const int64_t rows = min(F::kLanes, tile_.count - first);
    int64_t j = span.keys.begin - anchor;
    for (int64_t at = span.begin; at < span.end; at += kLanes, ++j) {
      const T* ds = s_.scores.dscores + at;
      if (b_.dbias.query == 0) {  // one chain over the rows, whatever the tile
        for (int64_t r = 0; r < rows; ++r) s_.keys_sum[j] += ds[r];
        continue;
      }
      T* sum = s_.sum + (b_.dbias.key != 0 ? j * kLanes : 0) + first;
      F::store(sum, F::add(F::load(sum), F::load(ds)));
    }
  }

  void write(const BiasRegion& region, Interval block) {
    const ScoreGradients& out = b_.dbias;
    const int64_t anchor = round_down(block.begin, kKeyBlock);
    auto* data = static_cast<T*>(out.data) + region.batches.begin * out.batch +
                 region.heads.begin * out.head;
    const Interval rows =
        out.query != 0 ? region.rows
                       : Interval{region.rows.begin, region.rows.begin + 1};
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      const int64_t r = i - rows.begin;
      for (int64_t j = block.begin; j < block.end; ++j) {
        data[i * out.query + j * out.key] =
            out.query != 0 ? s_.sum[(j - anchor) * kLanes + r]
                           : s_.keys_sum[j - anchor];
      }
    }
  }

  const BackwardArgs& b_;
  const AttentionArgs& a_;
  const Workspace<F>& w_;
  BiasScratch<M, S>& s_;
  QueryTile<F> tile_;
  T total_ = 0;  ///< of all rows and keys
};

template <class M, class S>
struct BiasKernel {
  using Type = Kernel<BackwardRun>;
  using F = typename M::F;

  /// A dimension in pieces of `step`, or in one where the mask repeats itself.
  struct Pieces {
    int64_t size, step;
    Pieces(int64_t size, int64_t stride, int64_t step)
        : size(size), step(stride != 0 ? step : max(size, 1)) {}
    int64_t count() const { return (size + step - 1) / step; }
    Interval operator[](int64_t n) const {
      return {n * step, min(size, (n + 1) * step)};
    }
  };
  struct Grid {
    Pieces batches, heads, rows, keys;
    explicit Grid(const BackwardArgs& b)
        : batches(b.attention.B, b.dbias.batch, 1),
          heads(b.attention.H, b.dbias.head, 1),
          rows(b.attention.Lq, b.dbias.query, kTileLanes<F>),
          keys(b.attention.Lk, b.dbias.key, kKeyBlock) {}
    int64_t tasks() const {
      return batches.count() * heads.count() * rows.count() * keys.count();
    }
    BiasRegion operator[](int64_t n) const {
      const int64_t key = n % keys.count(), row = n / keys.count();
      const int64_t head = row / rows.count();
      return {batches[head / heads.count()], heads[head % heads.count()],
              rows[row % rows.count()], keys[key]};
    }
  };

  static Plan plan(const BackwardRun& run, int /*threads*/) {
    const BackwardArgs& b = run.args;
    Plan plan;
    plan.tasks = b.dbias.data ? Grid(b).tasks() : 0;
    Arena arena(nullptr);
    BiasScratch<M, S>(b.attention, arena);
    plan.scratch_bytes = arena.used();
    return plan;
  }
  static void run(const BackwardRun& run, const Plan&, int64_t first,
                  int64_t last, void* scratch) {
    const BackwardArgs& b = run.args;
    const typename Gemm<M>::Registers registers;
    Arena arena(scratch), shared(run.workspace);
    BiasScratch<M, S> s(b.attention, arena);
    const Workspace<F> w(run, shared);
    const Grid grid(b);
    for (int64_t n = first; n < last; ++n) BiasTask<M, S>(b, w, s).run(grid[n]);
  }
};

}  // namespace

Kernel<BackwardRun> MULTIHEAD_FOR_TARGET(backward_bias)(Dtype dtype) {
  return visit<BiasKernel>(dtype);
}

}  // namespace multihead::kernels
