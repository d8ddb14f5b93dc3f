// SPDX-License-Identifier: MIT
//
// GEMMs on pairs of bfloat16 by VDPBF16PS: a lane holds two numbers that follow
// one another along the summed dimension, and each instruction adds two
// products to a float32 sum. Sums, maxima and softmax stay in float32.
//   qk:  pairs along D. A row of Q or K in memory is already one of pairs.
//   pv:  pairs of keys. P of two keys is rounded and interleaved
//        (pack_weights), V of two keys likewise (Panels).
#pragma once

#include "multihead/kernels/cpu/gemm/pack.h"

namespace multihead::kernels {
namespace {

/// Rows of bfloat16 read in pairs: lanes that, taken as float32, mean nothing.
struct StoredPairs {
  using Type = uint16_t;
  using F = Float32;
  using Scalar = float;
  static constexpr int kPair = 2;
  SIMD_INLINE F::Vector load(const Type* p) {
    return _mm512_castsi512_ps(_mm512_loadu_si512(p));
  }
};

/// What BFloat16Dot and BFloat16Tiles (amx.h) have in common; micro_kernel.h
/// explains the members.
struct BFloat16Multiplier {
  using F = Float32;
  using Scalar = float;
  using Vector = F::Vector;
  static constexpr int kPair = 2;
  static constexpr bool kScalesScores = true;
  static constexpr bool kPackDropsNonFinite = true;
  static constexpr bool kPacksWeights = true;
  static constexpr int kOuterTiles = 4;
  template <class S>
  using QueryStorage = StoredPairs;

  /// Two keys' weights, rounded to nearest even, as pairs.
  SIMD_INLINE Vector pair(Vector even, Vector odd) {
    return BFloat16Pairs::interleave(BFloat16Pairs::round(even, odd));
  }
  /// Keys 2t and 2t + 1 become row t of `packed` (keys / 2, lanes).
  static const float* pack_weights(const float* weights, int64_t keys,
                                   int vectors, float* packed) {
    constexpr int64_t kLanes = kTileLanes<F>;
    for (int64_t j = 0; j < keys; j += 2) {
      for (int c = 0; c < vectors; ++c) {
        const float* p = weights + j * kLanes + c * F::kLanes;
        F::store(packed + j / 2 * kLanes + c * F::kLanes,
                 pair(F::load(p), F::load(p + kLanes)));
      }
    }
    return packed;
  }
};

struct BFloat16Dot : BFloat16Multiplier {
  static constexpr bool kHasRowProducts = true;
  static constexpr int64_t kKeyGroup = 2;
  static constexpr int64_t depth(int64_t numbers) { return (numbers + 1) / 2; }
  static constexpr int64_t columns(int64_t width) { return width; }

  SIMD_INLINE Vector multiply_add(Vector a, Vector b, Vector c) {
    return BFloat16Pairs::dot(a, b, c);
  }
};

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
  static constexpr bool kInPlace = false, kKeysAreValues = false;

  static constexpr int64_t key_size(int64_t keys, int64_t width) {
    return (keys + 2) * ((width + 1) / 2);
  }
  /// A vector to spare: each row is written in whole ones, over the next.
  static constexpr int64_t value_size(int64_t keys, int64_t width) {
    return (keys / 2 + 1) * width + Float32::kLanes;
  }

  /// In place where rows are whole pairs, one after the other, and `keys`
  /// whole groups.
  static Panel<float> keys(const StridedRows& x, int64_t b, int64_t g,
                           Interval keys, int64_t width, float* panel) {
    constexpr int64_t kGroup = BFloat16Dot::kKeyGroup;
    const auto* rows = row_of<uint16_t>(x, b, g, 0);
    if (!x.block_table && x.row == width && width % 2 == 0 &&
        reinterpret_cast<uintptr_t>(rows) % alignof(float) == 0 &&
        keys.begin % kGroup == 0 && keys.end % kGroup == 0) {
      return {reinterpret_cast<const float*>(rows), width / 2, width / 2, 0};
    }
    return pack_key_pairs(x, b, g, keys, kGroup, width, (width + 1) / 2, panel);
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

}  // namespace
}  // namespace multihead::kernels
