// SPDX-License-Identifier: MIT
//
// What the backward pass knows of rows: sizes, the workspace that its stages
// share, and rows of a tile in both directions.
#pragma once

#include "multihead/kernels/cpu/backward/stages.h"
#include "multihead/kernels/cpu/weights/from_logsumexp.h"

namespace multihead::kernels {
namespace {

/// So many rows add to a key's gradient in one chain. Part of the result, as
/// kGradientSplit is, the keys whose shares of a query's gradient are one; a
/// multiple of every tile.
inline constexpr int64_t kRowSplit = 1536;

inline int64_t rows_of_head(const AttentionArgs& a) {
  return a.Lq * group_of(a);
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

/// Whether the splits of a head are tasks of their own: where there are too few
/// heads to keep all threads at work to the end.
inline bool is_split_parallel(const BackwardArgs& b, int threads) {
  const AttentionArgs& a = b.attention;
  return threads > 1 && splits_of(a) > 1 && a.B * a.G < int64_t{4} * threads;
}

/// Shared by the stages; rows as (b, g, row of the head) where `rows` stands.
template <class F>
struct Workspace {
  using T = typename F::Scalar;
  SoftmaxStats<T> stats;  ///< (B, H, Lq): P = exp(S − shift)·inv_sum
  T* delta;               ///< (B, H, Lq): Σ out·dout − dlogsumexp
  T* slopes;              ///< (B, H, Lq): of a row's ALiBi slope; where wanted
  T* partial;             ///< (width, B·G, rows, row_width); in waves only
  T* total;               ///< (B·G, rows, row_width); in waves only
  int64_t row_width;

  Workspace(const BackwardArgs& b, bool split_parallel, Arena& arena) {
    const AttentionArgs& a = b.attention;
    const int64_t rows = a.B * a.H * a.Lq;
    stats = {arena.take<T>(rows), arena.take<T>(rows)};
    delta = arena.take<T>(rows);
    slopes = b.dalibi_slopes ? arena.take<T>(rows) : nullptr;
    // A query's gradient, and behind it that of its slope.
    row_width = padded<F>(a.D + (b.dalibi_slopes ? 1 : 0));
    partial = split_parallel
                  ? arena.take<T>(rows * row_width * b.splits_per_wave)
                  : nullptr;
    total = split_parallel ? arena.take<T>(rows * row_width) : nullptr;
  }
};

/// Columns (width, lanes) are added to the first `count` rows of `rows`, whose
/// `width` is in whole vectors.
template <class F>
inline void add_lanes(const typename F::Scalar* columns, int64_t columns_used,
                      int64_t width, int64_t count, typename F::Scalar* rows) {
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
inline void store_row(const typename S::F::Scalar* row,
                      typename S::F::Scalar factor, int64_t width,
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
                          const typename S::F::Scalar* sums) {
  using T = typename S::F::Scalar;
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
      workspace.slopes[(head / a.G * a.H + h) * a.Lq + r / group] = sum[a.D];
    }
  }
}

}  // namespace
}  // namespace multihead::kernels
