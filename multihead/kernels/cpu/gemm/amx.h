// SPDX-License-Identifier: MIT
//
// The GEMMs of micro_kernel.h and outer_product.h on the tile unit of Intel's
// AMX: one TDPBF16PS adds 16 rows × 16 lanes × 16 pairs of bfloat16 to float32
// sums. Operands lie as VDPBF16PS has them (bf16_dot.h): a row of Q or P in
// pairs is a row of the second operand, a row of keys one of the first. Only
// values are packed transposed, since their columns are the first operand's
// rows.
//
// TDPBF16PS sums 16 pairs before it adds them to what was there, so which 32
// keys it takes together is part of the result: groups start at multiples of 32
// keys (kKeyGroup), and a hidden key of a group counts as 0.
//
// The unit is so fast that softmax, scaling and packing take half of the time
// at D = 64 (Granite Rapids), in the backward pass too: of 11.1 ms for 8 heads
// of L = 1024, the five GEMMs take 3.5, P and dS 1.6, rounding and copying them
// 1.7.
#pragma once

#include "multihead/kernels/cpu/gemm/bf16_dot.h"
#include "multihead/kernels/cpu/gemm/gemm.h"

namespace multihead::kernels {
namespace {

/// The tile registers, configured while this lives: 16 rows of 64 bytes.
class TileRegisters {
 public:
  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const config;
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

struct BFloat16Tiles : BFloat16Multiplier {
  static constexpr bool kHasRowProducts = false;
  static constexpr int64_t kKeyGroup = 32;
  static constexpr int64_t kRows = 16;  ///< of a tile register
  static constexpr int64_t depth(int64_t numbers) {
    return round_up((numbers + 1) / 2, kRows);
  }
  static constexpr int64_t columns(int64_t width) {
    return round_up(width, kRows);
  }
};

template <>
struct Gemm<BFloat16Tiles> {
  using F = Float32;
  using Vector = F::Vector;
  using Registers = TileRegisters;
  static constexpr int64_t kRows = BFloat16Tiles::kRows;

  /// scores = keys × queries, then the scale and the maximum. `keys` is a
  /// multiple of 16, t.depth too.
  template <bool kMaximum>
  [[gnu::noinline]] static void qk(QkTile<float> t, int64_t keys, int vectors,
                                   int64_t /*rows*/) {
    for (int64_t j = 0; j < keys; j += kRows) {
      qk_micro_kernel(t, vectors);
      if (!kMaximum && t.scale == 1) {
        // They are scaled already.
      } else if (vectors == 3) {
        scale_scores<3, kMaximum>(t);
      } else if (vectors == 2) {
        scale_scores<2, kMaximum>(t);
      } else {
        scale_scores<1, kMaximum>(t);
      }
      t.key += kRows * t.key_stride;
      t.scores += kRows * kTileLanes<F>;
    }
  }

  /// context = factor·context + values × weights; t.depth a multiple of 16
  /// pairs. Values lie in tiles of 16 columns by 16 pairs of keys, those of the
  /// same columns one after the other, columns at multiples of t.value_stride.
  template <bool kMaskNonFinite>
  [[gnu::noinline]] static void pv(const PvTile<float>& t, int64_t width,
                                   int vectors, int64_t /*rows*/) {
    scale_context(t, width, vectors);
    for (int64_t e = 0; e < width; e += kRows) {
      pv_micro_kernel(t, e, vectors);
    }
  }

  /// sums += weights × rows, 32 keys by 32 columns at once: each tile loaded
  /// serves two products. `keys` is a multiple of 32, t.count of 16 pairs.
  template <bool kMaskNonFinite>
  [[gnu::noinline]] static void outer(const OuterTile<float>& t, int64_t keys) {
    for (int64_t j = 0; j < keys; j += 2 * kRows) {
      for (int64_t e = 0; e < t.width; e += 2 * kRows) {
        e + kRows < t.width ? outer_tile<2>(t, j, e) : outer_tile<1>(t, j, e);
      }
    }
  }

 private:
  static constexpr int64_t kLaneBytes = kTileLanes<F> * sizeof(float);

  // Tiles 0 to 2 sum, 3 holds rows of keys or columns of values, 4 to 6 lanes.
  SIMD_INLINE void qk_micro_kernel(const QkTile<float>& t, int vectors) {
    __asm__ volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int64_t x = 0; x < t.depth; x += kRows) {
      _tile_loadd(3, t.key + x, t.key_stride * sizeof(float));
      multiply_add(t.query + x * kTileLanes<F>, vectors);
    }
    store(t.scores, vectors);
  }

  template <int kVectors, bool kMaximum>
  SIMD_INLINE void scale_scores(const QkTile<float>& t) {
    const auto scale = F::broadcast(t.scale);
    Vector m[kVectors];
    for (int c = 0; c < kVectors; ++c) {
      m[c] = F::load(t.maximum + c * F::kLanes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
      for (int c = 0; c < kVectors; ++c) {
        float* score = t.scores + r * kTileLanes<F> + c * F::kLanes;
        const auto s = F::mul(F::load(score), scale);
        if (kMaximum) m[c] = F::max(s, m[c]);
        F::store(score, s);
      }
    }
    for (int c = 0; kMaximum && c < kVectors; ++c) {
      F::store(t.maximum + c * F::kLanes, m[c]);
    }
  }

  SIMD_INLINE void pv_micro_kernel(const PvTile<float>& t, int64_t e,
                                   int vectors) {
    float* context = t.context + e * kTileLanes<F>;
    __asm__ volatile("" ::: "memory");
    _tile_loadd(0, context, kLaneBytes);
    if (vectors > 1) _tile_loadd(1, context + F::kLanes, kLaneBytes);
    if (vectors > 2) _tile_loadd(2, context + 2 * F::kLanes, kLaneBytes);
    for (int64_t x = 0; x < t.depth; x += kRows) {
      _tile_loadd(3, t.value + e * t.value_stride + x * kRows, 64);
      multiply_add(t.weights + x * kTileLanes<F>, vectors);
    }
    store(context, vectors);
  }

  // Tiles 0 to 3 sum, 4 and 5 hold weights of keys, 6 and 7 rows.
  template <int kColumns>
  SIMD_INLINE void outer_tile(const OuterTile<float>& t, int64_t key,
                              int64_t e) {
    constexpr int64_t kStride = kOuterStride<BFloat16Tiles>;
    const int64_t row_bytes = t.width * static_cast<int64_t>(sizeof(float));
    float *sums = t.sums + key * t.width + e, *next = sums + kRows * t.width;
    __asm__ volatile("" ::: "memory");
    _tile_loadd(0, sums, row_bytes);
    _tile_loadd(1, next, row_bytes);
    if (kColumns > 1) _tile_loadd(2, sums + kRows, row_bytes);
    if (kColumns > 1) _tile_loadd(3, next + kRows, row_bytes);
    const float *weights = t.weights + key * kStride, *rows = t.rows + e;
    for (int64_t x = 0; x < t.count; x += kRows, weights += kRows) {
      _tile_loadd(4, weights, kStride * sizeof(float));
      _tile_loadd(6, rows, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, weights + kRows * kStride, kStride * sizeof(float));
      _tile_dpbf16ps(1, 5, 6);
      if (kColumns > 1) {
        _tile_loadd(7, rows + kRows, row_bytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      rows += kRows * t.width;
    }
    _tile_stored(0, sums, row_bytes);
    _tile_stored(1, next, row_bytes);
    if (kColumns > 1) _tile_stored(2, sums + kRows, row_bytes);
    if (kColumns > 1) _tile_stored(3, next + kRows, row_bytes);
  }

  SIMD_INLINE void multiply_add(const float* lanes, int vectors) {
    _tile_loadd(4, lanes, kLaneBytes);
    _tile_dpbf16ps(0, 3, 4);
    if (vectors > 1) {
      _tile_loadd(5, lanes + F::kLanes, kLaneBytes);
      _tile_dpbf16ps(1, 3, 5);
    }
    if (vectors > 2) {
      _tile_loadd(6, lanes + 2 * F::kLanes, kLaneBytes);
      _tile_dpbf16ps(2, 3, 6);
    }
  }

  SIMD_INLINE void store(float* to, int vectors) {
    _tile_stored(0, to, kLaneBytes);
    if (vectors > 1) _tile_stored(1, to + F::kLanes, kLaneBytes);
    if (vectors > 2) _tile_stored(2, to + 2 * F::kLanes, kLaneBytes);
  }

  // Most blocks raise no maximum: then there is nothing to do.
  SIMD_INLINE void scale_context(const PvTile<float>& t, int64_t width,
                                 int vectors) {
    for (int c = 0; c < vectors; ++c) {
      const auto factor = F::load(t.factor + c * F::kLanes);
      const auto one = F::broadcast(1);
      if (!F::any(F::less(factor, one)) && !F::any(F::less(one, factor))) {
        continue;
      }
      for (int64_t e = 0; e < width; ++e) {
        float* context = t.context + e * kTileLanes<F> + c * F::kLanes;
        F::store(context, F::mul(F::load(context), factor));
      }
    }
  }
};

template <class S>
struct Panels<BFloat16Tiles, S> {
  using M = BFloat16Tiles;
  static constexpr bool kInPlace = false, kKeysAreValues = false;

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

}  // namespace
}  // namespace multihead::kernels
