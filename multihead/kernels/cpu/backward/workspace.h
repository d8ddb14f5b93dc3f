// SPDX-License-Identifier: MIT
//
// The workspace that the stages of the backward pass share, and how sums become
// rows of gradients.
#pragma once

#include "multihead/kernels/cpu/weights/from_logsumexp.h"

namespace multihead::kernels {
namespace {

/// So many rows add to a key's gradient in one chain. As kGradientSplit, it is
/// part of the result. A multiple of every tile.
inline constexpr int64_t kRowSplit = 1536;

/// Rows of all heads before key/value head `head` (b·G + g), and of all.
inline int64_t rows_before(const AttentionArgs& a, int64_t head) {
  const int64_t b = head / a.G;
  return first_query(a, b) * a.H + head % a.G * rows_of_head(a, b);
}
inline int64_t rows_of_all(const AttentionArgs& a) {
  return first_query(a, a.B) * a.H;
}

/// A row in whole vectors.
template <class F>
inline int64_t padded(int64_t width) {
  return round_up(max(width, 1), F::kLanes);
}

/// Whether something needs dS: everything but dV.
inline bool needs_dscores(const BackwardArgs& b) {
  return b.dquery.data || b.dkey.data || b.dalibi_slopes;
}

/// Memory that the stages share; rows as (b, g, row of the head) where `rows`
/// stands, head after head.
template <class F>
struct Workspace {
  using T = typename F::Scalar;
  SoftmaxStats<T> stats;  ///< (B, H, Lq): P = exp(S − shift)·inv_sum
  T* delta;               ///< (B, H, Lq): Σ out·dout − dlogsumexp
  T* slopes;  ///< (B, H, Lq): what a row adds to dslope; null: not wanted
  /// Shares of dQ, if splits are tasks: (splits_per_wave, rows, row_width).
  T* partial;
  T* total;  ///< their sum so far: (rows, row_width)
  int64_t row_width;

  Workspace(const BackwardRun& run, Arena& arena)
      : row_width(row_width_of(run.args)) {
    const AttentionArgs& a = run.args.attention;
    const int64_t rows = rows_of_all(a);
    stats = {arena.take<T>(rows), arena.take<T>(rows)};
    delta = arena.take<T>(rows);
    slopes = run.args.dalibi_slopes ? arena.take<T>(rows) : nullptr;
    const int64_t shares = run.split_parallel ? run.splits_per_wave : 0;
    partial = shares ? arena.take<T>(rows * row_width * shares) : nullptr;
    total = shares ? arena.take<T>(rows * row_width) : nullptr;
  }

  /// A query's gradient, and behind it that of its slope, in whole vectors.
  static int64_t row_width_of(const BackwardArgs& b) {
    return padded<F>(b.attention.D + (b.dalibi_slopes ? 1 : 0));
  }
};

/// rows (count, width) += columns (width, lanes); `width` is in whole vectors.
template <class F>
inline void add_lanes(const ScalarOf<F>* columns, int64_t columns_used,
                      int64_t width, int64_t count, ScalarOf<F>* rows) {
  for (int64_t c = 0; c * F::kLanes < count; ++c) {
    for (int64_t x = 0; x < width; x += F::kLanes) {
      typename F::Vector square[F::kLanes];
      for (int i = 0; i < F::kLanes; ++i) {
        square[i] =
            x + i < columns_used
                ? F::load(columns + (x + i) * kTileLanes<F> + c * F::kLanes)
                : F::broadcast(0);
      }
      F::transpose(square);
      const int64_t here = min(F::kLanes, count - c * F::kLanes);
      for (int i = 0; i < here; ++i) {
        auto* row = rows + (c * F::kLanes + i) * width + x;
        F::store(row, F::add(F::load(row), square[i]));
      }
    }
  }
}

/// A row times `factor`, stored in its dtype.
template <class S>
inline void store_row(const ScalarOf<S>* row, ScalarOf<S> factor, int64_t width,
                      typename S::Type* out) {
  using F = typename S::F;
  const auto f = F::broadcast(factor);
  for (int64_t x = 0; x < width; x += F::kLanes) {
    store_some<S>(out + x, F::mul(F::load(row + x), f),
                  min(F::kLanes, width - x));
  }
}

/// Rows of key/value head `head` (b·G + g), whose dQ is summed up in `sums`
/// (rows, row_width), to dquery and the workspace.
template <class S>
inline void store_queries(const BackwardArgs& b,
                          const Workspace<typename S::F>& workspace,
                          int64_t head, Interval rows,
                          const ScalarOf<S>* sums) {
  using T = ScalarOf<S>;
  const AttentionArgs& a = b.attention;
  const int64_t group = group_of(a);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const T* sum = sums + r * workspace.row_width;
    const int64_t h = head % a.G * group + r % group;
    if (b.dquery.data) {
      store_row<S>(
          sum, static_cast<T>(a.scale), a.D,
          row_of<typename S::Type>(b.dquery, head / a.G, h, r / group));
    }
    if (b.dalibi_slopes) {
      workspace.slopes[query_index(a, head / a.G, h, r / group)] = sum[a.D];
    }
  }
}

}  // namespace
}  // namespace multihead::kernels
