// SPDX-License-Identifier: MIT
//
// Configurations by number: every feature mixed with every other, sizes around
// every seam of the kernels, any layout.
#pragma once

#include <algorithm>

#include "tests/cpp/kernels/call.h"

namespace kernel_test {

inline uint64_t number_from(const char* variable) {
  const char* text = getenv(variable);
  return text ? strtoull(text, nullptr, 10) : 0;
}

/// A number in [0, 1) for a seed, without the price of seeding an Rng
/// ("SplitMix", Steele et al., 2014).
inline double unit_of(uint64_t seed) {
  uint64_t x = seed * 0x9E3779B97F4A7C15;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return static_cast<double>((x ^ x >> 31) >> 11) * 0x1p-53;
}

template <typename T>
T pick(Rng& rng, const std::vector<T>& choices) {
  return choices[uniform(rng, 0, static_cast<int64_t>(choices.size()) - 1)];
}

inline int64_t random_length(Rng& rng, bool large) {
  static const std::vector<int64_t> kSeams{1,  2,  7,  8,  9,  15, 16, 17, 24,
                                           31, 32, 33, 47, 48, 49, 95, 96, 97};
  static const std::vector<int64_t> kFarSeams{
      127, 128, 129, 255, 256, 257, 383, 385, 511, 512, 513, 1023, 1024, 1025};
  if (large && chance(rng, 0.5)) return pick(rng, kFarSeams);
  return chance(rng, 0.5) ? pick(rng, kSeams) : uniform(rng, 1, 140);
}

inline int64_t random_width(Rng& rng) {
  static const std::vector<int64_t> kSeams{1,  2,  3,  7,   8,   9,   15,
                                           16, 17, 31, 32,  33,  40,  63,
                                           64, 65, 80, 127, 128, 129, 257};
  return chance(rng, 0.7) ? pick(rng, kSeams) : uniform(rng, 1, 257);
}

/// Makes sizes smaller until the loops need no more than `work` steps.
inline void shrink(Rng& rng, Shape& s, int64_t work) {
  while (s.B * s.H * s.Lq * s.Lk * (s.D + s.Dv + 8) > work) {
    switch (uniform(rng, 0, 5)) {
      case 0:
        s.B = (s.B + 1) / 2;
        break;
      case 1:
        s.H = s.H / s.G;
        s.G = 1;
        break;
      case 2:
        if (s.G == 1) s.H = (s.H + 1) / 2;
        break;
      case 3:
        s.D = std::min(s.D, random_width(rng));
        break;
      case 4:
        s.Dv = std::min(s.Dv, random_width(rng));
        break;
      default:
        int64_t& length = chance(rng, 0.5) ? s.Lq : s.Lk;
        length = std::min(length, random_length(rng, false));
    }
  }
}

inline Shape random_shape(Rng& rng, int64_t work) {
  Shape s;
  const bool large = chance(rng, 0.25);
  s.B = uniform(rng, 1, 4);
  s.G = uniform(rng, 1, 3);
  s.H = s.G * pick<int64_t>(rng, {1, 1, 2, 3, 4, 7, 8});
  s.Lq = random_length(rng, large);
  s.Lk = random_length(rng, large);
  s.D = random_width(rng);
  s.Dv = chance(rng, 0.5) ? s.D : random_width(rng);
  shrink(rng, s, work);
  return s;
}

/// Strides of (batch, head, row, element): elements of a row side by side, the
/// rest in any order, with gaps.
inline Index random_row_strides(Rng& rng, const Index& sizes) {
  std::array<int, 4> order{0, 1, 2, 3};
  if (chance(rng, 0.5)) std::shuffle(order.begin(), order.begin() + 3, rng);
  return strides_in_order(sizes, order,
                          chance(rng, 0.4) ? uniform(rng, 1, 9) : 0);
}
inline Edge random_edge(Rng& rng) {
  return chance(rng, 0.7) ? Edge::kEnd : Edge::kStart;
}

/// Rows in any layout; now and then the same for all batch rows or heads.
inline Tensor random_rows(Rng& rng, Storage storage, const Index& sizes,
                          double magnitude) {
  Index kept = sizes;
  for (int n = 0; n < 2; ++n) kept[n] = chance(rng, 0.07) ? 1 : sizes[n];
  Index strides = random_row_strides(rng, kept);
  for (int n = 0; n < 2; ++n) strides[n] = kept[n] == sizes[n] ? strides[n] : 0;
  Tensor x(storage, sizes, strides, random_edge(rng));
  x.fill_bytes(0xFF);
  fill_normal(x, rng, magnitude);
  return x;
}

/// Visible ends: causal, windows, lengths, offsets.
inline void add_visibility(Rng& rng, Call& c) {
  const Shape& s = c.shape;
  const auto end = [&]() -> int64_t {
    const int kind = static_cast<int>(uniform(rng, 0, 5));
    if (kind < 2) return -1;
    if (kind == 2) return uniform(rng, 0, 3);
    if (kind == 3) return uniform(rng, 0, 40);
    return kind == 4 ? uniform(rng, 0, s.Lk) : int64_t{1} << 40;
  };
  c.visibility.is_causal = chance(rng, 0.3);
  if (chance(rng, 0.3)) {
    c.visibility.left = end();
    c.visibility.right = end();
  }
  const auto per_batch = [&](auto&& draw) {
    Tensor x(Storage::kInt64, {1, 1, 1, s.B}, {0, 0, 0, 1}, random_edge(rng));
    x.fill([&](const Index& i) { return static_cast<double>(draw(i[3])); });
    return x;
  };
  std::vector<int64_t> lengths(s.B, s.Lk);
  if (chance(rng, 0.3)) {
    c.key_lengths = per_batch([&](int64_t b) {
      return lengths[b] = chance(rng, 0.2)   ? 0
                          : chance(rng, 0.2) ? s.Lk
                                             : uniform(rng, 0, s.Lk);
    });
  }
  if (!chance(rng, 0.4)) return;
  // The last query at the last key, anywhere, or far away.
  c.query_offsets = per_batch([&](int64_t b) {
    return chance(rng, 0.4)    ? lengths[b] - s.Lq
           : chance(rng, 0.95) ? uniform(rng, -s.Lq - 3, s.Lk + 3)
                               : pick<int64_t>(rng, {-4000, 4000});
  });
}

/// A mask of any broadcast shape, order of dimensions and density.
inline void add_mask(Rng& rng, Call& c) {
  if (chance(rng, 0.5)) return;
  const Shape& s = c.shape;
  c.mask_kind = chance(rng, 0.5) ? Kind::kKeep : Kind::kBias;
  const Index sizes{s.B, s.H, s.Lq, s.Lk};
  Index kept = sizes;
  for (int n = 0; n < 4; ++n) kept[n] = chance(rng, 0.35) ? 1 : sizes[n];
  std::array<int, 4> order{0, 1, 2, 3};
  if (chance(rng, 0.4)) std::shuffle(order.begin(), order.end(), rng);
  Index strides =
      strides_in_order(kept, order, chance(rng, 0.3) ? uniform(rng, 1, 5) : 0);
  for (int n = 0; n < 4; ++n) strides[n] = kept[n] == sizes[n] ? strides[n] : 0;
  Storage storage = compute_storage_of(c.dtype);
  if (c.mask_kind == Kind::kKeep) storage = Storage::kByte;
  if (storage == Storage::kFloat32) {
    storage = pick<Storage>(
        rng, {Storage::kFloat32, Storage::kBFloat16, Storage::kFloat16});
  }
  c.mask = Tensor(storage, sizes, strides, random_edge(rng));
  c.mask.fill_bytes(0xFF);
  const double blocked = pick<double>(rng, {0, 0.05, 0.5, 0.95, 1});
  const double magnitude = pick<double>(rng, {0, 1, 1, 20, 1e4});
  // Runs of keys, so that whole blocks are hidden too.
  const int64_t run = pick<int64_t>(rng, {1, 1, 20, 150});
  const uint64_t salt = rng();
  for_each_index(kept, [&](const Index& i) {
    const uint64_t of_run =
        salt + i[3] / run + 1000003 * (i[2] + 1009 * (i[1] + 13 * i[0]));
    const bool hidden = unit_of(of_run) < blocked;
    c.mask.set(
        i, c.mask_kind == Kind::kKeep
               ? (hidden ? 0 : static_cast<double>(uniform(rng, 1, 255)))
               : (hidden ? -reference::kInfinity : magnitude * normal(rng)));
  });
}

/// A mask of keys in any layout, of runs, ends or single keys.
inline void add_key_mask(Rng& rng, Call& c) {
  if (chance(rng, 0.65)) return;
  const Shape& s = c.shape;
  const bool once = chance(rng, 0.2), turned = chance(rng, 0.2);
  const int64_t gap = chance(rng, 0.3) ? uniform(rng, 1, 5) : 1;
  const Index strides{0, 0, once ? 0 : (turned ? gap : gap * s.Lk),
                      turned ? gap * s.B : gap};
  c.key_mask =
      Tensor(Storage::kByte, {1, 1, s.B, s.Lk}, strides, random_edge(rng));
  c.key_mask.fill_bytes(0xFF);
  const double blocked = pick<double>(rng, {0, 0.05, 0.5, 0.95, 1});
  const int64_t run = pick<int64_t>(rng, {1, 1, 20, 150});
  const uint64_t salt = rng();
  c.key_mask.fill([&](const Index& i) {
    const bool hidden =
        unit_of(salt + i[3] / run + (once ? 0 : 1009 * i[2])) < blocked;
    return hidden ? 0 : static_cast<double>(uniform(rng, 1, 255));
  });
}

inline void add_head_rules(Rng& rng, Call& c) {
  const Shape& s = c.shape;
  if (chance(rng, 0.25)) c.softcap = pick<double>(rng, {0.5, 5, 30, 50});
  if (chance(rng, 0.25)) {
    const bool per_batch = chance(rng, 0.5);
    c.slopes = Tensor(Storage::kFloat64, {1, 1, s.B, s.H},
                      {0, 0, per_batch ? s.H : 0, 1}, random_edge(rng));
    const double sign = chance(rng, 0.2) ? -1 : 1;
    c.slopes.fill([&](const Index&) {
      return sign * std::exp2(-static_cast<double>(uniform(rng, 0, 8)));
    });
  }
  if (chance(rng, 0.25)) {
    c.sinks = Tensor(Storage::kFloat64, {1, 1, 1, s.H}, {0, 0, 0, 1},
                     random_edge(rng));
    c.sinks.fill([&](const Index&) {
      return chance(rng, 0.1) ? -reference::kInfinity
                              : pick<double>(rng, {1, 5, 300}) * normal(rng);
    });
  }
  if (chance(rng, 0.25)) {
    c.dropout = {pick<double>(rng, {1e-6, 0.1, 0.3, 0.5, 0.9, 1}), rng(),
                 rng()};
  }
}

/// Any numbers and rules for these sizes; masks only if wanted.
inline Call random_call(Rng& rng, Dtype dtype, const Shape& shape,
                        bool masks = true) {
  Call c(dtype, shape);
  c.scale = pick<double>(rng, {c.scale, c.scale, c.scale, 1, 0.3, -0.5, 0});
  // Scores of about this size; float16 stays within its range.
  const double size = pick<double>(rng, {0.1, 1, 1, 4, 30, 1000, 1e4});
  const double root = std::sqrt(static_cast<double>(c.shape.D));
  const double magnitude =
      c.scale == 0 ? 1 : std::sqrt(size / (std::abs(c.scale) * root));
  const Storage storage = storage_of(dtype);
  c.query = random_rows(rng, storage, c.query.sizes(), magnitude);
  c.key = random_rows(rng, storage, c.key.sizes(), magnitude);
  c.value = random_rows(rng, storage, c.value.sizes(),
                        pick<double>(rng, {1e-3, 1, 1, 100}));
  const Index out{c.shape.B, c.shape.H, c.shape.Lq, c.shape.Dv};
  c.out_strides = random_row_strides(rng, out);
  add_visibility(rng, c);
  if (masks) add_mask(rng, c);
  if (masks) add_key_mask(rng, c);
  add_head_rules(rng, c);
  return c;
}

/// Configuration `number` of a dtype. One in 16 takes eight times the time.
inline Call random_call(Dtype dtype, uint64_t number) {
  Rng rng(number * 4 + static_cast<uint64_t>(dtype));
  const int64_t work = int64_t{1} << (number % 16 == 0 ? 23 : 20);
  const Shape shape = random_shape(rng, work);
  return random_call(rng, dtype, shape);
}

}  // namespace kernel_test
