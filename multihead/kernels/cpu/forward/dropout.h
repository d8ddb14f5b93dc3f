// SPDX-License-Identifier: MIT
//
// Which weights dropout keeps: Philox4x32-10, one stream per lane.
#pragma once

#include "multihead/kernels/cpu/scores/scores.h"

namespace multihead::kernels {
namespace {

inline constexpr int64_t kKeysPerDraw = 8;

/// The 128 bits of each lane: four words, eight 16-bit numbers.
template <class F>
struct Draw {
  typename F::Integer words[4];
};

/// Counter (query, key / 8, b·H + h, offset), key (seed). The two 64-bit
/// numbers enter whole: the upper half of offset by way of the key.
template <class F>
SIMD_INLINE Draw<F> draw(const Dropout& dropout, typename F::Integer query,
                         typename F::Integer head, int64_t key) {
  auto key0 = static_cast<uint32_t>(dropout.seed);
  auto key1 = static_cast<uint32_t>(dropout.seed >> 32) ^
              static_cast<uint32_t>(dropout.offset >> 32);
  auto a = query, b = F::integer(static_cast<uint32_t>(key / kKeysPerDraw));
  auto c = head, d = F::integer(static_cast<uint32_t>(dropout.offset));
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    typename F::Integer high0, low0, high1, low1;
    F::multiply_wide(a, 0xD2511F53, high0, low0);
    F::multiply_wide(c, 0xCD9E8D57, high1, low1);
    a = F::bit_xor(F::bit_xor(high1, b), F::integer(key0));
    b = low1;
    c = F::bit_xor(F::bit_xor(high0, d), F::integer(key1));
    d = low0;
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return {{a, b, c, d}};
}

/// The weight below which a 16-bit number means: dropped.
inline uint32_t dropout_threshold(const Dropout& dropout) {
  return static_cast<uint32_t>(dropout.probability * 65536 + 0.5);
}

/// Lanes that keep the weight of key `number` (0 … 7) of a draw.
template <class F>
SIMD_INLINE typename F::Mask kept(const Draw<F>& draw, int number,
                                  uint32_t threshold) {
  const auto word = draw.words[number / 2];
  return number % 2 == 0 ? F::low_half_not_less(word, threshold)
                         : F::high_half_not_less(word, threshold);
}

/// Sets the dropped weights of one vector of rows to 0; those of the first key
/// lie at `weights`.
template <class F>
inline void drop(const AttentionArgs& a, const QueryTile<F>& tile,
                 const VectorSpan& span, ScalarOf<F>* weights) {
  const Dropout& dropout = a.dropout;
  const int64_t from = span.c * F::kLanes;
  const int64_t heads_in_all = dropout.heads > 0 ? dropout.heads : a.H;
  int64_t heads[F::kLanes], queries[F::kLanes];
  for (int i = 0; i < F::kLanes; ++i) {
    heads[i] = (tile.b + dropout.first_batch) * heads_in_all +
               tile.head[from + i] + dropout.first_head;
    queries[i] = tile.query[from + i] + dropout.first_query;
  }
  const auto head = F::integers(heads);
  const auto query = F::integers(queries);
  const uint32_t threshold = dropout_threshold(dropout);
  const Interval keys{span.keys.begin + dropout.first_key,
                      span.keys.end + dropout.first_key};
  for (int64_t at = round_down(keys.begin, kKeysPerDraw); at < keys.end;
       at += kKeysPerDraw) {
    const Draw<F> bits = draw<F>(dropout, query, head, at);
#pragma GCC unroll 8
    for (int n = 0; n < kKeysPerDraw; ++n) {
      if (at + n < keys.begin || at + n >= keys.end) continue;
      auto* p = weights + (at + n - keys.begin) * kTileLanes<F>;
      // Times 0, as a dropped weight is: −0 and NaN stay what they are.
      const auto weight = F::load(p);
      F::store(p, F::select(kept<F>(bits, n, threshold), weight,
                            F::mul(weight, F::broadcast(0))));
    }
  }
}

}  // namespace
}  // namespace multihead::kernels
