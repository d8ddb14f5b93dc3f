// SPDX-License-Identifier: MIT
//
// Keys and values that are stored narrower than queries (Storage). Decoding
// widens them as it reads them (row_products.h); the tiles of a longer call
// read a split that was restored to what queries are stored as.
#pragma once

#include "multihead/kernels/cpu/gemm/load_store.h"
#include "multihead/kernels/mxint8.h"

namespace multihead::kernels {
namespace {

/// Rows of MXINT8 numbers; widened by RowReader.
struct StoredMXInt8 {
  using F = Float32;
  using Scalar = float;
  using Type = uint8_t;
  static constexpr int kPair = 1;
};

/// Vectors of the numbers of a row of `width` that is stored as S, from number
/// x on, a multiple of a vector's.
template <class S>
struct RowReader {
  using Type = typename S::Type;
  static constexpr int kPair = S::kPair;
  SIMD_INLINE typename S::F::Vector load(const Type* row, int64_t x,
                                         int64_t /*width*/) {
    return S::load(row + x);
  }
  /// With zeros after the last; no byte beyond is read.
  SIMD_INLINE typename S::F::Vector load_last(const Type* row, int64_t x,
                                              int64_t width) {
    return load_some<S>(row + x, width - x);
  }
};

template <>
struct RowReader<StoredMXInt8> {
  using F = Float32;
  static constexpr int kPair = 1;
  SIMD_INLINE F::Vector load(const uint8_t* row, int64_t x, int64_t width) {
    return F::mul(F::load_int8(row + x), step_of(row, x, width));
  }
  SIMD_INLINE F::Vector load_last(const uint8_t* row, int64_t x,
                                  int64_t width) {
    if (width - x >= F::kLanes) return load(row, x, width);
    if (width <= x) return F::broadcast(0);
    uint8_t part[F::kLanes] = {};
    memcpy(part, row + x, width - x);
    return F::mul(F::load_int8(part), step_of(row, x, width));
  }

  SIMD_INLINE F::Vector step_of(const uint8_t* row, int64_t x, int64_t width) {
    return F::broadcast(mxint8_step(row[width + x / kMXGroup]));
  }
};

/// The numbers of a row, as S stores them.
template <class S, class Stored>
inline void restore(const typename Stored::Type* row, int64_t width,
                    typename S::Type* to) {
  using F = typename S::F;
  for (int64_t x = 0; x < width; x += F::kLanes) {
    store_some<S>(to + x, RowReader<Stored>::load_last(row, x, width),
                  width - x);
  }
}

/// The rows of a split of keys or values: where they lie, or restored.
template <class S>
class SplitRows {
 public:
  using Type = typename S::Type;

  /// Numbers of `room`.
  static int64_t room_size(const AttentionArgs& a, int64_t width) {
    return a.storage == Storage::kAsQuery ? 0 : kKeySplit * width;
  }

  void read(const AttentionArgs& a, const StridedRows& x, int64_t b, int64_t g,
            Interval keys, int64_t width, Type* room) {
    if (a.storage == Storage::kAsQuery) {
      rows = x;
      batch = b;
      head = g;
      return;
    }
    start_ = -keys.begin;
    rows = {.data = room, .row = width, .starts = &start_};
    if constexpr (sizeof(ScalarOf<S>) == sizeof(float)) {
      for (int64_t j = keys.begin; j < keys.end; ++j) {
        Type* to = room + (j - keys.begin) * width;
        if (a.storage == Storage::kMXInt8) {
          restore<S, StoredMXInt8>(row_of<uint8_t>(x, b, g, j), width, to);
        } else {
          restore<S, Stored<Dtype::kBFloat16>>(row_of<uint16_t>(x, b, g, j),
                                               width, to);
        }
      }
    }
  }

  SplitRows() = default;
  SplitRows(const SplitRows&) = delete;  // rows point into it
  SplitRows& operator=(const SplitRows&) = delete;
  ~SplitRows() = default;

  StridedRows rows;
  int64_t batch = 0, head = 0;  ///< by which `rows` are to be read

 private:
  int64_t start_ = 0;
};

}  // namespace
}  // namespace multihead::kernels
