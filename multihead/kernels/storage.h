// SPDX-License-Identifier: MIT
//
// Between memory and the kernels' own layouts: rows of queries into lanes and
// back, keys and values into dense panels, 16-bit types into float32.
#pragma once

#include <string.h>

#include "multihead/kernels/rows.h"
#include "multihead/kernels/tile.h"

namespace multihead::kernels {
namespace {

/// How numbers of one dtype are read and written, one or a pair to a lane.
template <Dtype kDtype>
struct Stored;

template <>
struct Stored<Dtype::kFloat32> {
  using Type = float;
  using F = Float32;
  static constexpr int kPair = 1;
  MULTIHEAD_INLINE F::Vector load(const Type* p) { return F::load(p); }
  MULTIHEAD_INLINE void store(Type* p, F::Vector a) { F::store(p, a); }
};
template <>
struct Stored<Dtype::kFloat64> {
  using Type = double;
  using F = Float64;
  static constexpr int kPair = 1;
  MULTIHEAD_INLINE F::Vector load(const Type* p) { return F::load(p); }
  MULTIHEAD_INLINE void store(Type* p, F::Vector a) { F::store(p, a); }
};
template <>
struct Stored<Dtype::kBFloat16> {
  using Type = uint16_t;
  using F = Float32;
  static constexpr int kPair = 1;
  MULTIHEAD_INLINE F::Vector load(const Type* p) { return F::load_bfloat16(p); }
  MULTIHEAD_INLINE void store(Type* p, F::Vector a) { F::store_bfloat16(p, a); }
};
template <>
struct Stored<Dtype::kFloat16> {
  using Type = uint16_t;
  using F = Float32;
  static constexpr int kPair = 1;
  MULTIHEAD_INLINE F::Vector load(const Type* p) { return F::load_float16(p); }
  MULTIHEAD_INLINE void store(Type* p, F::Vector a) { F::store_float16(p, a); }
};

#ifdef __AVX512BF16__
/// bfloat16 in pairs along the row, as BFloat16Dot wants queries: lanes that,
/// read as float32, mean nothing.
struct StoredPairs {
  using Type = uint16_t;
  using F = Float32;
  static constexpr int kPair = 2;
  MULTIHEAD_INLINE F::Vector load(const Type* p) {
    return _mm512_castsi512_ps(_mm512_loadu_si512(p));
  }
};
#endif

/// The first `count` numbers at p, zeros after them; no byte beyond is read.
template <class S>
MULTIHEAD_INLINE typename S::F::Vector load_some(const typename S::Type* p,
                                                 int64_t count) {
  constexpr int kNumbers = S::F::kLanes * S::kPair;
  if (count >= kNumbers) return S::load(p);
  typename S::Type part[kNumbers] = {};
  memcpy(part, p, count * sizeof *p);
  return S::load(part);
}
template <class S>
MULTIHEAD_INLINE void store_some(typename S::Type* p, typename S::F::Vector a,
                                 int64_t count) {
  if (count >= S::F::kLanes) return S::store(p, a);
  typename S::Type part[S::F::kLanes];
  S::store(part, a);
  memcpy(p, part, count * sizeof *p);
}

/// Start of row `row` of (b, head).
template <typename T>
inline const T* row_of(const Rows& x, int64_t b, int64_t head, int64_t row) {
  return static_cast<const T*>(x.data) + b * x.batch + head * x.head +
         row * x.row;
}
template <typename T>
inline T* row_of(const OutRows& x, int64_t b, int64_t head, int64_t row) {
  return static_cast<T*>(x.data) + b * x.batch + head * x.head + row * x.row;
}

/// One vector of rows → columns (width, lanes), times `scale`; pairs are left
/// as they are. Null rows are 0.
template <class S>
inline void load_lanes(const typename S::Type* const* rows, int64_t width,
                       typename S::F::Scalar scale,
                       typename S::F::Scalar* columns) {
  using F = typename S::F;
  const auto factor = F::broadcast(scale);
  constexpr int kNumbers = F::kLanes * S::kPair;
  for (int64_t x = 0; x < width; x += kNumbers) {
    const int64_t count = least(width - x, kNumbers);
    typename F::Vector square[F::kLanes];
    for (int i = 0; i < F::kLanes; ++i) {
      square[i] = rows[i] ? load_some<S>(rows[i] + x, count) : F::broadcast(0);
    }
    F::transpose(square);
    for (int i = 0; i * S::kPair < count; ++i) {
      F::store(columns + (x / S::kPair + i) * kTileLanes<F>,
               S::kPair == 1 ? F::mul(square[i], factor) : square[i]);
    }
  }
}

/// Columns (width, lanes) times `factor` per lane → one vector of rows. Null
/// rows are left out.
template <class S>
inline void store_lanes(const typename S::F::Scalar* columns,
                        typename S::F::Vector factor, int64_t width,
                        typename S::Type* const* rows) {
  using F = typename S::F;
  for (int64_t x = 0; x < width; x += F::kLanes) {
    const int64_t count = least(width - x, F::kLanes);
    typename F::Vector square[F::kLanes];
    for (int i = 0; i < F::kLanes; ++i) {
      square[i] =
          i < count ? F::mul(F::load(columns + (x + i) * kTileLanes<F>), factor)
                    : F::broadcast(0);
    }
    F::transpose(square);
    for (int i = 0; i < F::kLanes; ++i) {
      if (rows[i]) store_some<S>(rows[i] + x, square[i], count);
    }
  }
}

/// Keys or values as the products read them: element e of row `anchor` + r at
/// data[r·stride + e].
template <typename T>
struct Panel {
  const T* data;
  int64_t stride, anchor;
  const T* row(int64_t r) const { return data + (r - anchor) * stride; }
};

/// Rows `keys` of (b, g), widened, one after the other.
template <class S>
inline Panel<typename S::F::Scalar> pack_rows(const Rows& x, int64_t b,
                                              int64_t g, Interval keys,
                                              int64_t width,
                                              typename S::F::Scalar* panel) {
  using F = typename S::F;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    const auto* row = row_of<typename S::Type>(x, b, g, j);
    auto* to = panel + (j - keys.begin) * width;
    int64_t e = 0;
    for (; e + F::kLanes <= width; e += F::kLanes) {
      F::store(to + e, S::load(row + e));
    }
    if (e < width) {
      typename S::F::Scalar part[F::kLanes];
      F::store(part, load_some<S>(row + e, width - e));
      memcpy(to + e, part, (width - e) * sizeof *to);
    }
  }
  return {panel, width, keys.begin};
}

/// Panels of pairs, for products that take pairs.
template <class M>
struct PairPanels;

#ifdef __AVX512BF16__
template <>
struct PairPanels<BFloat16Dot> {
  /// Rows of keys in pairs, a zero after the last of an odd width. Starts at an
  /// even key, so that pairs of keys do not depend on where a panel begins.
  static Panel<float> keys(const Rows& x, int64_t b, int64_t g, Interval keys,
                           int64_t width, float* panel) {
    const int64_t pairs = (width + 1) / 2, anchor = round_down(keys.begin, 2);
    memset(panel, 0, (keys.end - anchor + 1) * pairs * sizeof *panel);
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      memcpy(panel + (j - anchor) * pairs, row_of<uint16_t>(x, b, g, j),
             width * sizeof(uint16_t));
    }
    return {panel, pairs, anchor};
  }

  /// Values of keys 2t and 2t + 1 in pairs: row t of the panel. A key that is
  /// not among `keys` counts as 0 and is not read.
  static Panel<float> values(const Rows& x, int64_t b, int64_t g, Interval keys,
                             int64_t width, float* panel) {
    for (int64_t t = keys.begin / 2; 2 * t < keys.end; ++t) {
      auto* to =
          reinterpret_cast<uint32_t*>(panel) + (t - keys.begin / 2) * width;
      const bool has_even = 2 * t >= keys.begin, has_odd = 2 * t + 1 < keys.end;
      const auto* even = row_of<uint16_t>(x, b, g, 2 * t + !has_even);
      const auto* odd = row_of<uint16_t>(x, b, g, 2 * t + has_odd);
      const uint32_t low = has_even ? 0xFFFF : 0, high = has_odd ? 0xFFFF : 0;
      for (int64_t e = 0; e < width; ++e) {
        to[e] = (even[e] & low) | (odd[e] & high) << 16;
      }
    }
    return {panel, width, keys.begin / 2};
  }
};
#endif

/// Numbers of a panel of `keys` rows.
constexpr int64_t panel_size(int64_t keys, int64_t width) {
  return (keys + 2) * (width + 1);
}

/// Keys of (b, g) for product M: in place, where the type allows it and nobody
/// asks for a copy, else packed into `panel`.
template <class M, class S>
inline Panel<typename M::F::Scalar> key_panel(const Rows& x, int64_t b,
                                              int64_t g, Interval keys,
                                              int64_t width,
                                              typename M::F::Scalar* panel) {
  using T = typename M::F::Scalar;
  if constexpr (M::kPair == 2) {
    return PairPanels<M>::keys(x, b, g, keys, width, panel);
  } else {
    if constexpr (sizeof(typename S::Type) == sizeof(T)) {
      if (!panel) return {row_of<T>(x, b, g, 0), x.row, 0};
    }
    return pack_rows<S>(x, b, g, keys, width, panel);
  }
}

/// The same for values, whose pairs are of keys: row t of the panel holds keys
/// kPair·t and on.
template <class M, class S>
inline Panel<typename M::F::Scalar> value_panel(const Rows& x, int64_t b,
                                                int64_t g, Interval keys,
                                                int64_t width,
                                                typename M::F::Scalar* panel) {
  if constexpr (M::kPair == 2) {
    return PairPanels<M>::values(x, b, g, keys, width, panel);
  } else {
    return key_panel<M, S>(x, b, g, keys, width, panel);
  }
}

}  // namespace
}  // namespace multihead::kernels
