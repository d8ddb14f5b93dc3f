// SPDX-License-Identifier: MIT
//
// accumulate.h on pairs of bfloat16. P and dS are rounded once, as operands;
// all sums are float32.
//
// A pair lies along the summed dimension, and that is not the same for all:
//   dQ += dS·K                  keys: dS of two keys in pairs, as forward has P
//   dV += Pᵀ·dO, dK += dSᵀ·Q    rows: P and dS as they lie in the lanes, dO and
//                               Q with two rows in pairs
//
//                 row of a group of 4 tiles →
//              ┌ tile 0 ┬ tile 1 ┬ tile 2 ┬ tile 3 ┐   A strip: P or dS of all
//      key of  │        │        │        │        │   keys of a split (256)
//      and split ↓ │ P, rounded, two rows per lane     │   all rows of a group
//      (192),
//              └────────┴────────┴────────┴────────┘   −0 where not computed
//
// P and dS are copied into strips as they are rounded. When a group is full,
// its strips are multiplied: so the sums dK and dV of a key come from the L2
// cache, and go back, once for four tiles. dS in pairs of keys is kept for one
// tile only, and multiplied kKeyBlock keys at a time.
//
// Bytes, D = 128: strips 96 KiB each for P and dS, Q and dO 48 KiB each, dS in
// pairs of keys 24 KiB. Numbers of K, Q and dO that are not finite are dropped
// and added back (nonfinite.h).
#pragma once

#include <string.h>

#include "multihead/kernels/cpu/backward/accumulate.h"
#include "multihead/kernels/cpu/gemm/nonfinite.h"

namespace multihead::kernels {
namespace {

template <class M, class S>
class GradientAccumulator<M, S, true> {
 public:
  using F = Float32;
  using T = float;
  using Tile = QueryTile<F>;
  static constexpr int64_t kLanes = kTileLanes<F>;
  /// S and dP of a step, 12 KiB, stay in the L1 cache while they are rounded.
  static constexpr int64_t kStep = 32, kSumKeys = kStep;

  T* dquery;  ///< (columns_, lanes), of a tile and a split

  GradientAccumulator(const BackwardArgs& b, Arena& arena)
      : b_(b),
        needs_dscores_(needs_dscores(b)),
        columns_(M::columns(b.attention.D) + 1),
        width_(padded<F>(b.attention.D)),
        value_width_(padded<F>(b.attention.Dv)) {
    dquery = arena.take<T>(columns_ * kLanes);
    query_rows_ = arena.take<T>(kStride * width_);
    dout_rows_ = arena.take<T>(kStride * value_width_);
    one_ = arena.take<T>(kLanes);
    weights_ = arena.take<T>(kGradientSplit * kStride);
    dscores_ = arena.take<T>(kGradientSplit * kStride);
    dscore_pairs_ = arena.take<T>(kGradientSplit / 2 * kLanes);
  }

  bool begin_tile(const Tile& tile, int n) {
    const AttentionArgs& a = b_.attention;
    memset(dquery, 0, columns_ * kLanes * sizeof(T));
    for (int64_t r = 0; r < kLanes; ++r) one_[r] = 1;
    start(n);
    const bool query =
        pair_rows_of(tile, a.query, a.D, query_rows_ + n_ * kPairs * width_);
    const bool dout = pair_rows_of(tile, b_.dout, a.Dv,
                                   dout_rows_ + n_ * kPairs * value_width_);
    return query && dout;
  }

  void skip_tile(const KeySplit<T>& split, int n) {
    start(n);
    memset(query_rows_ + n * kPairs * width_, 0, kPairs * width_ * sizeof(T));
    memset(dout_rows_ + n * kPairs * value_width_, 0,
           kPairs * value_width_ * sizeof(T));
    hide(steps_of(split));
  }

  template <bool kMaskNonFinite>
  void add(const KeySplit<T>& split, const Tile& tile,
           const ScoreGradient<M, S>& scores, const ScoreBlock& block,
           int64_t at) {
    const Segment* segments = block.segments;
    const bool whole = block.count == 1 && segments[0].first == 0 &&
                       segments[0].last == kMaxVectors &&
                       segments[0].keys.end - segments[0].keys.begin == kStep;
    if (!whole) hide({at - split.first(), at - split.first() + kStep});
    Interval& rows = reached_[(at - split.first()) / kStep];
    for (int i = 0; i < block.count; ++i) {
      const Segment& segment = segments[i];
      rows = {min(rows.begin, n_ * kLanes + segment.first * F::kLanes),
              max(rows.end, n_ * kLanes + segment.last * F::kLanes)};
      round(tile, scores, block, segment, segment.keys.begin - split.first());
      if constexpr (kMaskNonFinite) {
        add_nonfinite_of(split, tile, scores, block, segment);
      }
    }
  }

  /// dQ of a tile, over all keys that it sees; the pairs of a block stay in the
  /// L1 cache while all columns are multiplied.
  void end_tile(const KeySplit<T>& split, const Tile& tile) {
    if (!b_.dquery.data) return;
    const Interval seen = overlap(split.keys, tile.keys);
    const Interval keys{round_down(seen.begin, M::kKeyGroup),
                        round_up(seen.end, M::kKeyGroup)};
    for (int64_t j = keys.begin, next; j < keys.end; j = next) {
      next = min(keys.end, round_down(j, kKeyBlock) + kKeyBlock);
      Gemm<M>::template pv<false>(
          {.value = split.key_columns.row(M::depth(j)),
           .value_stride = split.key_columns.stride,
           .weights = dscore_pairs_ + (j - split.first()) / 2 * kLanes,
           .depth = M::depth(next - j),
           .context = dquery,
           .factor = one_},
          b_.attention.D, tile.vectors, tile.count);
    }
  }

  /// dV and dK of the group; keys that the same rows reach are multiplied at
  /// once.
  void end_group(const KeySplit<T>& split) {
    const Interval keys = steps_of(split);
    for (int64_t j = keys.begin, next; j < keys.end; j = next) {
      const Interval rows = reached_[j / kStep];
      next = j + kStep;
      while (next < keys.end && reached_[next / kStep].begin == rows.begin &&
             reached_[next / kStep].end == rows.end) {
        next += kStep;
      }
      if (rows.empty()) continue;
      const int64_t from = round_down(rows.begin, kStep) / 2;
      const int64_t count = round_up(rows.end, kStep) / 2 - from;
      const int64_t at = j * kStride + from;
      if (b_.dvalue.data) {
        Gemm<M>::template outer<false>(
            {weights_ + at, dout_rows_ + from * value_width_, count,
             value_width_, split.dvalue + j * value_width_},
            next - j);
      }
      if (b_.dkey.data) {
        Gemm<M>::template outer<false>(
            {dscores_ + at, query_rows_ + from * width_, count, width_,
             split.dkey + j * width_},
            next - j);
      }
    }
  }

 private:
  static constexpr int64_t kStride = kOuterStride<M>;
  static constexpr int64_t kPairs = kLanes / 2;
  static constexpr int64_t kStrip = kStride * sizeof(T) / sizeof(__m256i);
  static_assert(kStride * 2 % kStep == 0 && kStep % M::kKeyGroup == 0);

  /// The keys of a split, counted from its first, in whole steps.
  static Interval steps_of(const KeySplit<T>& split) {
    return {round_down(split.keys.begin - split.first(), kStep),
            round_up(split.keys.end - split.first(), kStep)};
  }

  void start(int n) {
    n_ = n;
    if (n > 0) return;
    for (Interval& rows : reached_) rows = {2 * kStride, 0};
  }

  /// The tile's rows in pairs, padded with zeros; whether they are finite.
  static bool pair_rows_of(const Tile& tile, const StridedRows& x,
                           int64_t width, T* to) {
    bool finite = true;
    for (int64_t r = 0; r < kLanes; r += 2, to += padded<F>(width)) {
      const auto row = [&](int64_t r) {
        return r < tile.count ? row_of_tile<S>(tile, x, r) : nullptr;
      };
      F::store(to + padded<F>(width) - F::kLanes, F::broadcast(0));
      finite &= write_row_pairs<true>(row(r), row(r + 1), width, to);
    }
    return finite;
  }

  /// The place of key j (of the split) and vector c of the tile in a strip.
  __m256i* at(T* strip, int64_t j, int c) const {
    return reinterpret_cast<__m256i*>(strip + j * kStride + n_ * kPairs) + c;
  }
  static __m512i hidden() { return _mm512_set1_epi16(-0x8000); }

  /// Marks keys of the split, an even number, as hidden from the tile.
  void hide(Interval keys) {
    hide_strip(keys.end - keys.begin, at(weights_, keys.begin, 0));
    if (!needs_dscores_) return;
    hide_strip(keys.end - keys.begin, at(dscores_, keys.begin, 0));
    T *pairs = dscore_pairs_ + keys.begin / 2 * kLanes,
      *end = dscore_pairs_ + keys.end / 2 * kLanes;
    for (; pairs < end; pairs += F::kLanes) {
      F::store(pairs, _mm512_castsi512_ps(hidden()));
    }
  }
  static void hide_strip(int64_t keys, __m256i* strip) {
    const __m256i none = _mm512_castsi512_si256(hidden());
    for (; keys > 0; --keys, strip += kStrip) {
      for (int c = 0; c < kMaxVectors; ++c) _mm256_store_si256(strip + c, none);
    }
  }

  /// P and dS of a segment into the strips, from key `row` on.
  void round(const Tile& tile, const ScoreGradient<M, S>& scores,
             const ScoreBlock& block, const Segment& segment, int64_t row) {
    const int64_t keys = segment.keys.end - segment.keys.begin;
    for_each_vector<F>(block, segment, [&](const VectorSpan& span) {
      const int64_t lanes = tile.count - span.c * F::kLanes;
      round_vector<false>(scores.dropped + span.begin, keys, lanes,
                          at(weights_, row, span.c), nullptr);
      if (!needs_dscores_) return;
      round_vector<true>(scores.dscores + span.begin, keys, lanes,
                         at(dscores_, row, span.c),
                         dscore_pairs_ + row / 2 * kLanes + span.c * F::kLanes);
    });
  }

  /// One vector of rows; kKeyPairs: in pairs of keys too. Lanes without a row,
  /// from `lanes` on, are hidden.
  template <bool kKeyPairs>
  static void round_vector(const T* numbers, int64_t keys, int64_t lanes,
                           __m256i* strip, T* pairs) {
    const uint32_t used = lanes >= F::kLanes ? 0xFFFF : (1u << lanes) - 1;
    const __mmask32 mask = used | used << 16;
#pragma GCC unroll 4
    for (int64_t j = 0; j < keys; j += 2) {
      const __m512i halves = _mm512_mask_mov_epi16(
          hidden(), mask,
          BFloat16Pairs::round(F::load(numbers), F::load(numbers + kLanes)));
      _mm256_store_si256(strip, _mm512_castsi512_si256(halves));
      _mm256_store_si256(strip + kStrip, _mm512_extracti64x4_epi64(halves, 1));
      if constexpr (kKeyPairs) {
        F::store(pairs, BFloat16Pairs::interleave(halves));
        pairs += kLanes;
      }
      numbers += 2 * kLanes;
      strip += 2 * kStrip;
    }
  }

  void add_nonfinite_of(const KeySplit<T>& split, const Tile& tile,
                        const ScoreGradient<M, S>& scores,
                        const ScoreBlock& block, const Segment& segment) {
    const AttentionArgs& a = b_.attention;
    const Interval keys = overlap(segment.keys, overlap(split.keys, tile.keys));
    const int64_t from = segment.first * F::kLanes;
    for (int64_t j = keys.begin; b_.dquery.data && j < keys.end; ++j) {
      add_nonfinite<S>(row_of<typename S::Type>(a.key, split.b, split.g, j),
                       a.D, scores.dscores + (j - block.anchor) * kLanes + from,
                       segment.last - segment.first, dquery + from);
    }
    const int64_t count = keys.end - keys.begin;
    const int64_t first = (keys.begin - block.anchor) * kLanes;
    const int64_t row = keys.begin - split.first();
    const int64_t rows = min(tile.count, segment.last * F::kLanes);
    for (int64_t r = from; r < rows; ++r) {
      if (b_.dvalue.data) {
        outer_nonfinite<S>(row_of_tile<S>(tile, b_.dout, r), a.Dv,
                           scores.dropped + first + r, count, value_width_,
                           split.dvalue + row * value_width_);
      }
      if (b_.dkey.data) {
        outer_nonfinite<S>(row_of_tile<S>(tile, a.query, r), a.D,
                           scores.dscores + first + r, count, width_,
                           split.dkey + row * width_);
      }
    }
  }

  const BackwardArgs& b_;
  bool needs_dscores_;
  int64_t columns_, width_, value_width_;  ///< widths in whole vectors
  T* query_rows_;                          ///< (kStride, width_) pairs of rows
  T* dout_rows_;     ///< (kStride, value_width_) pairs of rows
  T* one_;           ///< (lanes), 1
  T* weights_;       ///< strip (kGradientSplit, kStride) of P
  T* dscores_;       ///< strip of dS
  T* dscore_pairs_;  ///< (kGradientSplit / 2, lanes) pairs of keys
  int n_ = 0;        ///< of the tile
  /// Rows of the group that add to each kStep keys.
  Interval reached_[kGradientSplit / kStep];
};

}  // namespace
}  // namespace multihead::kernels
