// SPDX-License-Identifier: MIT
//
// Decoding: a few queries against long keys, as a model generates. The rows of
// a key/value head, all query heads of its group times the queries, are so few
// that a call costs what it takes to read keys and values once: 8·D bytes per
// key in float32. So everything here is arranged around that stream
// (row_products.h), and the rest is kept small beside it:
//
//   1. scores         S = Q·Kᵀ for a block of 128 keys, keys in the lanes
//   2. transform      softcap, masks, ALiBi, what a row does not see; m
//   3. exponentiate   P = exp(S − m) in the place of S, l += P
//   4. add_values     O = exp(m_old − m)·O + P·V, columns in the lanes
//
// The steps, the order of every sum and the places where keys are cut into
// blocks and splits are those of the forward pass (forward.cpp), so a query has
// the same bits alone, in a batch, in a chunk and in prefill. Since each split
// has an online softmax of its own and they are merged in ascending order,
// splits can be tasks: their states wait in a workspace, and the bits do not
// depend on how many threads there are ("flash decoding", Dao et al., 2023,
// but for the fixed length of splits).
#pragma once

#include <type_traits>

#include "multihead/kernels/cpu/decode/row_products.h"
#include "multihead/kernels/cpu/gemm/stored_rows.h"
#include "multihead/kernels/cpu/scores/scores.h"

namespace multihead::kernels {
namespace {

/// Query rows of a key/value head that are decoded at once. From about here on
/// rows in the lanes are faster.
inline constexpr int64_t kDecodeRows = 24;
/// What is held for each row has so many places: whole vectors.
inline constexpr int64_t kRowPlaces = 32;

/// The online softmax of rows (online_softmax.h), with each row's O in a row.
template <class F>
struct RowSoftmax {
  using T = typename F::Scalar;
  T* maximum;  ///< (kRowPlaces), m
  T* sum;      ///< (kRowPlaces), l
  T* context;  ///< (rows, stride), O

  static RowSoftmax take(int64_t rows, int64_t stride, Arena& arena) {
    return {arena.take<T>(kRowPlaces), arena.take<T>(kRowPlaces),
            arena.take<T>(rows * stride)};
  }

  /// No keys yet.
  void reset(int64_t size) const {
    for (int64_t r = 0; r < kRowPlaces; ++r) {
      maximum[r] = T(-INFINITY);
      sum[r] = 0;
    }
    memset(context, 0, size * sizeof(T));
  }

  /// Adds the state of other keys.
  void merge(const RowSoftmax& part, int64_t rows, int64_t stride) const {
    T of_this[kRowPlaces], of_part[kRowPlaces];
    for (int64_t r = 0; r < kRowPlaces; r += F::kLanes) {
      const auto a = F::load(maximum + r), b = F::load(part.maximum + r);
      const auto m = F::max(b, a);
      const auto shift = shift_of<F>(m);
      const auto scale_this = exp<F>(F::sub(a, shift));
      const auto scale_part = exp<F>(F::sub(b, shift));
      F::store(maximum + r, m);
      F::store(sum + r, F::fma(F::load(part.sum + r), scale_part,
                               F::mul(F::load(sum + r), scale_this)));
      F::store(of_this + r, scale_this);
      F::store(of_part + r, scale_part);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const auto a = F::broadcast(of_this[r]), b = F::broadcast(of_part[r]);
      for (int64_t e = r * stride; e < (r + 1) * stride; e += F::kLanes) {
        F::store(context + e, F::fma(F::load(part.context + e), b,
                                     F::mul(F::load(context + e), a)));
      }
    }
  }
};

template <class M, class S>
struct DecodeScratch {
  using F = typename M::F;
  using T = typename F::Scalar;
  int64_t rows;       ///< of the key/value head, padded for the products
  int64_t depth;      ///< elements of a row of queries, padded
  int64_t stride;     ///< of O
  T* query;           ///< (rows, depth), scaled unless M::kScalesScores
  T* scores;          ///< (rows, kScoreStride), S, then P
  T* weights;         ///< (rows, kScoreStride / 2), P in pairs
  T* bias;            ///< (rows, kKeyBlock), what masks add; null: no mask
  T *shift, *factor;  ///< (kRowPlaces), m as it may be subtracted; O's scale
  RowSoftmax<F> total, split;

  DecodeScratch(const AttentionArgs& a, Arena& arena)
      : rows(padded(min(most_rows_of_head(a), kDecodeRows))),
        depth(round_up(M::depth(a.D), F::kLanes)),
        stride(round_up(a.Dv, F::kLanes)),
        query(arena.take<T>(rows * depth)),
        scores(arena.take<T>(rows * kScoreStride<F>)),
        weights(arena.take<T>(rows * kScoreStride<F> / 2)),
        bias(nullptr),
        shift(arena.take<T>(kRowPlaces)),
        factor(arena.take<T>(kRowPlaces)),
        total(RowSoftmax<F>::take(rows, stride, arena)),
        split(RowSoftmax<F>::take(rows, stride, arena)) {
    if (a.mask.kind != ScoreMask::Kind::kNone || a.key_mask.data) {
      bias = arena.take<T>(rows * kKeyBlock);
    }
  }

  /// 1, 2, 4 and whole multiples of what the products take at once.
  static int64_t padded(int64_t rows) {
    if (rows <= 2) return rows;
    constexpr int64_t kMost = kMaxProductRows<F>;
    return rows <= 4 ? 4 : round_up(rows, kMost);
  }
  /// Of a state in the workspace: m, l, O.
  int64_t state_size() const { return 2 * kRowPlaces + rows * stride; }
};

/// The rows of one key/value head. K: how keys and values are stored.
template <class M, class S, class K = S>
class DecodeTask {
 public:
  using F = typename M::F;
  using T = typename F::Scalar;
  using Type = typename S::Type;

  DecodeTask(const ForwardArgs& f, DecodeScratch<M, S>& scratch, int64_t b,
             int64_t g)
      : f_(f), a_(f.attention), s_(scratch), b_(b), g_(g) {
    const int64_t group = group_of(a_);
    count_ = rows_of_head(a_, b);
    rows_ = DecodeScratch<M, S>::padded(count_);
    for (int64_t r = 0; r < count_; ++r) {
      head_[r] = g * group + r % group;
      query_[r] = r / group;
      sees_[r] = visible_keys(a_, b, query_[r]);
    }
    // Rows ascend, and so do both ends of what they see.
    if (count_ > 0) keys_ = {sees_[0].begin, sees_[count_ - 1].end};
  }

  /// The keys that some row sees.
  Interval keys() const { return keys_; }

  void load_queries() {
    memset(s_.shift, 0, kRowPlaces * sizeof(T));
    memset(s_.query, 0, s_.rows * s_.depth * sizeof(T));
    for (int64_t r = 0; r < count_; ++r) {
      const auto* from = row_of<Type>(a_.query, b_, head_[r], query_[r]);
      T* to = s_.query + r * s_.depth;
      if constexpr (M::kScalesScores) {
        memcpy(to, from, a_.D * sizeof(Type));
      } else {
        const auto scale = F::broadcast(static_cast<T>(a_.scale));
        for (int64_t x = 0; x < a_.D; x += F::kLanes) {
          F::store(to + x, F::mul(load_some<S>(from + x, a_.D - x), scale));
        }
      }
    }
  }

  /// The online softmax over `keys`, which lie in one split.
  void attend(Interval keys, const RowSoftmax<F>& state) {
    state.reset(s_.rows * s_.stride);
    for_each_key_block(keys, kKeyBlock, [&](Interval block) {
      const int64_t anchor = round_down(block.begin, kKeyBlock);
      if (s_.bias) block = read_masks(block, anchor);
      if (block.empty()) return;
      score(block, anchor);
      for (int64_t r = 0; r < count_; ++r) transform(block, anchor, r, state);
      raise_maximum(state);
      for (int64_t r = 0; r < count_; ++r) exponentiate(block, anchor, r);
      add_weights(block, anchor, state);
      add_values(block, anchor, state);
    });
  }

  /// out and logsumexp; false where a row of out is not finite.
  bool finish(const RowSoftmax<F>& total) {
    T inverse[kRowPlaces], logsumexp[kRowPlaces], sinks[kRowPlaces] = {};
    for (int64_t r = 0; a_.sinks && r < count_; ++r) {
      sinks[r] = static_cast<T>(a_.sinks[head_[r]]);
    }
    for (int64_t r = 0; r < count_; r += F::kLanes) {
      auto m = F::load(total.maximum + r), l = F::load(total.sum + r);
      auto factor = F::broadcast(1);
      if (a_.sinks) {
        const auto sink = F::load(sinks + r), raised = F::max(sink, m);
        const auto shift = shift_of<F>(raised);
        factor = exp<F>(F::sub(m, shift));
        l = F::fma(l, factor, exp<F>(F::sub(sink, shift)));
        m = raised;
      }
      const auto zero = F::broadcast(0);
      F::store(inverse + r,
               F::select(F::equal(l, zero), zero, F::div(factor, l)));
      F::store(logsumexp + r, F::add(shift_of<F>(m), log<F>(l)));
    }
    bool finite = true;
    for (int64_t r = 0; r < count_; ++r) {
      auto* row = row_of<Type>(f_.out, b_, head_[r], query_[r]);
      const T* context = total.context + r * s_.stride;
      for (int64_t e = 0; e < a_.Dv; e += F::kLanes) {
        store_some<S>(row + e,
                      F::mul(F::load(context + e), F::broadcast(inverse[r])),
                      a_.Dv - e);
      }
      finite &= is_finite<S>(row, a_.Dv);
      if (!f_.logsumexp) continue;
      static_cast<T*>(f_.logsumexp)[query_index(a_, b_, head_[r], query_[r])] =
          logsumexp[r];
    }
    return finite;
  }

 private:
  /// Biases of the keys of a block, −inf where masks hide them; returns the
  /// keys that some row sees.
  Interval read_masks(Interval block, int64_t anchor) {
    const int64_t first = block.begin - anchor, count = block.end - block.begin;
    int64_t begin = count, end = 0;
    for (int64_t r = 0; r < count_; ++r) {
      T* bias = s_.bias + r * kKeyBlock + first;
      if (a_.mask.kind == ScoreMask::Kind::kNone) {
        memset(bias, 0, count * sizeof *bias);
      } else {
        read_mask_row<F>(a_.mask,
                         b_ * a_.mask.batch + head_[r] * a_.mask.head +
                             query_[r] * a_.mask.query +
                             block.begin * a_.mask.key,
                         count, bias);
      }
      if (a_.key_mask.data) {
        const uint8_t* keep = a_.key_mask.data + b_ * a_.key_mask.batch +
                              block.begin * a_.key_mask.key;
        for (int64_t j = 0; j < count; ++j) {
          if (!keep[j * a_.key_mask.key]) bias[j] = T(-INFINITY);
        }
      }
      int64_t low = 0, high = count;
      while (low < begin && bias[low] == T(-INFINITY)) ++low;
      while (high > end && bias[high - 1] == T(-INFINITY)) --high;
      begin = min(begin, low);
      end = max(end, high);
    }
    return begin < end ? Interval{block.begin + begin, block.begin + end}
                       : Interval{0, 0};
  }

  /// S = Q·Kᵀ.
  void score(Interval block, int64_t anchor) {
    for_each_run(a_.key, block, [&](Interval run) {
      const auto key = run_of<K>(a_.key, b_, g_, run, keys_.end, a_.D);
      for_each_rows([&]<int kRows>(int64_t r) {
        qk_rows<M, K, kRows>(
            key, run.end - run.begin, s_.query + r * s_.depth, s_.depth,
            static_cast<T>(a_.scale),
            s_.scores + r * kScoreStride<F> + (run.begin - anchor));
      });
    });
  }

  /// Softcap, bias, ALiBi; −inf where row r does not see a key.
  void transform(Interval block, int64_t anchor, int64_t r,
                 const RowSoftmax<F>& state) {
    const Interval sees = overlap(sees_[r], block);
    const auto first = F::broadcast(static_cast<T>(sees.begin - anchor));
    const auto last = F::broadcast(static_cast<T>(sees.end - anchor));
    const auto none = F::broadcast(T(-INFINITY));
    const T* bias = s_.bias ? s_.bias + r * kKeyBlock : nullptr;
    const Softcap<T> softcap(a_.softcap);
    T here = 0, slope = 0;
    if (a_.alibi_slopes) {
      here = static_cast<T>(position(a_, b_, query_[r]) - anchor);
      slope = static_cast<T>(
          -a_.alibi_slopes[b_ * a_.alibi_batch + head_[r] * a_.alibi_head]);
    }
    auto maximum = none;
    for_each_vector(block, anchor, [&](int64_t j) {
      const auto key = F::add(F::broadcast(static_cast<T>(j)), lane_numbers());
      T* at = s_.scores + r * kScoreStride<F> + j;
      auto s = F::load(at);
      if (a_.softcap != 0) {
        const auto capped = F::mul(s, F::broadcast(softcap.inverse));
        s = F::mul(tanh<F>(capped), F::broadcast(softcap.value));
      }
      if (bias) {
        const auto added = F::load(bias + j);
        s = F::select(F::equal(added, none), none, F::add(s, added));
      }
      if (a_.alibi_slopes) {
        s = F::fma(F::broadcast(slope), F::abs(F::sub(F::broadcast(here), key)),
                   s);
      }
      s = F::select(F::less(key, first), none, s);
      s = F::select(F::less(key, last), s, none);
      maximum = F::max(s, maximum);
      F::store(at, s);
    });
    alignas(64) T lanes[F::kLanes];
    F::store(lanes, maximum);
    T m = state.maximum[r];
    for (T x : lanes) m = x > m ? x : m;
    s_.shift[r] = m;
  }

  /// m; l is scaled at once, O when P·V is next added.
  void raise_maximum(const RowSoftmax<F>& state) {
    for (int64_t r = 0; r < count_; r += F::kLanes) {
      const auto m = F::load(s_.shift + r);
      const auto shift = shift_of<F>(m);
      const auto factor = exp<F>(F::sub(F::load(state.maximum + r), shift));
      F::store(state.maximum + r, m);
      F::store(s_.shift + r, shift);
      F::store(s_.factor + r, factor);
      F::store(state.sum + r, F::mul(F::load(state.sum + r), factor));
    }
  }

  /// S → P, in place.
  void exponentiate(Interval block, int64_t anchor, int64_t r) {
    const auto shift = F::broadcast(s_.shift[r]);
    T* scores = s_.scores + r * kScoreStride<F>;
    for_each_vector(block, anchor, [&](int64_t j) {
      F::store(scores + j, exp<F>(F::sub(F::load(scores + j), shift)));
    });
  }

  /// l += P: one chain over the keys, as in every kernel.
  void add_weights(Interval block, int64_t anchor, const RowSoftmax<F>& state) {
    const int64_t begin = block.begin - anchor, end = block.end - anchor;
    for_each_rows([&]<int kRows>(int64_t r) {
      T sum[kRows] = {};
      const T* p = s_.scores + r * kScoreStride<F>;
      for (int64_t j = begin; j < end; ++j) {
#pragma GCC unroll 8
        for (int n = 0; n < kRows; ++n) sum[n] += p[n * kScoreStride<F> + j];
      }
      for (int n = 0; n < kRows; ++n) state.sum[r + n] += sum[n];
    });
  }

  /// O = factor·O + P·V.
  void add_values(Interval block, int64_t anchor, const RowSoftmax<F>& state) {
    const T* weights = nullptr;
    for (int64_t r = rows_; r-- > 0;) {
      weights = ValueStep<M, K>::weights(
          s_.scores + r * kScoreStride<F>, block.begin - anchor,
          block.end - anchor, s_.weights + r * kScoreStride<F> / 2);
    }
    constexpr int64_t kStride = kScoreStride<F> / ValueStep<M, K>::kKeys;
    ValueRun<K> runs[kKeyBlock];
    int64_t count = 0;
    for_each_run(a_.value, block, [&](Interval run) {
      runs[count++] = {run_of<K>(a_.value, b_, g_, run, keys_.end, a_.Dv), run};
    });
    for_each_rows([&]<int kRows>(int64_t r) {
      pv_rows<M, K, kRows>({.runs = runs,
                            .count = count,
                            .weights = weights + r * kStride,
                            .factor = s_.factor + r,
                            .context = state.context + r * s_.stride,
                            .stride = s_.stride},
                           a_.Dv);
    });
  }

  /// Visits the rows in groups that the products take: visit<kRows>(first).
  template <class Visit>
  void for_each_rows(const Visit& visit) {
    constexpr int kMost = kMaxProductRows<F>;
    if (rows_ == 1) return visit.template operator()<1>(0);
    if (rows_ == 2) return visit.template operator()<2>(0);
    if (rows_ == 4) return visit.template operator()<4>(0);
    for (int64_t r = 0; r < rows_; r += kMost) {
      visit.template operator()<kMost>(r);
    }
  }

  /// Visits the vectors of keys that cover `block`, by their first key, counted
  /// from `anchor`.
  template <class Visit>
  static void for_each_vector(Interval block, int64_t anchor,
                              const Visit& visit) {
    for (int64_t j = round_down(block.begin - anchor, F::kLanes);
         j < block.end - anchor; j += F::kLanes) {
      visit(j);
    }
  }

  static typename F::Vector lane_numbers() {
    static constexpr T kNumbers[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                       8, 9, 10, 11, 12, 13, 14, 15};
    return F::load(kNumbers);
  }

  const ForwardArgs& f_;
  const AttentionArgs& a_;
  DecodeScratch<M, S>& s_;
  int64_t b_, g_;
  int64_t count_, rows_;  ///< rows_: padded
  int64_t head_[kRowPlaces], query_[kRowPlaces];
  Interval sees_[kRowPlaces], keys_{0, 0};
};

/// Whether heads of so many rows are decoded.
inline bool is_decoding(const AttentionArgs& a, int64_t rows) {
  // A page must not end between two keys of a pair.
  const auto keeps_pairs = [&](const StridedRows& x) {
    return x.page % 2 == 0 || x.page >= a.Lk;
  };
  return rows <= kDecodeRows && a.dropout.probability == 0 &&
         keeps_pairs(a.key) && keeps_pairs(a.value);
}

/// A task is a key/value head, or a split of one: where there are too few heads
/// for the threads, and where the heads of a key lie side by side. There one
/// head by itself would go through every page of memory, more than the
/// processor keeps addresses of; split by split, each head finds the pages of
/// the one before it (Zen 4, 16384 keys in float32: 50 % of the read bandwidth
/// without, 75 % with).
template <class M, class S>
inline void plan_decoding(const AttentionArgs& a, int threads, Arena& arena,
                          Plan& plan) {
  const DecodeScratch<M, S> scratch(a, arena);
  const int64_t heads = a.B * a.G;
  const int64_t splits = (a.Lk + kKeySplit - 1) / kKeySplit;
  plan.is_decoding = true;
  const bool side_by_side = a.G > 1 && a.key.head < a.key.row;
  const bool too_few = threads > 1 && heads < int64_t{4} * threads;
  plan.splits = splits > 1 && (side_by_side || too_few) ? splits : 0;
  plan.tasks = heads * max(plan.splits, 1);
  plan.workspace_bytes =
      heads * plan.splits * scratch.state_size() * sizeof(ScalarOf<M>);
}

/// The state of a split in the workspace.
template <class M, class S>
inline RowSoftmax<typename M::F> state_of(const ForwardArgs& f,
                                          const Plan& plan, int64_t head,
                                          int64_t split,
                                          const DecodeScratch<M, S>& scratch) {
  auto* state = static_cast<ScalarOf<M>*>(f.workspace) +
                (head * plan.splits + split) * scratch.state_size();
  return {state, state + kRowPlaces, state + 2 * kRowPlaces};
}

/// Task n. False: a result is not finite, perhaps by a key that its row cannot
/// see.
template <class M, class S, class K>
inline bool decode_as(const ForwardArgs& f, const Plan& plan, int64_t n,
                      DecodeScratch<M, S>& scratch) {
  const int64_t splits = max(plan.splits, 1), G = f.attention.G;
  const int64_t b = n / (splits * G), split = n / G % splits, g = n % G;
  DecodeTask<M, S, K> task(f, scratch, b, g);
  task.load_queries();
  if (plan.splits > 0) {
    const int64_t begin = split * kKeySplit;
    const Interval keys = overlap(task.keys(), {begin, begin + kKeySplit});
    if (!keys.empty()) {
      task.attend(keys, state_of(f, plan, b * G + g, split, scratch));
    }
    return true;
  }
  auto& total = scratch.total;
  bool started = false;
  for_each_key_block(task.keys(), kKeySplit, [&](Interval keys) {
    task.attend(keys, started ? scratch.split : total);
    if (started) total.merge(scratch.split, scratch.rows, scratch.stride);
    started = true;
  });
  if (!started) total.reset(scratch.rows * scratch.stride);
  return task.finish(total);
}

/// With keys and values as they are stored.
template <class M, class S>
inline bool decode(const ForwardArgs& f, const Plan& plan, int64_t n,
                   DecodeScratch<M, S>& scratch) {
  using Pair = Stored<Dtype::kBFloat16>;
  constexpr bool kIsSingle = sizeof(ScalarOf<M>) == sizeof(float);
  const Storage storage = f.attention.storage;
  if constexpr (kIsSingle) {
    if (storage == Storage::kMXInt8) {
      return decode_as<M, S, StoredMXInt8>(f, plan, n, scratch);
    }
  }
  if constexpr (std::is_same_v<S, Stored<Dtype::kFloat32>>) {
    if (storage == Storage::kBFloat16) {
      return decode_as<M, S, Pair>(f, plan, n, scratch);
    }
  }
  return decode_as<M, S, S>(f, plan, n, scratch);
}

/// Merges the splits of a head. False: as above.
template <class M, class S>
inline bool merge_splits(const ForwardArgs& f, const Plan& plan, int64_t head,
                         DecodeScratch<M, S>& scratch) {
  const int64_t G = f.attention.G;
  DecodeTask<M, S> task(f, scratch, head / G, head % G);
  auto total = scratch.total;
  bool started = false;
  for_each_key_block(task.keys(), kKeySplit, [&](Interval keys) {
    const auto part = state_of(f, plan, head, keys.begin / kKeySplit, scratch);
    if (started) {
      total.merge(part, scratch.rows, scratch.stride);
    } else {
      total = part;
    }
    started = true;
  });
  if (!started) total.reset(scratch.rows * scratch.stride);
  return task.finish(total);
}

}  // namespace
}  // namespace multihead::kernels
