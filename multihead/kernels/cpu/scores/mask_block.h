// SPDX-License-Identifier: MIT
//
// Mask tensors, seen by the rows of a tile over one block of keys. The bytes
// are read before any GEMM: a block that they hide from every row is never
// computed, a block in which they change nothing costs nothing more, and any
// other block of the mask is transposed into the lanes once.
#pragma once

#include <math.h>
#include <string.h>

#include <limits>

#include "multihead/kernels/cpu/gemm/load_store.h"

namespace multihead::kernels {
namespace {

/// What a mask does to a block.
template <typename T>
struct MaskBlock {
  Interval keys;              ///< visible to some row; nothing else is
  const T* values = nullptr;  ///< (block, lanes), added; null: nothing to add
};

/// Scratch of read_mask.
template <typename T>
struct MaskScratch {
  T* rows;    ///< (lanes, kKeyBlock)
  T* values;  ///< (kKeyBlock, lanes)
};

/// Elements of a keep mask, in the place of biases of F.
template <class F>
struct KeepElements {
  using Type = uint8_t;
  using Bits = uint8_t;
  /// Not 0: the key is seen; the score changes.
  static Bits seen(Type x) { return x; }
  static Bits changed(Type x) { return x == 0; }
  static void widen(const Type* from, int64_t count, ScalarOf<F>* to) {
    using T = typename F::Scalar;
    constexpr int64_t kRun = 64;  // long enough for compilers to use vectors
    int64_t j = 0;
    for (; j + kRun <= count; j += kRun) {
      for (int64_t i = j; i < j + kRun; ++i) {
        to[i] = from[i] ? T(0) : T(-INFINITY);
      }
    }
    // Looked up: choices would be branches, which random masks mispredict.
    static constexpr T kValues[2] = {T(-INFINITY), 0};
    for (; j < count; ++j) to[j] = kValues[from[j] != 0];
  }
};

/// Elements of a bias stored as S. Compared as bits: an instruction each, and
/// NaN is seen.
template <Dtype kDtype>
struct BiasElements {
  using S = Stored<kDtype>;
  using Type = typename S::Type;
  using Bits = typename S::Bits;
  static constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);
  static constexpr Bits kMinusInfinity = kSign | S::kInfinity;

  static Bits seen(Type x) { return bits(x) ^ kMinusInfinity; }
  static Bits changed(Type x) { return bits(x) & ~kSign; }
  static void widen(const Type* from, int64_t count, ScalarOf<S>* to) {
    kernels::widen<S>(from, count, to);
  }

 private:
  static Bits bits(Type x) { return __builtin_bit_cast(Bits, x); }
};

/// The stride 1, known to the compiler.
struct Dense {
  // NOLINTNEXTLINE(google-explicit-constructor)
  constexpr operator int64_t() const { return 1; }
};

/// Which keys of a block some row sees, and which scores change: not 0.
template <class E>
struct MaskScan {
  typename E::Bits seen[kKeyBlock] = {};
  typename E::Bits changed[kKeyBlock] = {};

  template <typename Stride>
  void add(const typename E::Type* row, Stride stride, int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
      const auto x = row[j * stride];
      seen[j] |= E::seen(x);
      changed[j] |= E::changed(x);
    }
  }
};

/// A row of elements `stride` apart, widened.
template <class E, typename T>
inline void widen_strided(const typename E::Type* from, int64_t stride,
                          int64_t count, T* to) {
  if (stride == 1) return E::widen(from, count, to);
  typename E::Type dense[kKeyBlock];
  for (int64_t j = 0; j < count; ++j) dense[j] = from[j * stride];
  E::widen(dense, count, to);
}

/// Rows (lanes, kKeyBlock) → (kKeyBlock, lanes).
template <class F>
inline void rows_to_lanes(const ScalarOf<F>* rows, Interval keys,
                          ScalarOf<F>* values) {
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

/// Rows that lie side by side, as those of a transposed mask: read key by key,
/// straight into the lanes.
template <class F, class E>
inline MaskBlock<ScalarOf<F>> read_adjacent(const typename E::Type* data,
                                            int64_t key_stride, int64_t rows,
                                            Interval block, int64_t group,
                                            ScalarOf<F>* values) {
  const int64_t anchor = round_down(block.begin, kKeyBlock);
  const auto zero = F::broadcast(0), one = F::broadcast(1);
  const auto lowest = F::broadcast(std::numeric_limits<ScalarOf<F>>::lowest());
  int64_t first = block.end, last = block.begin;
  auto changed = zero;
  for (int64_t j = block.begin; j < block.end; ++j) {
    auto* lanes = values + (j - anchor) * kTileLanes<F>;
    E::widen(data + (j - block.begin) * key_stride, rows, lanes);
    for (int64_t r = rows; r < kTileLanes<F>; ++r) lanes[r] = lanes[rows - 1];
    bool seen = false;
    for (int64_t r = 0; r < kTileLanes<F>; r += F::kLanes) {
      const auto x = F::load(lanes + r);
      seen |= F::any(F::not_less(x, lowest));  // NaN is seen
      changed = F::select(F::equal(x, zero), changed, one);
    }
    if (!seen) continue;
    first = min(first, j);
    last = j + 1;
  }
  if (first >= last) return {{0, 0}, nullptr};
  const Interval keys =
      overlap(block, {round_down(first, group), round_up(last, group)});
  return {keys, F::any(F::less(zero, changed)) ? values : nullptr};
}

template <class F, class E>
inline MaskBlock<ScalarOf<F>> read_mask_of(
    const ScoreMask& mask, const MaskRows& rows, Interval block, int64_t group,
    const MaskScratch<ScalarOf<F>>& scratch) {
  using T = typename F::Scalar;
  const int64_t anchor = round_down(block.begin, kKeyBlock);
  const auto* data =
      static_cast<const typename E::Type*>(mask.data) + block.begin * mask.key;
  bool same = true, adjacent = mask.key != 1 && rows.count > 1;
  for (int64_t r = 1; r < rows.count; ++r) {
    same &= rows.offsets[r] == rows.offsets[0];
    adjacent &= rows.offsets[r] == rows.offsets[0] + r;
  }
  if (adjacent) {
    return read_adjacent<F, E>(data + rows.offsets[0], mask.key, rows.count,
                               block, group, scratch.values);
  }
  MaskScan<E> scan;
  const int64_t count = block.end - block.begin;
  for (int64_t r = 0; r < (same ? 1 : rows.count); ++r) {
    const auto* row = data + rows.offsets[r];
    mask.key == 1 ? scan.add(row, Dense{}, count)
                  : scan.add(row, mask.key, count);
  }
  int64_t first = 0, last = count;
  while (first < count && !scan.seen[first]) ++first;
  while (last > first && !scan.seen[last - 1]) --last;
  // Widened to groups of keys, which some GEMMs compute whole.
  const Interval keys = overlap(block, {round_down(block.begin + first, group),
                                        round_up(block.begin + last, group)});
  if (first == last) return {{}, nullptr};
  typename E::Bits changed = 0;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    changed |= scan.changed[j - block.begin];
  }
  if (!changed) return {keys, nullptr};

  const Interval local{keys.begin - anchor, keys.end - anchor};
  data += (keys.begin - block.begin) * mask.key;
  for (int64_t r = 0; r < kTileLanes<F>; ++r) {
    T* row = scratch.rows + r * kKeyBlock;
    if (r < rows.count && (r == 0 || !same)) {
      widen_strided<E>(data + rows.offsets[r], mask.key,
                       local.end - local.begin, row + local.begin);
    } else {
      memcpy(row, scratch.rows, kKeyBlock * sizeof(T));
    }
  }
  rows_to_lanes<F>(scratch.rows, local, scratch.values);
  return {keys, scratch.values};
}

/// read(E) with the elements E that a mask, of some kind, is made of.
template <class F, class Read>
inline auto visit_mask(const ScoreMask& mask, const Read& read) {
  if (mask.kind == ScoreMask::Kind::kKeep) return read(KeepElements<F>{});
  if constexpr (sizeof(ScalarOf<F>) == sizeof(double)) {
    return read(BiasElements<Dtype::kFloat64>{});
  } else {
    if (mask.dtype == Dtype::kBFloat16) {
      return read(BiasElements<Dtype::kBFloat16>{});
    }
    if (mask.dtype == Dtype::kFloat16) {
      return read(BiasElements<Dtype::kFloat16>{});
    }
    return read(BiasElements<Dtype::kFloat32>{});
  }
}

/// `block` lies in one block of kKeyBlock keys.
template <class F>
inline MaskBlock<ScalarOf<F>> read_mask(
    const ScoreMask& mask, const MaskRows& rows, Interval block, int64_t group,
    const MaskScratch<ScalarOf<F>>& scratch) {
  if (mask.kind == ScoreMask::Kind::kNone) return {block, nullptr};
  return visit_mask<F>(mask, [&]<class E>(E) {
    return read_mask_of<F, E>(mask, rows, block, group, scratch);
  });
}

/// What a mask adds to `count` scores of one row, the first at `offset`.
template <class F>
inline void read_mask_row(const ScoreMask& mask, int64_t offset, int64_t count,
                          ScalarOf<F>* bias) {
  visit_mask<F>(mask, [&]<class E>(E) {
    widen_strided<E>(static_cast<const typename E::Type*>(mask.data) + offset,
                     mask.key, count, bias);
  });
}

/// `mask` beneath the mask of the keys: `keep`, `stride` apart from one to the
/// next, is that of the first key of `block`.
template <class F>
inline MaskBlock<ScalarOf<F>> hide_keys(
    MaskBlock<ScalarOf<F>> mask, const uint8_t* keep, int64_t stride,
    Interval block, const MaskScratch<ScalarOf<F>>& scratch) {
  using T = typename F::Scalar;
  const int64_t anchor = round_down(block.begin, kKeyBlock);
  for (int64_t j = mask.keys.begin; j < mask.keys.end; ++j) {
    if (keep[(j - block.begin) * stride]) continue;
    if (!mask.values) {
      memset(scratch.values + (mask.keys.begin - anchor) * kTileLanes<F>, 0,
             (mask.keys.end - mask.keys.begin) * kTileLanes<F> * sizeof(T));
      mask.values = scratch.values;
    }
    T* lanes = scratch.values + (j - anchor) * kTileLanes<F>;
    for (int64_t r = 0; r < kTileLanes<F>; ++r) lanes[r] = T(-INFINITY);
  }
  return mask;
}

/// What the masks of a call do to the rows of batch row b.
template <class F>
inline MaskBlock<ScalarOf<F>> read_masks(
    const AttentionArgs& a, int64_t b, const MaskRows& rows, Interval block,
    int64_t group, const MaskScratch<ScalarOf<F>>& scratch) {
  if (!a.key_mask.data) {
    return read_mask<F>(a.mask, rows, block, group, scratch);
  }
  const int64_t stride = a.key_mask.key;
  const uint8_t* keep =
      a.key_mask.data + b * a.key_mask.batch + block.begin * stride;
  int64_t first = 0, last = block.end - block.begin;
  while (first < last && !keep[first * stride]) ++first;
  while (last > first && !keep[(last - 1) * stride]) --last;
  if (first == last) return {{}, nullptr};
  const Interval kept = overlap(block, {round_down(block.begin + first, group),
                                        round_up(block.begin + last, group)});
  return hide_keys<F>(read_mask<F>(a.mask, rows, kept, group, scratch), keep,
                      stride, block, scratch);
}

}  // namespace
}  // namespace multihead::kernels
