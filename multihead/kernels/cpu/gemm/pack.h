// SPDX-License-Identifier: MIT
//
// Packing: keys and values as a GEMM reads them, where they lie or copied into
// panels, one split of keys at a time.
#pragma once

#include <string.h>

#include "multihead/kernels/cpu/blocking/tasks.h"
#include "multihead/kernels/cpu/gemm/load_store.h"

namespace multihead::kernels {
namespace {

/// Keys or values as a GEMM reads them. Row r, a key or an element of several
/// keys (M::depth), begins (r − anchor)·step elements behind `data`; `stride`
/// is the stride that QkTile or PvTile takes.
///   single numbers:   keys (keys, D), values (keys, Dv), in place or widened
///   pairs, VDPBF16PS: keys (keys, ⌈D/2⌉), in place where their rows are whole
///                     pairs, values (keys/2, Dv): two keys' pairs
///   pairs, AMX:       keys (keys, D/2 rounded up to 16), values in tiles of 16
///                     columns × 16 pairs of keys
template <typename T>
struct Panel {
  const T* data;
  int64_t step, stride, anchor;
  const T* row(int64_t r) const { return data + (r - anchor) * step; }
};

/// Rows `keys` of (b, g), widened, one after the other.
template <class S>
inline Panel<ScalarOf<S>> pack_rows(const StridedRows& x, int64_t b, int64_t g,
                                    Interval keys, int64_t width,
                                    ScalarOf<S>* panel) {
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    widen<S>(row_of<typename S::Type>(x, b, g, j), width,
             panel + (j - keys.begin) * width);
  }
  return {panel, width, width, keys.begin};
}

/// How multiplier M packs tensors stored as S, and how many elements that is.
template <class M, class S>
struct Panels {
  using T = ScalarOf<M>;
  /// Whether a tensor can be read where it lies.
  static constexpr bool kInPlace = sizeof(typename S::Type) == sizeof(T);

  /// Whether a panel of keys serves as one of values too.
  static constexpr bool kKeysAreValues = true;

  static constexpr int64_t key_size(int64_t keys, int64_t width) {
    return keys * width;
  }
  static constexpr int64_t value_size(int64_t keys, int64_t width) {
    return keys * width;
  }

  /// Without a panel, in place.
  static Panel<T> keys(const StridedRows& x, int64_t b, int64_t g,
                       Interval keys, int64_t width, T* panel) {
    if constexpr (kInPlace) {
      if (!panel) return {row_of<T>(x, b, g, 0), x.row, x.row, 0};
    }
    return pack_rows<S>(x, b, g, keys, width, panel);
  }
  /// kMaskNonFinite: what is not finite counts as 0, where
  /// kPackDropsNonFinite<M>.
  template <bool kMaskNonFinite>
  static Panel<T> values(const StridedRows& x, int64_t b, int64_t g,
                         Interval keys, int64_t width, T* panel) {
    return Panels::keys(x, b, g, keys, width, panel);
  }
};

/// Asks for the first keys and values of the next task and the first rows of
/// its output, so that they come from memory while another head is computed.
/// 512 heads of 64 rows: 15 % faster, 3 of them by the output. (Inlined by
/// force: g++ takes a function that only prefetches for one without effect, and
/// drops its calls.)
template <class S>
SIMD_INLINE void fetch_ahead(const ForwardArgs& f, const TaskGrid::Task& next) {
  using Type = typename S::Type;
  const AttentionArgs& a = f.attention;
  constexpr int64_t kLine = 64 / sizeof(Type);
  const auto fetch = [](const Type* row, int64_t width) {
    for (int64_t e = 0; e < width; e += kLine) {
      __builtin_prefetch(row + e, /*rw=*/0, /*locality=*/2);
    }
  };
  for (int64_t j = 0; j < min(key_length(a, next.b), kKeyBlock); ++j) {
    fetch(row_of<Type>(a.key, next.b, next.head, j), a.D);
    fetch(row_of<Type>(a.value, next.b, next.head, j), a.Dv);
  }
  const int64_t group = group_of(a), first = next.first / group;
  const int64_t rows = min(next.count / group, kKeyBlock);
  const int64_t last = min(query_length(a, next.b), first + rows);
  for (int64_t i = first; i < last; ++i) {
    const Type* row = row_of<Type>(f.out, next.b, next.head * group, i);
    for (int64_t e = 0; e < a.Dv; e += kLine) {
      __builtin_prefetch(row + e, /*rw=*/1, /*locality=*/2);
    }
  }
}

}  // namespace
}  // namespace multihead::kernels
