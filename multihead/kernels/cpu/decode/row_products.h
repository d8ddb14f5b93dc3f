// SPDX-License-Identifier: MIT
//
// The two products of decoding: up to eight rows of queries against many keys,
// all of which are read from memory once.
//
//   qk:  S[row][key]    = Σ_d   Q[row][d] · K[key][d]        keys in the lanes
//   pv:  O[row][column] = Σ_key P[row][key] · V[key][column] columns in the
//                                                            lanes
//
// With rows in the lanes, as elsewhere (micro_kernel.h), most lanes would be
// empty, and each number of a key would be a broadcast of its own. Here a
// number of a row is broadcast. Keys are transposed, a square at a time, in
// registers; values are read as they lie, widened on the way, or interleaved to
// pairs of keys. Each sum is the same chain as in micro_kernel.h, so a row has
// the bits that it has among others in a tile.
//
// A step of qk on a square of 16 keys × 16 elements (1 KiB in float32) is 16
// loads, 64 shuffles and 16 multiply-adds per row; pv takes 16 loads and 16
// multiply-adds per row for as much. At 4 GHz and one shuffle and one
// multiply-add a cycle that is 40 GB/s with four rows: memory is slower, as
// long as its latency is hidden. So keys and values are fetched kFetchAhead
// bytes before they are used: hardware does so within a page of 4 KiB only.
#pragma once

#include <type_traits>

#ifdef __AVX512BF16__
#include "multihead/kernels/cpu/gemm/bf16_dot.h"
#endif
#include "multihead/kernels/cpu/gemm/load_store.h"
#include "multihead/kernels/cpu/gemm/pack.h"
#include "multihead/kernels/cpu/gemm/stored_rows.h"

namespace multihead::kernels {
namespace {

inline constexpr int64_t kFetchAhead = 16 << 10;

/// Rows of `width` numbers that lie `stride` elements apart in memory, and by
/// how many elements those are ahead that will be needed some time later.
template <class S>
struct MemoryRows {
  const typename S::Type* data;
  int64_t width, stride, ahead;
  const typename S::Type* row(int64_t n) const { return data + n * stride; }
};

/// Visits `keys` in runs of evenly spaced rows: page by page, or all at once.
template <class Visit>
SIMD_INLINE void for_each_run(const StridedRows& x, Interval keys,
                              const Visit& visit) {
  if (!x.block_table) return visit(keys);
  for_each_key_block(keys, x.page, visit);
}

/// The rows of a run. `end`: of the keys that will be read.
template <class S>
inline MemoryRows<S> run_of(const StridedRows& x, int64_t b, int64_t g,
                            Interval run, int64_t end, int64_t width) {
  using Type = typename S::Type;
  const auto* data = row_of<Type>(x, b, g, run.begin);
  const int64_t rows = kFetchAhead / max(width * sizeof(Type), 64);
  if (!x.block_table) return {data, width, x.row, rows * x.row};
  // The run that is as far ahead, which may lie in another page.
  const int64_t later = run.begin + round_up(rows, min(x.page, kKeyBlock));
  const auto* ahead = later < end ? row_of<Type>(x, b, g, later) : data;
  return {data, width, x.row, ahead - data};
}

/// How keys are read for M: numbers widened, or pairs as they are.
template <class M, class S>
struct KeyReader : RowReader<typename M::template QueryStorage<S>> {};

#ifdef __AVX512BF16__
/// 32 numbers in pairs.
template <>
struct KeyReader<BFloat16Dot, StoredMXInt8> : BFloat16Pairs {
  using Numbers = RowReader<StoredMXInt8>;
  static constexpr int kPair = 2;
  SIMD_INLINE __m512 load(const uint8_t* row, int64_t x, int64_t width) {
    return pairs(Numbers::load(row, x, width),
                 Numbers::load(row, x + 16, width));
  }
  SIMD_INLINE __m512 load_last(const uint8_t* row, int64_t x, int64_t width) {
    return pairs(Numbers::load_last(row, x, width),
                 Numbers::load_last(row, x + 16, width));
  }
  SIMD_INLINE __m512 pairs(__m512 first, __m512 last) {
    return _mm512_castsi512_ps(BFloat16Pairs::round(first, last));
  }
};
#endif

/// Distance between the rows of a block's scores: qk_rows writes whole vectors,
/// and pairs are made of two.
template <class F>
inline constexpr int64_t kScoreStride = kKeyBlock + 2 * F::kLanes;

/// Rows whose sums and one square of keys fit into the registers.
template <class F>
inline constexpr int kMaxProductRows = F::kRegisters >= 32 ? 8 : 4;

SIMD_INLINE void fetch_line(const void* p) { __builtin_prefetch(p, 0, 2); }

/// kVectors vectors of columns of the values that one step multiplies: one key,
/// or two keys in pairs.
template <class M, class S>
struct ValueStep {
  using F = typename M::F;
  using Type = typename S::Type;
  using Reader = RowReader<S>;
  static constexpr int64_t kKeys = 1;

  /// The weights of a row, of the keys begin ≤ j < end of a block, as they are
  /// multiplied.
  static const ScalarOf<F>* weights(const ScalarOf<F>* row, int64_t /*begin*/,
                                    int64_t /*end*/, ScalarOf<F>* /*packed*/) {
    return row;
  }

  /// `keys` are those that exist, and begin at value.row(0).
  template <int kVectors>
  SIMD_INLINE void load(const MemoryRows<S>& value, Interval keys, int64_t j,
                        int64_t column, typename F::Vector (&v)[kVectors]) {
    const Type* row = value.row(j - keys.begin);
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) {
      const int64_t x = column + n * F::kLanes;
      v[n] = kVectors > 1 ? Reader::load(row, x, value.width)
                          : Reader::load_last(row, x, value.width);
      if (n * F::kLanes * sizeof(Type) % 64 == 0)
        fetch_line(row + x + value.ahead);
    }
  }
};

#ifdef __AVX512BF16__
struct PairValueStep {
  using F = Float32;
  static constexpr int64_t kKeys = 2;

  /// Rounded, two keys to an element.
  static const float* weights(const float* row, int64_t begin, int64_t end,
                              float* packed) {
    for (int64_t j = round_down(begin, 2 * F::kLanes); j < end;
         j += 2 * F::kLanes) {
      const auto pairs =
          BFloat16Pairs::round(F::load(row + j), F::load(row + j + F::kLanes));
      F::store(packed + j / 2, _mm512_castsi512_ps(pairs));
    }
    return packed;
  }
};

template <class S>
struct ValueStep<BFloat16Dot, S> : PairValueStep {
  template <int kVectors>
  SIMD_INLINE void load(const MemoryRows<S>& value, Interval keys, int64_t j,
                        int64_t column, F::Vector (&v)[kVectors]) {
    const bool has_even = j >= keys.begin, has_odd = j + 1 < keys.end;
    const uint16_t* odd = value.row(j + 1 - keys.begin) + column;
    const uint16_t* even = odd - value.stride;
    if constexpr (kVectors == 1) {
      v[0] = pair_rows(has_even ? even : nullptr, has_odd ? odd : nullptr,
                       min(value.width - column, F::kLanes));
    } else {
      // No branch: with another way to fill v, g++ kept the sums in memory.
      alignas(64) static constexpr uint16_t kZeros[8 * F::kLanes] = {};
      if (!has_even) even = kZeros;
      if (!has_odd) odd = kZeros;
#pragma GCC unroll 4
      for (int n = 0; n + 1 < kVectors; n += 2) {
        BFloat16Pairs::interleave(even + n * F::kLanes, odd + n * F::kLanes,
                                  v[n], v[n + 1]);
        fetch_line(even + n * F::kLanes + value.ahead);
        fetch_line(odd + n * F::kLanes + value.ahead);
      }
    }
  }
};

template <>
struct ValueStep<BFloat16Dot, StoredMXInt8> : PairValueStep {
  template <int kVectors>
  SIMD_INLINE void load(const MemoryRows<StoredMXInt8>& value, Interval keys,
                        int64_t j, int64_t column, F::Vector (&v)[kVectors]) {
    using Reader = RowReader<StoredMXInt8>;
    const uint8_t* odd = value.row(j + 1 - keys.begin);
    const uint8_t* even = odd - value.stride;
    const auto read = [&](const uint8_t* row, int64_t x) {
      if constexpr (kVectors > 1) return Reader::load(row, x, value.width);
      return Reader::load_last(row, x, value.width);
    };
    const bool has_even = j >= keys.begin, has_odd = j + 1 < keys.end;
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) {
      const int64_t x = column + n * F::kLanes;
      const auto first = has_even ? read(even, x) : F::broadcast(0);
      const auto last = has_odd ? read(odd, x) : F::broadcast(0);
      v[n] = BFloat16Pairs::upper_halves(first, last);
      if (n * F::kLanes % 64 == 0) {
        fetch_line(even + x + value.ahead);
        fetch_line(odd + x + value.ahead);
      }
    }
  }
};
#endif

/// The sums of kRows rows of queries with as many keys as there are lanes.
template <class M, int kRows>
struct RowSums {
  using F = typename M::F;
  const ScalarOf<M>* query;  ///< (kRows, depth)
  int64_t depth;
  typename F::Vector sum[kRows], total[kRows];

  [[gnu::always_inline]] RowSums(const ScalarOf<M>* query, int64_t depth)
      : query(query), depth(depth) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum[r] = F::broadcast(0);
  }

  /// Before element x, a multiple of a vector's.
  [[gnu::always_inline]] void begin_chain(int64_t x) {
    if (x == 0 || x % kScoreChain != 0) return;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      total[r] = x == kScoreChain ? sum[r] : F::add(total[r], sum[r]);
      sum[r] = F::broadcast(0);
    }
  }

  /// `k`: element x of the keys.
  [[gnu::always_inline]] void add(typename F::Vector k, int64_t x) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto q = F::broadcast(query[r * depth + x]);
      sum[r] = M::multiply_add(k, q, sum[r]);
    }
  }

  [[gnu::always_inline]] void store(ScalarOf<M> scale, ScalarOf<M>* scores) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      if (depth > kScoreChain) sum[r] = F::add(total[r], sum[r]);
      if constexpr (M::kScalesScores) {
        sum[r] = F::mul(sum[r], F::broadcast(scale));
      }
      F::store(scores + r * kScoreStride<F>, sum[r]);
    }
  }
};

/// Adds the elements of `count` keys from `x` on, transposed in registers.
template <class M, class S, int kRows>
SIMD_INLINE void add_squares(const MemoryRows<S>& key, int64_t j, int64_t count,
                             int64_t x, RowSums<M, kRows>& sums) {
  using F = typename M::F;
  using Reader = KeyReader<M, S>;
  constexpr int kLanes = F::kLanes;
  const auto* rows = key.row(j);
  for (; x < sums.depth; x += kLanes) {
    sums.begin_chain(x);
    const int64_t first = x * Reader::kPair;
    typename F::Vector square[kLanes];
    if (count == kLanes && first + kLanes * Reader::kPair <= key.width) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        square[i] = Reader::load(rows + i * key.stride, first, key.width);
        fetch_line(rows + i * key.stride + first + key.ahead);
      }
    } else {
      for (int i = 0; i < kLanes; ++i) {
        square[i] = Reader::load_last(rows + min(i, count - 1) * key.stride,
                                      first, key.width);
      }
    }
    F::transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) sums.add(square[i], x + i);
  }
}

#ifdef __AVX512F__
/// Adds whole groups of 32 numbers of 16 keys, transposed as bytes; returns the
/// element after them.
template <class M, int kRows>
SIMD_INLINE int64_t add_groups(const MemoryRows<StoredMXInt8>& key, int64_t j,
                               RowSums<M, kRows>& sums) {
  using Reader = KeyReader<M, StoredMXInt8>;
  constexpr int kPair = Reader::kPair;
  constexpr int64_t kGroup = kMXGroup / kPair;
  const uint8_t* rows = key.row(j);
  MXInt8Columns columns(rows, key.stride, key.width);
  int64_t x = 0;
  for (; columns.next_group(); x += kGroup) {
    sums.begin_chain(x);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int64_t here = x + half * kGroup / 2;
      __m512i bytes[4];
      columns.read(here * kPair, bytes);
      if (here * kPair % 64 == 0) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          fetch_line(rows + i * key.stride + here * kPair + key.ahead);
        }
      }
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        __m512 numbers[4];
        columns.widen(bytes[c], numbers);
        const int64_t e = here + c * (kGroup / 8);
        if constexpr (kPair == 1) {
#pragma GCC unroll 4
          for (int n = 0; n < 4; ++n) sums.add(numbers[n], e + n);
        } else {
          sums.add(Reader::upper_halves(numbers[0], numbers[1]), e);
          sums.add(Reader::upper_halves(numbers[2], numbers[3]), e + 1);
        }
      }
    }
  }
  return x;
}
#endif

/// Scores of `keys` keys and kRows rows: scores (kRows, kScoreStride), written
/// in whole vectors. query (kRows, depth), `depth` elements of M to a row, a
/// whole number of vectors, zeros after the last number of a row.
template <class M, class S, int kRows>
[[gnu::noinline]] void qk_rows(const MemoryRows<S>& key, int64_t keys,
                               const ScalarOf<M>* query, int64_t depth,
                               ScalarOf<M> scale, ScalarOf<M>* scores) {
  constexpr int64_t kLanes = M::F::kLanes;
  for (int64_t j = 0; j < keys; j += kLanes) {
    const int64_t count = min(keys - j, kLanes);
    RowSums<M, kRows> sums(query, depth);
    int64_t x = 0;
#ifdef __AVX512F__
    if constexpr (std::is_same_v<S, StoredMXInt8>) {
      if (count == kLanes) x = add_groups(key, j, sums);
    }
#endif
    add_squares(key, j, count, x, sums);
    sums.store(scale, scores + j);
  }
}

/// Vectors of columns whose sums a micro-kernel of so many rows holds.
template <class F>
constexpr int product_vectors(int rows) {
  const int sums = F::kRegisters >= 32 ? 16 : 8;
  return sums / rows < 8 ? sums / rows : 8;
}

/// Values of keys that follow one another, evenly spaced.
template <class S>
struct ValueRun {
  MemoryRows<S> value;  ///< row 0: that of the first key
  Interval keys;
};

/// What pv_rows multiplies: the keys of one block, in ascending order. All runs
/// at once, since sums that went to memory and back after each page of 16 keys
/// took a fifth of the time.
template <class M, class S>
struct WeightedValues {
  const ValueRun<S>* runs;
  int64_t count;
  /// (kRows, kScoreStride), of the keys of the whole block; for pairs two keys
  /// to an element. 0 for keys of the block that are in no run.
  const ScalarOf<M>* weights;
  const ScalarOf<M>* factor;  ///< (kRows), of what was summed before
  ScalarOf<M>* context;       ///< (kRows, stride)
  int64_t stride;             ///< a whole number of vectors
};

/// O = factor·O + P·V for the columns from `column` on, whole slices of
/// kVectors vectors; then fewer.
template <class M, class S, int kRows, int kVectors>
SIMD_INLINE void pv_slices(const WeightedValues<M, S>& t, int64_t column,
                           int64_t columns) {
  using F = typename M::F;
  using Step = ValueStep<M, S>;
  constexpr int64_t kWidth = kVectors * F::kLanes;
  constexpr int64_t kStride = kScoreStride<F> / Step::kKeys;
  for (; columns - column >= (kVectors > 1 ? kWidth : 1); column += kWidth) {
    typename F::Vector sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto factor = F::broadcast(t.factor[r]);
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) {
        sum[r][n] = F::mul(
            factor, F::load(t.context + r * t.stride + column + n * F::kLanes));
      }
    }
    for (int64_t run = 0; run < t.count; ++run) {
      const auto& [value, keys] = t.runs[run];
      const auto* p = t.weights + keys.begin % kKeyBlock / Step::kKeys;
      for (int64_t j = round_down(keys.begin, Step::kKeys); j < keys.end;
           j += Step::kKeys, ++p) {
        typename F::Vector v[kVectors];
        Step::template load<kVectors>(value, keys, j, column, v);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const auto weight = F::broadcast(p[r * kStride]);
#pragma GCC unroll 8
          for (int n = 0; n < kVectors; ++n) {
            sum[r][n] = M::multiply_add(v[n], weight, sum[r][n]);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) {
        F::store(t.context + r * t.stride + column + n * F::kLanes, sum[r][n]);
      }
    }
  }
  if constexpr (kVectors > 1) {
    pv_slices<M, S, kRows, kVectors / 2>(t, column, columns);
  }
}

template <class M, class S, int kRows>
[[gnu::noinline]] void pv_rows(const WeightedValues<M, S>& t, int64_t columns) {
  pv_slices<M, S, kRows, product_vectors<typename M::F>(kRows)>(t, 0, columns);
}

}  // namespace
}  // namespace multihead::kernels
