// SPDX-License-Identifier: MIT
//
// The two products of tile.h and that of tile_outer.h on the tile unit of
// Intel's AMX: bfloat16 pairs, float32 sums, 16 rows by 16 lanes by 32 numbers
// at once. The layouts are the same: a row of queries or weights in pairs is a
// row of the second operand as it stands, a row of keys one of the first; only
// values are turned (panel.h), since their columns are the first operand's
// rows.
//
// TDPBF16PS adds 16 pairs up before it adds to what was there, so which 32 keys
// it takes together is part of the result: groups start at multiples of 32 keys
// (kKeyGroup), and what a tile does not see of a group counts as 0.
//
// The unit is fast enough that softmax, scaling and packing take half of the
// time at D = 64 (Granite Rapids), in the backward pass too: of 11.1 ms for 8
// heads of L = 1024, the five products take 3.5, P and dS 1.6, rounding and
// copying them 1.7.
#pragma once

#include "multihead/kernels/cpu/gemm/outer_product.h"

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
  static constexpr int64_t kKeyGroup = 32;
  static constexpr int64_t kRows = 16;
  static constexpr int64_t depth(int64_t width) {
    return round_up((width + 1) / 2, kRows);
  }
  static constexpr int64_t columns(int64_t width) {
    return round_up(width, kRows);
  }

  /// scores = keys × queries, then the scale and the maximum. `keys` is a
  /// multiple of 16, t.depth too.
  template <bool kMaximum>
  [[gnu::noinline]] static void qk(QkTile<float> t, int64_t keys, int vectors) {
    for (int64_t j = 0; j < keys; j += kRows) {
      qk_micro_kernel(t, vectors);
      if (!kMaximum && t.scale == 1) {
        // They are what they should be.
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
  [[gnu::noinline]] static void pv(const PvTile<float>& t, int64_t width,
                                   int vectors) {
    scale_context(t, width, vectors);
    for (int64_t e = 0; e < width; e += kRows) {
      pv_micro_kernel(t, e, vectors);
    }
  }

  /// sums += weights × rows, 32 keys by 32 columns at once: each tile loaded
  /// serves two products. `keys` is a multiple of 32, t.count of 16 pairs.
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
  MULTIHEAD_INLINE void qk_micro_kernel(const QkTile<float>& t, int vectors) {
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
  MULTIHEAD_INLINE void scale_scores(const QkTile<float>& t) {
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

  MULTIHEAD_INLINE void pv_micro_kernel(const PvTile<float>& t, int64_t e,
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
  MULTIHEAD_INLINE void outer_tile(const OuterTile<float>& t, int64_t key,
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

  MULTIHEAD_INLINE void multiply_add(const float* lanes, int vectors) {
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

  MULTIHEAD_INLINE void store(float* to, int vectors) {
    _tile_stored(0, to, kLaneBytes);
    if (vectors > 1) _tile_stored(1, to + F::kLanes, kLaneBytes);
    if (vectors > 2) _tile_stored(2, to + 2 * F::kLanes, kLaneBytes);
  }

  // Most blocks raise no maximum: then there is nothing to do.
  MULTIHEAD_INLINE void scale_context(const PvTile<float>& t, int64_t width,
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

}  // namespace
}  // namespace multihead::kernels
