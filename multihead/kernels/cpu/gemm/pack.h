// SPDX-License-Identifier: MIT
//
// Keys and values as the products read them: where they lie, or copied into
// panels, one split of keys at a time.
#pragma once

#include <string.h>

#include "multihead/kernels/cpu/gemm/gemm.h"
#include "multihead/kernels/cpu/gemm/load_store.h"

namespace multihead::kernels {
namespace {

/// Rows from `anchor` on, `step` elements apart: a row of keys holds its
/// elements one after the other, a row of values what the product wants there.
/// `stride`: the row stride as the product takes it.
template <typename T>
struct Panel {
  const T* data;
  int64_t step, stride, anchor;
  const T* row(int64_t r) const { return data + (r - anchor) * step; }
};

/// Rows `keys` of (b, g), widened, one after the other.
template <class S>
inline Panel<typename S::F::Scalar> pack_rows(const StridedRows& x, int64_t b,
                                              int64_t g, Interval keys,
                                              int64_t width,
                                              typename S::F::Scalar* panel) {
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    widen<S>(row_of<typename S::Type>(x, b, g, j), width,
             panel + (j - keys.begin) * width);
  }
  return {panel, width, width, keys.begin};
}

/// The panels of product M on tensors stored as S, and how much they hold.
template <class M, class S>
struct Panels {
  using T = typename M::F::Scalar;
  /// Whether a tensor can be read where it lies.
  static constexpr bool kInPlace = sizeof(typename S::Type) == sizeof(T);

  static constexpr int64_t size(int64_t keys, int64_t width) {
    return keys * width;
  }
  static constexpr int64_t key_size(int64_t keys, int64_t width) {
    return size(keys, width);
  }
  static constexpr int64_t value_size(int64_t keys, int64_t width) {
    return size(keys, width);
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

#ifdef __AVX512BF16__
/// Rows of bfloat16 keys as pairs, `pairs` to a row, zeros after the last
/// number. Starts and ends at whole groups of keys, so that what is computed of
/// a group does not depend on where a panel begins; keys that are not among
/// `keys` count as 0 and are not read.
inline Panel<float> pack_key_pairs(const StridedRows& x, int64_t b, int64_t g,
                                   Interval keys, int64_t group, int64_t width,
                                   int64_t pairs, float* panel) {
  const int64_t anchor = round_down(keys.begin, group);
  const int64_t end = round_up(keys.end, group);
  const auto bytes = static_cast<size_t>(width) * sizeof(uint16_t);
  const size_t row_bytes = static_cast<size_t>(pairs) * sizeof *panel;
  for (int64_t j = anchor; j < end; ++j) {
    char* row = reinterpret_cast<char*>(panel + (j - anchor) * pairs);
    const bool exists = keys.begin <= j && j < keys.end;
    if (exists) memcpy(row, row_of<uint16_t>(x, b, g, j), bytes);
    const size_t filled = exists ? bytes : 0;
    memset(row + filled, 0, row_bytes - filled);
  }
  return {panel, pairs, pairs, anchor};
}

/// `count` numbers, at most 16, of two rows in pairs, zeros after them; a null
/// row is 0.
inline Float32::Vector pair_rows(const uint16_t* even, const uint16_t* odd,
                                 int64_t count) {
  const auto half = [&](const uint16_t* from) {
    uint16_t part[16] = {};
    if (from && count >= 16) return BFloat16Pairs::low_halves(from);
    if (from) memcpy(part, from, count * sizeof *part);
    return BFloat16Pairs::low_halves(part);
  };
  const __m512i low = half(even);
  return BFloat16Pairs::join(low, half(odd));
}

/// Two rows of `width` numbers as one row of pairs, in whole vectors. kFinite:
/// what is not finite becomes 0; false if there is any.
template <bool kFinite>
inline bool write_row_pairs(const uint16_t* even, const uint16_t* odd,
                            int64_t width, float* to) {
  bool finite = true;
  for (int64_t e = 0; e < width; e += Float32::kLanes) {
    auto pairs = pair_rows(even ? even + e : even, odd ? odd + e : odd,
                           min(width - e, Float32::kLanes));
    if (kFinite) finite &= BFloat16Pairs::take_finite(pairs);
    Float32::store(to + e, pairs);
  }
  return finite;
}

/// Row j of x; null if it is not among `rows`.
inline const uint16_t* row_among(const StridedRows& x, int64_t b, int64_t g,
                                 Interval rows, int64_t j) {
  return rows.begin <= j && j < rows.end ? row_of<uint16_t>(x, b, g, j)
                                         : nullptr;
}

template <class S>
struct Panels<BFloat16Dot, S> {
  static constexpr bool kInPlace = false;

  static constexpr int64_t key_size(int64_t keys, int64_t width) {
    return (keys + 2) * ((width + 1) / 2);
  }
  /// A vector to spare: each row is written in whole ones, over the next.
  static constexpr int64_t value_size(int64_t keys, int64_t width) {
    return (keys / 2 + 1) * width + Float32::kLanes;
  }

  static Panel<float> keys(const StridedRows& x, int64_t b, int64_t g,
                           Interval keys, int64_t width, float* panel) {
    return pack_key_pairs(x, b, g, keys, BFloat16Dot::kKeyGroup, width,
                          (width + 1) / 2, panel);
  }

  /// Values of keys 2t and 2t + 1 in pairs: row t of the panel.
  template <bool kMaskNonFinite>
  static Panel<float> values(const StridedRows& x, int64_t b, int64_t g,
                             Interval keys, int64_t width, float* panel) {
    const int64_t anchor = keys.begin / 2;
    for (int64_t t = anchor; 2 * t < keys.end; ++t) {
      write_row_pairs<kMaskNonFinite>(row_among(x, b, g, keys, 2 * t),
                                      row_among(x, b, g, keys, 2 * t + 1),
                                      width, panel + (t - anchor) * width);
    }
    return {panel, width, width, anchor};
  }
};
#endif

#ifdef __AMX_BF16__
template <class S>
struct Panels<BFloat16Tiles, S> {
  using M = BFloat16Tiles;
  static constexpr bool kInPlace = false;

  /// Elements of one column of values: its pairs of keys, with a group to
  /// spare.
  static constexpr int64_t kValueStride = kKeySplit / 2 + M::kKeyGroup / 2;

  static constexpr int64_t key_size(int64_t keys, int64_t width) {
    return (keys + 2 * M::kKeyGroup) * M::depth(width);
  }
  static constexpr int64_t value_size(int64_t, int64_t width) {
    return M::columns(width) * kValueStride;
  }

  static Panel<float> keys(const StridedRows& x, int64_t b, int64_t g,
                           Interval keys, int64_t width, float* panel) {
    return pack_key_pairs(x, b, g, keys, M::kKeyGroup, width, M::depth(width),
                          panel);
  }

  /// Transposed, in tiles of 16 columns by 16 pairs of keys, 1 KiB each, those
  /// of the same columns one after the other: what the tile unit loads is read
  /// line by line.
  template <bool kMaskNonFinite>
  static Panel<float> values(const StridedRows& x, int64_t b, int64_t g,
                             Interval keys, int64_t width, float* panel) {
    using F = Float32;
    const int64_t anchor = round_down(keys.begin, M::kKeyGroup);
    const int64_t end = round_up(keys.end, M::kKeyGroup);
    for (int64_t j = anchor; j < end; j += 2 * F::kLanes) {
      for (int64_t e = 0; e < width; e += F::kLanes) {
        F::Vector square[F::kLanes];
        for (int i = 0; i < F::kLanes; ++i) {
          const auto row = [&](int64_t key) {
            const uint16_t* from = row_among(x, b, g, keys, key);
            return from ? from + e : from;
          };
          square[i] = pair_rows(row(j + 2 * i), row(j + 2 * i + 1),
                                min(width - e, F::kLanes));
          if (kMaskNonFinite) BFloat16Pairs::take_finite(square[i]);
        }
        F::transpose(square);
        float* tile = panel + e * kValueStride + (j - anchor) / 2 * F::kLanes;
        for (int i = 0; i < F::kLanes; ++i) {
          F::store(tile + i * F::kLanes, square[i]);
        }
      }
    }
    return {panel, F::kLanes, kValueStride, anchor / 2};
  }
};
#endif

/// Asks for the first keys and values of (b, g), so that they come from memory
/// while another head is computed. 512 heads of 64 rows: 15 % faster.
/// (Inlined by force: g++ takes a function that only prefetches for one without
/// effect, and drops its calls.)
template <class S>
MULTIHEAD_INLINE void fetch_ahead(const AttentionArgs& a, int64_t b,
                                  int64_t g) {
  constexpr int64_t kLine = 64 / sizeof(typename S::Type);
  const auto fetch = [&](const StridedRows& x, int64_t row, int64_t width) {
    const auto* from = row_of<typename S::Type>(x, b, g, row);
    for (int64_t e = 0; e < width; e += kLine) {
      __builtin_prefetch(from + e, /*rw=*/0, /*locality=*/2);
    }
  };
  for (int64_t j = 0; j < min(a.Lk, kKeyBlock); ++j) {
    fetch(a.key, j, a.D);
    fetch(a.value, j, a.Dv);
  }
}

}  // namespace
}  // namespace multihead::kernels
