// SPDX-License-Identifier: MIT
//
// A call of attention, as the kernels take it and as the float64 loops do.
#pragma once

#include <cmath>
#include <random>
#include <sstream>
#include <string>

#include "reference/attention.h"
#include "tests/cpp/kernels/philox.h"
#include "tests/cpp/kernels/tensor.h"

namespace kernel_test {

namespace kernels = multihead::kernels;
using Kind = kernels::ScoreMask::Kind;
using Rng = std::mt19937_64;

inline constexpr Dtype kAllDtypes[] = {Dtype::kFloat32, Dtype::kFloat64,
                                       Dtype::kBFloat16, Dtype::kFloat16};
inline const char* name_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
      return "float64";
    case Dtype::kBFloat16:
      return "bfloat16";
    case Dtype::kFloat16:
      return "float16";
    default:
      return "float32";
  }
}

struct Shape {
  int64_t B = 1, H = 1, G = 1, Lq = 1, Lk = 1, D = 1, Dv = 1;
};

/// Optional tensors are absent while they are empty.
struct Call {
  explicit Call(Dtype dtype, const Shape& shape)
      : dtype(dtype),
        shape(shape),
        query(storage_of(dtype), {shape.B, shape.H, shape.Lq, shape.D}),
        key(storage_of(dtype), {shape.B, shape.G, shape.Lk, shape.D}),
        value(storage_of(dtype), {shape.B, shape.G, shape.Lk, shape.Dv}),
        scale(shape.D > 0 ? 1 / std::sqrt(static_cast<double>(shape.D)) : 1),
        out_strides(dense_strides({shape.B, shape.H, shape.Lq, shape.Dv})) {}

  Dtype dtype;
  Shape shape;
  Tensor query, key, value;
  /// Of key and value; for kMXInt8 they are bytes (storage_test.cpp).
  kernels::Storage stored_as = kernels::Storage::kAsQuery;
  double scale;
  double softcap = 0;
  kernels::Visibility visibility;  ///< but for these two, int64 (1, 1, 1, B)
  Tensor query_offsets, key_lengths;
  Kind mask_kind = Kind::kNone;
  Tensor mask;      ///< (B, H, Lq, Lk)
  Tensor key_mask;  ///< bytes (1, 1, B, Lk)
  Tensor slopes;    ///< float64 (1, 1, B, H)
  Tensor sinks;     ///< float64 (1, 1, 1, H)
  kernels::Dropout dropout;
  Index out_strides;
};

inline kernels::StridedRows rows_of(const Tensor& x) {
  return {x.data(), x.strides()[0], x.strides()[1], x.strides()[2]};
}
inline kernels::StridedOutRows out_rows_of(const Tensor& x) {
  return {x.data(), x.strides()[0], x.strides()[1], x.strides()[2]};
}

inline kernels::AttentionArgs arguments_of(const Call& c) {
  const Shape& s = c.shape;
  kernels::AttentionArgs a;
  a.dtype = c.dtype;
  a.storage = c.stored_as;
  a.B = s.B;
  a.H = s.H;
  a.G = s.G;
  a.Lq = s.Lq;
  a.Lk = s.Lk;
  a.D = s.D;
  a.Dv = s.Dv;
  a.query = rows_of(c.query);
  a.key = rows_of(c.key);
  a.value = rows_of(c.value);
  a.scale = c.scale;
  a.softcap = c.softcap;
  a.visibility = c.visibility;
  a.dropout = c.dropout;
  if (!c.query_offsets.empty()) {
    a.visibility.query_offsets = static_cast<int64_t*>(c.query_offsets.data());
  }
  if (!c.key_lengths.empty()) {
    a.visibility.key_lengths = static_cast<int64_t*>(c.key_lengths.data());
  }
  if (c.mask_kind != Kind::kNone) {
    const Index& at = c.mask.strides();
    a.mask = {c.mask_kind, c.mask.data(), dtype_of(c.mask.storage()),
              at[0],       at[1],         at[2],
              at[3]};
  }
  if (!c.key_mask.empty()) {
    a.key_mask = {static_cast<const uint8_t*>(c.key_mask.data()),
                  c.key_mask.strides()[2], c.key_mask.strides()[3]};
  }
  if (!c.slopes.empty()) {
    a.alibi_slopes = static_cast<double*>(c.slopes.data());
    a.alibi_batch = c.slopes.strides()[2];
    a.alibi_head = c.slopes.strides()[3];
  }
  if (!c.sinks.empty()) a.sinks = static_cast<double*>(c.sinks.data());
  return a;
}

/// The same call for the loops: what lies in memory, already rounded.
inline reference::Attention golden_arguments_of(const Call& c) {
  const Shape& s = c.shape;
  reference::Attention a{.B = s.B,
                         .H = s.H,
                         .G = s.G,
                         .Lq = s.Lq,
                         .Lk = s.Lk,
                         .D = s.D,
                         .Dv = s.Dv};
  a.query = c.query.values();
  a.key = c.key.values();
  a.value = c.value.values();
  a.is_causal = c.visibility.is_causal;
  a.window = {{c.visibility.left, c.visibility.right}};
  a.scale = c.scale;
  if (c.softcap != 0) a.softcap = c.softcap;
  for (double offset : c.query_offsets.values()) {
    a.query_offsets.push_back(static_cast<int64_t>(offset));
  }
  for (double n : c.key_lengths.values()) {
    a.key_lengths.push_back(static_cast<int64_t>(n));
  }
  for (double keep : c.key_mask.values()) a.key_mask.push_back(keep != 0);
  if (c.mask_kind != Kind::kNone) a.bias = c.mask.values();
  if (c.mask_kind == Kind::kKeep) {
    for (double& keep : a.bias) keep = keep != 0 ? 0 : -reference::kInfinity;
  }
  a.alibi_slopes = c.slopes.values();
  a.sinks = c.sinks.values();
  if (c.dropout.probability > 0) {
    for_each_index({s.B, s.H, s.Lq, s.Lk}, [&](const Index& i) {
      a.dropout.push_back(dropout_factor(c.dropout, s.H, i));
    });
  }
  return a;
}

inline double normal(Rng& rng) {
  return std::normal_distribution<double>()(rng);
}
inline int64_t uniform(Rng& rng, int64_t first, int64_t last) {
  return std::uniform_int_distribution<int64_t>(first, last)(rng);
}
inline bool chance(Rng& rng, double probability) {
  return std::uniform_real_distribution<double>()(rng) < probability;
}

inline void fill_normal(const Tensor& x, Rng& rng, double magnitude = 1) {
  x.fill([&](const Index&) { return magnitude * normal(rng); });
}

/// Dense normal numbers, no rule but attention itself.
inline Call normal_call(Dtype dtype, const Shape& shape, uint64_t seed = 1) {
  Rng rng(seed);
  Call c(dtype, shape);
  fill_normal(c.query, rng);
  fill_normal(c.key, rng);
  fill_normal(c.value, rng);
  return c;
}

inline Tensor integers(const std::vector<int64_t>& values) {
  Tensor x(Storage::kInt64, {1, 1, 1, static_cast<int64_t>(values.size())});
  x.fill([&](const Index& i) { return static_cast<double>(values[i[3]]); });
  return x;
}
inline void set_key_lengths(Call& c, const std::vector<int64_t>& lengths) {
  c.key_lengths = integers(lengths);
}
inline void set_query_offsets(Call& c, const std::vector<int64_t>& offsets) {
  c.query_offsets = integers(offsets);
}
/// The last query stands at the last key; after set_key_lengths.
inline void align_bottom_right(Call& c) {
  std::vector<int64_t> offsets(c.shape.B, c.shape.Lk - c.shape.Lq);
  for (int64_t b = 0; b < c.shape.B && !c.key_lengths.empty(); ++b) {
    offsets[b] =
        static_cast<int64_t>(c.key_lengths.get({0, 0, 0, b})) - c.shape.Lq;
  }
  set_query_offsets(c, offsets);
}
inline void set_sinks(Call& c, const std::vector<double>& sinks) {
  c.sinks =
      Tensor(Storage::kFloat64, {1, 1, 1, static_cast<int64_t>(sinks.size())});
  c.sinks.fill([&](const Index& i) { return sinks[i[3]]; });
}
/// `value_at` gives 0 or 1 for kKeep, the bias for kBias; (B, H, Lq, Lk).
template <typename Function>
void set_mask(Call& c, Kind kind, Function&& value_at) {
  const Shape& s = c.shape;
  c.mask_kind = kind;
  c.mask =
      Tensor(kind == Kind::kKeep ? Storage::kByte : compute_storage_of(c.dtype),
             {s.B, s.H, s.Lq, s.Lk});
  c.mask.fill(value_at);
}

/// `keeps` says of (batch row, key) whether it may be attended to.
template <typename Function>
void set_key_mask(Call& c, Function&& keeps) {
  c.key_mask = Tensor(Storage::kByte, {1, 1, c.shape.B, c.shape.Lk});
  c.key_mask.fill([&](const Index& i) { return keeps(i[2], i[3]) ? 1 : 0; });
}

/// Calls that are cut into many tiles, blocks and splits.
inline std::vector<Call> large_calls(Dtype dtype) {
  std::vector<Call> calls;
  calls.push_back(normal_call(dtype, {1, 1, 1, 500, 1100, 20, 12}));
  calls.push_back(normal_call(dtype, {2, 6, 2, 131, 140, 16, 33}));
  calls.back().visibility.is_causal = true;
  calls.push_back(normal_call(dtype, {2, 3, 3, 257, 129, 5, 8}));
  calls.back().visibility.left = 20;
  calls.back().visibility.right = 7;
  set_key_lengths(calls.back(), {100, 129});
  calls.push_back(normal_call(dtype, {1, 4, 1, 150, 300, 9, 9}));
  calls.back().dropout = {0.3, 7, 9};
  set_mask(calls.back(), Kind::kBias, [](const Index& i) {
    return i[3] / 90 == i[2] % 3 ? -reference::kInfinity
                                 : 0.01 * static_cast<double>(i[2] - i[3]);
  });
  return calls;
}

/// What a failure needs to be understood.
inline std::string description(const Call& c) {
  const Shape& s = c.shape;
  const kernels::Visibility& v = c.visibility;
  std::ostringstream text;
  text << name_of(c.dtype) << " B" << s.B << " H" << s.H << " G" << s.G << " Lq"
       << s.Lq << " Lk" << s.Lk << " D" << s.D << " Dv" << s.Dv << " scale "
       << c.scale;
  if (c.softcap != 0) text << ", softcap " << c.softcap;
  if (v.is_causal) text << ", causal";
  if (!c.query_offsets.empty()) text << ", query offsets";
  for (double offset : c.query_offsets.values()) text << ' ' << offset;
  if (v.left >= 0 || v.right >= 0) {
    text << ", window " << v.left << ' ' << v.right;
  }
  if (!c.key_lengths.empty()) text << ", key lengths";
  for (double n : c.key_lengths.values()) text << ' ' << n;
  if (c.mask_kind == Kind::kKeep) text << ", keep mask";
  if (c.mask_kind == Kind::kBias) text << ", bias";
  if (c.mask_kind != Kind::kNone) {
    for (int64_t stride : c.mask.strides()) text << ' ' << stride;
  }
  if (!c.key_mask.empty()) {
    text << ", key mask " << c.key_mask.strides()[2] << ' '
         << c.key_mask.strides()[3];
  }
  if (!c.slopes.empty()) text << ", slopes";
  if (!c.sinks.empty()) text << ", sinks";
  if (c.dropout.probability > 0) text << ", dropout " << c.dropout.probability;
  return text.str();
}

}  // namespace kernel_test
