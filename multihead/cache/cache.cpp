// SPDX-License-Identifier: MIT
#include "multihead/cache.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <ostream>
#include <utility>
#include <vector>

#include "multihead/attention/storage.h"
#include "multihead/cache/room.h"
#include "multihead/kernels/mxint8.h"
#include "multihead/safetensors.h"
#include "multihead/text/dtypes.h"
#include "multihead/text/shapes.h"

namespace multihead {
namespace {

using at::Tensor;
using Numbers = std::vector<int64_t>;

Numbers numbers(const Tensor& integers) {
  const Tensor x = integers.to(at::kCPU, at::kLong).contiguous();
  const auto* data = x.const_data_ptr<int64_t>();
  return {data, data + x.numel()};
}

int64_t largest(const Numbers& x) { return *std::ranges::max_element(x); }

// Integers of one dimension, each from 0 to its limit; `count` of them, −1:
// any.
Numbers checked(const char* function, const char* name, const Tensor& x,
                int64_t count, const Numbers& limits) {
  TORCH_CHECK_VALUE(at::isIntegralType(x.scalar_type(), /*includeBool=*/false),
                    function, ": ", name, " must be integers, got ",
                    x.scalar_type());
  TORCH_CHECK_VALUE(
      x.dim() == 1 && (count < 0 ? x.numel() > 0 : x.numel() == count),
      function, ": ", name, " must have the shape (",
      count < 0 ? "rows" : std::to_string(count), ",), got ", shape_text(x));
  Numbers values = numbers(x);
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t limit = limits.size() == 1 ? limits[0] : limits.at(i);
    TORCH_CHECK_VALUE(values[i] >= 0 && values[i] <= limit, function, ": ",
                      name, " must be between 0 and ", limit, ", got ",
                      values[i], " in row ", i);
  }
  return values;
}

void check_rows(const char* name, const Tensor& x, const Tensor& room,
                int64_t length) {
  constexpr auto* fn = "KVCache.append: ";
  TORCH_CHECK(x.defined(), fn, name, " must be a tensor, got None");
  const std::array<int64_t, 4> shape{room.size(0), room.size(1), length,
                                     width_of(room).expect_int()};
  TORCH_CHECK(x.sizes() == at::IntArrayRef(shape), fn, name,
              " must have the shape (batch_size, num_kv_heads, tokens, width) "
              "of the cache, (",
              shape[0], ", ", shape[1], ", ",
              name[0] == 'k' ? "any" : std::to_string(length), ", ", shape[3],
              "), got ", shape_text(x));
  TORCH_CHECK(x.is_floating_point(), fn, name, " must be floating point, got ",
              x.scalar_type());
  TORCH_CHECK(x.device() == room.device(), fn, name,
              " must be on the device of the cache, ", room.device(), ", got ",
              x.device());
  TORCH_CHECK(!(at::GradMode::is_enabled() && x.requires_grad()), fn, name,
              " must not require gradients, which a cache does not keep: use "
              "torch.no_grad(), got one that does");
}

Tensor room_like(const Tensor& room, int64_t batch_size, int64_t capacity) {
  return empty_room({batch_size, room.size(1), capacity, room.size(3)},
                    room.options());
}

// The first `length` tokens of all rows in a room of another size.
Tensor moved(const Tensor& room, int64_t length, int64_t capacity) {
  Tensor larger = room_like(room, room.size(0), capacity);
  larger.narrow(2, 0, length).copy_(room.narrow(2, 0, length));
  return larger;
}

// key or value (B, G, L, ·) behind the `starts` of room's rows: counts[b] of
// row b.
void write(const Tensor& room, const Tensor& given, const Numbers& starts,
           const Numbers& counts) {
  const Tensor x = room.scalar_type() == at::kChar ? to_mxint8(given) : given;
  const auto same = [](const Numbers& n) {
    return std::ranges::all_of(n, [&](int64_t i) { return i == n[0]; });
  };
  if (same(starts) && same(counts)) {
    room.narrow(2, starts[0], counts[0]).copy_(x.narrow(2, 0, counts[0]));
    return;
  }
  for (size_t row = 0; row < starts.size(); ++row) {
    const auto b = static_cast<int64_t>(row);
    room.select(0, b)
        .narrow(1, starts[row], counts[row])
        .copy_(x.select(0, b).narrow(1, 0, counts[row]));
  }
}

bool is_cache_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble ||
         dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kChar;
}

// In the middle of a write PyTorch would refuse it.
void check_writable(const char* function, const Tensor& room) {
  TORCH_CHECK_VALUE(!room.is_inference() || c10::InferenceMode::is_enabled(),
                    function,
                    ": a cache that was made in inference mode must "
                    "be used there, got a call outside");
}

void check_size(const char* name, int64_t size, int64_t least) {
  TORCH_CHECK_VALUE(size >= least, "KVCache: ", name, " must be at least ",
                    least, ", got ", size);
}

}  // namespace

KVCache::KVCache(const KVCacheOptions& options)
    : max_length_(options.max_length()) {
  const int64_t value_dim = options.value_dim().value_or(options.head_dim());
  check_size("batch_size", options.batch_size(), 1);
  check_size("num_kv_heads", options.num_kv_heads(), 1);
  check_size("head_dim", options.head_dim(), 1);
  check_size("value_dim", value_dim, 1);
  check_size("capacity", options.capacity(), 0);
  check_size("max_length", max_length_.value_or(1), 1);
  TORCH_CHECK_VALUE(!max_length_ || options.capacity() <= *max_length_,
                    "KVCache: capacity must be at most max_length, ",
                    *max_length_, ", got ", options.capacity());
  const auto dtype =
      options.dtype().value_or(c10::get_default_dtype_as_scalartype());
  TORCH_CHECK_VALUE(
      is_cache_dtype(dtype),
      "KVCache: dtype must be float32, float64, bfloat16, float16 "
      "or int8, got ",
      dtype);
  const at::Device device = options.device().value_or(at::kCPU);
  TORCH_CHECK_VALUE(dtype != at::kChar || device.is_cpu(),
                    "KVCache: device must be the CPU with dtype int8, got ",
                    device);
  const auto tensors = at::TensorOptions().dtype(dtype).device(device);
  const int64_t capacity = max_length_.value_or(options.capacity());
  const auto room = [&](int64_t width) {
    const int64_t elements =
        dtype == at::kChar ? kernels::mxint8_bytes(width) : width;
    return empty_room(
        {options.batch_size(), options.num_kv_heads(), capacity, elements},
        tensors);
  };
  keys_ = room(options.head_dim());
  values_ = room(value_dim);
  lengths_ = at::zeros({options.batch_size()}, tensors.dtype(at::kLong));
}

KVCache::KVCache(Tensor keys, Tensor values, Tensor lengths,
                 std::optional<int64_t> max_length)
    : keys_(std::move(keys)),
      values_(std::move(values)),
      lengths_(std::move(lengths)),
      max_length_(max_length) {
  TORCH_CHECK_VALUE(
      keys_.dim() == 4 && values_.dim() == 4 &&
          keys_.sizes().slice(0, 3) == values_.sizes().slice(0, 3) &&
          keys_.size(0) > 0 && keys_.scalar_type() == values_.scalar_type() &&
          is_cache_dtype(keys_.scalar_type()),
      "KVCache: key and value must be (batch_size, num_kv_heads, tokens, "
      "width), float32, float64, bfloat16, float16 or int8, alike but for the "
      "width, got ",
      keys_.scalar_type(), " ", shape_text(keys_), " and ",
      values_.scalar_type(), " ", shape_text(values_));
  for (const auto& [name, x] :
       {std::pair("key", &keys_), {"value", &values_}}) {
    if (x->scalar_type() == at::kChar) check_mxint8("KVCache: ", name, *x);
  }
  TORCH_CHECK_VALUE(
      lengths_.scalar_type() == at::kLong && lengths_.dim() == 1 &&
          lengths_.size(0) == keys_.size(0),
      "KVCache: lengths must be int64 of the shape (", keys_.size(0),
      ",), got ", lengths_.scalar_type(), " ", shape_text(lengths_));
}

int64_t KVCache::length() const { return largest(numbers(lengths_)); }

Tensor KVCache::key() const { return keys_.narrow(2, 0, length()); }

Tensor KVCache::value() const { return values_.narrow(2, 0, length()); }

int64_t KVCache::bytes() const {
  return static_cast<int64_t>(keys_.nbytes() + values_.nbytes());
}

void KVCache::append(const Tensor& key, const Tensor& value,
                     const Tensor& counts) {
  const int64_t length = key.defined() && key.dim() == 4 ? key.size(2) : 0;
  check_rows("key", key, keys_, length);
  check_rows("value", value, values_, length);
  check_writable("KVCache.append", keys_);
  make_room(length, counts);
  const at::NoGradGuard no_grad;
  const Numbers starts = numbers(lengths_);
  const Numbers written =
      counts.defined() ? numbers(counts) : Numbers(starts.size(), length);
  write(keys_, key, starts, written);
  write(values_, value, starts, written);
  if (counts.defined()) {
    lengths_.add_(counts.to(lengths_.options()));
  } else {
    lengths_.add_(length);
  }
}

int64_t KVCache::make_room(int64_t length, const Tensor& counts) {
  constexpr auto* fn = "KVCache.append";
  Numbers ends = numbers(lengths_);
  const auto rows = static_cast<int64_t>(ends.size());
  const Numbers more = counts.defined()
                           ? checked(fn, "counts", counts, rows, {length})
                           : Numbers(ends.size(), length);
  for (size_t b = 0; b < ends.size(); ++b) {
    const int64_t before = ends[b];
    ends[b] += more[b];
    TORCH_CHECK_VALUE(!max_length_ || ends[b] <= *max_length_, fn,
                      ": key must leave at most max_length tokens, ",
                      *max_length_, ", in each row, got ", more[b],
                      " new ones for the ", before, " of row ", b);
  }
  const int64_t end = largest(ends);
  if (end > capacity()) reserve(std::max(end, 2 * capacity()));
  return end;
}

void KVCache::reserve(int64_t capacity) {
  TORCH_CHECK_VALUE(capacity >= 0,
                    "KVCache.reserve: capacity must be at least 0, got ",
                    capacity);
  TORCH_CHECK_VALUE(!max_length_ || capacity <= *max_length_,
                    "KVCache.reserve: capacity must be at most max_length, ",
                    max_length_.value_or(0), ", got ", capacity);
  if (capacity <= this->capacity()) return;
  const at::NoGradGuard no_grad;
  const int64_t length = this->length();
  Tensor keys = moved(keys_, length, capacity);
  values_ = moved(values_, length, capacity);
  keys_ = std::move(keys);
}

void KVCache::truncate(const Tensor& lengths) {
  const at::NoGradGuard no_grad;
  checked("KVCache.truncate", "lengths", lengths, lengths_.size(0),
          numbers(lengths_));
  lengths_.copy_(lengths);
}

void KVCache::reorder(const Tensor& indices) {
  const at::NoGradGuard no_grad;
  checked("KVCache.reorder", "indices", indices, -1, {lengths_.size(0) - 1});
  const Tensor rows = indices.to(lengths_.options());
  const auto chosen = [&](const Tensor& room) {
    Tensor other = room_like(room, rows.size(0), room.size(2));
    other.narrow(2, 0, length())
        .copy_(room.narrow(2, 0, length()).index_select(0, rows));
    return other;
  };
  Tensor keys = chosen(keys_);
  values_ = chosen(values_);
  keys_ = std::move(keys);
  lengths_ = lengths_.index_select(0, rows);
}

void KVCache::reset() { lengths_.zero_(); }

KVCache KVCache::clone() const {
  const at::NoGradGuard no_grad;
  return {moved(keys_, length(), capacity()),
          moved(values_, length(), capacity()), lengths_.clone(), max_length_};
}

void KVCache::save(const std::string& path) const {
  const at::NoGradGuard no_grad;
  const Tensor beyond = at::arange(length(), lengths_.options())
                            .ge(lengths_.unsqueeze(1))
                            .view({lengths_.size(0), 1, length(), 1});
  Safetensors file{.tensors = {{"key", key().masked_fill(beyond, 0)},
                               {"value", value().masked_fill(beyond, 0)},
                               {"lengths", lengths_}}};
  if (max_length_) file.metadata["max_length"] = std::to_string(*max_length_);
  write_safetensors(path, file);
}

KVCache KVCache::load(const std::string& path) {
  Safetensors file = read_safetensors(path);
  std::array<Tensor, 3> tensors;
  for (auto [i, name] : {std::pair(0, "key"), {1, "value"}, {2, "lengths"}}) {
    tensors[i] = file.tensors[name];
    TORCH_CHECK_VALUE(tensors[i].defined(), "KVCache.load: the file must have ",
                      "a tensor named ", name, ", got none: ", path);
  }
  KVCache cache(tensors[0], tensors[1], tensors[2]);
  checked("KVCache.load", "lengths", cache.lengths_, cache.lengths_.size(0),
          {cache.capacity()});
  if (const auto& given = file.metadata["max_length"]; !given.empty()) {
    const int64_t length = std::strtoll(given.c_str(), nullptr, 10);
    TORCH_CHECK_VALUE(length >= cache.capacity(), "KVCache.load: max_length ",
                      "must be at least the file's tokens, ", cache.capacity(),
                      ", got ", given);
    cache.reserve(length);
    cache.max_length_ = length;
  }
  return cache;
}

std::ostream& operator<<(std::ostream& stream, const KVCache& cache) {
  const Numbers lengths = numbers(cache.lengths());
  const auto [least, most] = std::ranges::minmax(lengths);
  stream << "KVCache(batch_size=" << cache.keys().size(0)
         << ", num_kv_heads=" << cache.keys().size(1)
         << ", head_dim=" << width_of(cache.keys())
         << ", value_dim=" << width_of(cache.values())
         << ", dtype=" << dtype_name(cache.keys().scalar_type())
         << ", lengths=" << least;
  if (least != most) stream << "–" << most;
  stream << ", capacity=" << cache.capacity();
  if (cache.max_length()) stream << ", max_length=" << *cache.max_length();
  return stream << ", bytes=" << cache.bytes() << ")";
}

}  // namespace multihead
