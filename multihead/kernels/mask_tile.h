// SPDX-License-Identifier: MIT
//
// A mask tensor, seen by the rows of a tile over one block of keys. The bytes
// are looked at before any product: a block that they hide from every row is
// never computed, a block in which they change nothing costs nothing more, and
// what is left is turned into lanes once.
#pragma once

#include <math.h>
#include <string.h>

#include "multihead/kernels/rows.h"
#include "multihead/kernels/tile.h"

namespace multihead::kernels {
namespace {

/// What a mask does to a block.
template <typename T>
struct MaskTile {
  Interval keys;              ///< visible to some row; nothing else is
  const T* values = nullptr;  ///< (block, lanes), added; null: nothing to add
};

/// Scratch of read_mask.
template <typename T>
struct MaskScratch {
  T* rows;    ///< (lanes, kKeyBlock)
  T* values;  ///< (kKeyBlock, lanes)
};

/// Which keys of a block some row sees, and whether all rows see all of them
/// unchanged.
struct MaskScan {
  uint8_t seen[kKeyBlock] = {};
  uint8_t changed[kKeyBlock] = {};
};

inline void scan_row(const uint8_t* keep, int64_t stride, int64_t count,
                     MaskScan& scan) {
  if (stride == 1) {
    for (int64_t j = 0; j < count; ++j) {
      scan.seen[j] |= keep[j];
      scan.changed[j] |= keep[j] == 0;
    }
    return;
  }
  for (int64_t j = 0; j < count; ++j) {
    scan.seen[j] |= keep[j * stride];
    scan.changed[j] |= keep[j * stride] == 0;
  }
}

template <typename T>
inline void scan_row(const T* bias, int64_t stride, int64_t count,
                     MaskScan& scan) {
  for (int64_t j = 0; j < count; ++j) {
    const T x = bias[j * stride];
    scan.seen[j] |= x != T(-INFINITY);
    scan.changed[j] |= x != 0;
  }
}

template <typename T>
inline void expand_row(const uint8_t* keep, int64_t stride, Interval keys,
                       T* row) {
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    row[j] = keep[j * stride] ? T(0) : T(-INFINITY);
  }
}
template <typename T>
inline void expand_row(const T* bias, int64_t stride, Interval keys, T* row) {
  for (int64_t j = keys.begin; j < keys.end; ++j) row[j] = bias[j * stride];
}

/// Rows (lanes, kKeyBlock) → (kKeyBlock, lanes).
template <class F>
inline void rows_to_lanes(const typename F::Scalar* rows, Interval keys,
                          typename F::Scalar* values) {
  for (int64_t j = round_down(keys.begin, F::kLanes); j < keys.end;
       j += F::kLanes) {
    for (int64_t c = 0; c < kTileLanes<F>; c += F::kLanes) {
      typename F::Vector square[F::kLanes];
      for (int i = 0; i < F::kLanes; ++i) {
        square[i] = F::load(rows + (c + i) * kKeyBlock + j);
      }
      F::transpose(square);
      for (int i = 0; i < F::kLanes; ++i) {
        F::store(values + (j + i) * kTileLanes<F> + c, square[i]);
      }
    }
  }
}

/// Rows of a tile: element offsets of their mask rows, key 0.
struct MaskRows {
  const int64_t* offsets;
  int64_t count;
};

template <typename T, typename E>
inline T as_bias(E x) {
  if constexpr (sizeof(E) == 1) return x ? T(0) : T(-INFINITY);
  return static_cast<T>(x);
}

/// Rows that lie side by side, as those of a transposed mask: read key by key,
/// straight into the lanes.
template <class F, typename E>
inline MaskTile<typename F::Scalar> read_adjacent(const E* data,
                                                  int64_t key_stride,
                                                  int64_t rows, Interval block,
                                                  int64_t group,
                                                  typename F::Scalar* values) {
  using T = typename F::Scalar;
  const int64_t anchor = round_down(block.begin, kKeyBlock);
  int64_t first = block.end, last = block.begin;
  bool changed = false;
  for (int64_t j = block.begin; j < block.end; ++j) {
    const E* row = data + (j - block.begin) * key_stride;
    T* lanes = values + (j - anchor) * kTileLanes<F>;
    bool seen = false;
    for (int64_t r = 0; r < rows; ++r) {
      lanes[r] = as_bias<T>(row[r]);
      seen |= lanes[r] != T(-INFINITY);
      changed |= lanes[r] != 0;
    }
    for (int64_t r = rows; r < kTileLanes<F>; ++r) lanes[r] = lanes[rows - 1];
    if (!seen) continue;
    first = least(first, j);
    last = j + 1;
  }
  if (first >= last) return {{0, 0}, nullptr};
  const Interval keys =
      overlap(block, {round_down(first, group), round_up(last, group)});
  return {keys, changed ? values : nullptr};
}

/// E: uint8_t for keep masks, the compute type for biases.
template <class F, typename E>
inline MaskTile<typename F::Scalar> read_mask_of(
    const ScoreMask& mask, const MaskRows& rows, Interval block, int64_t group,
    const MaskScratch<typename F::Scalar>& scratch) {
  using T = typename F::Scalar;
  const int64_t anchor = round_down(block.begin, kKeyBlock);
  const auto* data = static_cast<const E*>(mask.data) + block.begin * mask.key;
  bool same = true, adjacent = mask.key != 1 && rows.count > 1;
  for (int64_t r = 1; r < rows.count; ++r) {
    same &= rows.offsets[r] == rows.offsets[0];
    adjacent &= rows.offsets[r] == rows.offsets[0] + r;
  }
  if (adjacent) {
    return read_adjacent<F>(data + rows.offsets[0], mask.key, rows.count, block,
                            group, scratch.values);
  }
  MaskScan scan;
  const int64_t count = block.end - block.begin;
  for (int64_t r = 0; r < (same ? 1 : rows.count); ++r) {
    scan_row(data + rows.offsets[r], mask.key, count, scan);
  }
  int64_t first = 0, last = count;
  while (first < count && !scan.seen[first]) ++first;
  while (last > first && !scan.seen[last - 1]) --last;
  // Widened to groups of keys, which some products compute whole.
  const Interval keys = overlap(block, {round_down(block.begin + first, group),
                                        round_up(block.begin + last, group)});
  if (first == last) return {{}, nullptr};
  bool changed = false;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    changed |= scan.changed[j - block.begin];
  }
  if (!changed) return {keys, nullptr};

  const Interval local{keys.begin - anchor, keys.end - anchor};
  data -= (block.begin - anchor) * mask.key;
  for (int64_t r = 0; r < kTileLanes<F>; ++r) {
    T* row = scratch.rows + r * kKeyBlock;
    if (r < rows.count && (r == 0 || !same)) {
      expand_row(data + rows.offsets[r], mask.key, local, row);
    } else {
      memcpy(row, scratch.rows, kKeyBlock * sizeof(T));
    }
  }
  rows_to_lanes<F>(scratch.rows, local, scratch.values);
  return {keys, scratch.values};
}

/// `block` lies in one block of kKeyBlock keys.
template <class F>
inline MaskTile<typename F::Scalar> read_mask(
    const ScoreMask& mask, const MaskRows& rows, Interval block, int64_t group,
    const MaskScratch<typename F::Scalar>& scratch) {
  if (mask.kind == ScoreMask::Kind::kNone) return {block, nullptr};
  return mask.kind == ScoreMask::Kind::kKeep
             ? read_mask_of<F, uint8_t>(mask, rows, block, group, scratch)
             : read_mask_of<F, typename F::Scalar>(mask, rows, block, group,
                                                   scratch);
}

}  // namespace
}  // namespace multihead::kernels
