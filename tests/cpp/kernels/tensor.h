// SPDX-License-Identifier: MIT
//
// Four-dimensional arrays of any element type, with any strides, in guarded
// memory: what the kernels are given. Numbers go in and out as float64.
#pragma once

#include <array>
#include <vector>

#include "multihead/kernels/kernels.h"
#include "tests/cpp/kernels/guarded.h"

namespace kernel_test {

using multihead::kernels::Dtype;
using multihead::kernels::Float16;

enum class Storage { kFloat32, kFloat64, kBFloat16, kFloat16, kByte, kInt64 };

inline Storage storage_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
      return Storage::kFloat64;
    case Dtype::kBFloat16:
      return Storage::kBFloat16;
    case Dtype::kFloat16:
      return Storage::kFloat16;
    default:
      return Storage::kFloat32;
  }
}
inline Storage compute_storage_of(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? Storage::kFloat64 : Storage::kFloat32;
}

/// Of numbers.
inline Dtype dtype_of(Storage storage) {
  for (Dtype dtype : {Dtype::kFloat64, Dtype::kBFloat16, Dtype::kFloat16}) {
    if (storage_of(dtype) == storage) return dtype;
  }
  return Dtype::kFloat32;
}

inline size_t bytes_of(Storage storage) {
  switch (storage) {
    case Storage::kByte:
      return 1;
    case Storage::kBFloat16:
    case Storage::kFloat16:
      return 2;
    case Storage::kFloat32:
      return 4;
    default:
      return 8;
  }
}

/// The upper half of a float32, to the nearest, ties to even.
inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x == x) bits += 0x7FFF + (bits >> 16 & 1);
  return static_cast<uint16_t>(bits >> 16);
}
inline float from_bfloat16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

template <typename T>
void put(void* to, T x) {
  memcpy(to, &x, sizeof x);
}
template <typename T>
double take(const void* from) {
  T x;
  memcpy(&x, from, sizeof x);
  return static_cast<double>(x);
}

inline void encode(Storage storage, double x, void* to) {
  switch (storage) {
    case Storage::kFloat32:
      return put(to, static_cast<float>(x));
    case Storage::kFloat64:
      return put(to, x);
    case Storage::kBFloat16:
      return put(to, to_bfloat16(static_cast<float>(x)));
    case Storage::kFloat16:
      return put(to, static_cast<Float16>(x));
    case Storage::kByte:
      return put(to, static_cast<uint8_t>(x));
    case Storage::kInt64:
      return put(to, static_cast<int64_t>(x));
  }
}
inline double decode(Storage storage, const void* from) {
  switch (storage) {
    case Storage::kFloat32:
      return take<float>(from);
    case Storage::kFloat64:
      return take<double>(from);
    case Storage::kBFloat16: {
      uint16_t bits;
      memcpy(&bits, from, sizeof bits);
      return from_bfloat16(bits);
    }
    case Storage::kFloat16:
      return take<Float16>(from);
    case Storage::kByte:
      return take<uint8_t>(from);
    default:
      return take<int64_t>(from);
  }
}

using Index = std::array<int64_t, 4>;

/// Strides of dimensions laid out in `order`, slowest first, `gap` elements
/// left after each run of the fastest dimension.
inline Index strides_in_order(const Index& sizes,
                              const std::array<int, 4>& order,
                              int64_t gap = 0) {
  Index strides;
  int64_t next = 1;
  for (int n = 3; n >= 0; --n) {
    strides[order[n]] = next;
    next *= sizes[order[n]] > 0 ? sizes[order[n]] : 1;
    if (n == 3) next += gap;
  }
  return strides;
}
inline Index dense_strides(const Index& sizes) {
  return strides_in_order(sizes, {0, 1, 2, 3});
}

/// f(index) for each index below `sizes`, the last one fastest.
template <typename Function>
void for_each_index(const Index& sizes, Function&& f) {
  Index i;
  for (i[0] = 0; i[0] < sizes[0]; ++i[0])
    for (i[1] = 0; i[1] < sizes[1]; ++i[1])
      for (i[2] = 0; i[2] < sizes[2]; ++i[2])
        for (i[3] = 0; i[3] < sizes[3]; ++i[3]) f(i);
}

class Tensor {
 public:
  Tensor() = default;
  Tensor(Storage storage, const Index& sizes)
      : Tensor(storage, sizes, dense_strides(sizes)) {}
  Tensor(Storage storage, const Index& sizes, const Index& strides,
         Edge edge = Edge::kEnd)
      : storage_(storage), sizes_(sizes), strides_(strides) {
    int64_t extent = 1;
    for (int n = 0; n < 4; ++n) extent += (sizes[n] - 1) * strides[n];
    for (int n = 0; n < 4; ++n) extent = sizes[n] == 0 ? 0 : extent;
    memory_ = Guarded(static_cast<size_t>(extent) * bytes_of(storage), edge);
  }

  Storage storage() const { return storage_; }
  const Index& sizes() const { return sizes_; }
  const Index& strides() const { return strides_; }
  const Guarded& memory() const { return memory_; }
  void* data() const { return memory_.data(); }
  bool empty() const { return memory_.size() == 0; }

  std::byte* at(const Index& i) const {
    int64_t offset = 0;
    for (int n = 0; n < 4; ++n) offset += i[n] * strides_[n];
    return memory_.data() + offset * static_cast<int64_t>(bytes_of(storage_));
  }
  double get(const Index& i) const { return decode(storage_, at(i)); }
  void set(const Index& i, double x) const { encode(storage_, x, at(i)); }

  /// Every byte, gaps between rows included.
  void fill_bytes(int byte) const {
    memset(memory_.data(), byte, memory_.size());
  }
  template <typename Function>
  void fill(Function&& value_at) const {
    for_each_index(sizes_, [&](const Index& i) { set(i, value_at(i)); });
  }

  std::vector<double> values() const {
    std::vector<double> result;
    for_each_index(sizes_, [&](const Index& i) { result.push_back(get(i)); });
    return result;
  }
  /// The elements' bits, in the order of values(), wherever they lie.
  std::vector<uint64_t> bits() const {
    std::vector<uint64_t> result;
    for_each_index(sizes_, [&](const Index& i) {
      result.push_back(0);
      memcpy(&result.back(), at(i), bytes_of(storage_));
    });
    return result;
  }
  /// Bytes that belong to no element still hold `byte`.
  bool gaps_hold(int byte) const {
    std::vector<bool> covered(memory_.size());
    for_each_index(sizes_, [&](const Index& i) {
      const auto from = at(i) - memory_.data();
      for (size_t n = 0; n < bytes_of(storage_); ++n) covered[from + n] = true;
    });
    for (size_t n = 0; n < covered.size(); ++n) {
      if (!covered[n] && memory_.data()[n] != std::byte(byte)) return false;
    }
    return true;
  }

 private:
  Storage storage_ = Storage::kByte;
  Index sizes_ = {}, strides_ = {};
  Guarded memory_;
};

/// The same numbers with other strides, gaps filled with 0xFF: NaN.
inline Tensor laid_out(const Tensor& x, const Index& strides,
                       Edge edge = Edge::kEnd) {
  Tensor result(x.storage(), x.sizes(), strides, edge);
  if (result.memory().size() < size_t{1} << 28) result.fill_bytes(0xFF);
  for_each_index(x.sizes(), [&](const Index& i) {
    memcpy(result.at(i), x.at(i), bytes_of(x.storage()));
  });
  return result;
}
inline Tensor copy_of(const Tensor& x) { return laid_out(x, x.strides()); }

}  // namespace kernel_test
