// SPDX-License-Identifier: MIT
//
// Keys and values of the tokens that a decoder has seen. Rows lie as the
// kernels read them fastest, so attention over a cache copies nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <iosfwd>
#include <optional>
#include <string>

namespace [[gnu::visibility("default")]] multihead {

/// Options of KVCache.
struct KVCacheOptions {
  KVCacheOptions(int64_t batch_size, int64_t num_kv_heads, int64_t head_dim)
      : batch_size_(batch_size),
        num_kv_heads_(num_kv_heads),
        head_dim_(head_dim) {}

  TORCH_ARG(int64_t, batch_size);
  TORCH_ARG(int64_t, num_kv_heads);
  TORCH_ARG(int64_t, head_dim);                  ///< D, of keys
  TORCH_ARG(std::optional<int64_t>, value_dim);  ///< Dv; default head_dim
  TORCH_ARG(int64_t, capacity) = 0;  ///< tokens that fit before it grows
  /// Room for so many tokens is made at once, and more is an error. Without it
  /// a full cache grows to twice its capacity.
  TORCH_ARG(std::optional<int64_t>, max_length);
  /// Of what is stored; kChar: rows of to_mxint8 (mxint8.h). Attention reads
  /// bfloat16 under float32, and kChar, as they are.
  TORCH_ARG(std::optional<at::ScalarType>, dtype);
  TORCH_ARG(std::optional<at::Device>, device);
};

/// Keys (B, G, capacity, D), values (B, G, capacity, Dv) and, for each row of
/// the batch, how many tokens it has. Attention takes them so:
///
///   scaled_dot_product_attention(
///       query, cache.key(), cache.value(),
///       {.is_causal = true, .enable_gqa = true,
///        .causal_alignment = CausalAlignment::kBottomRight,
///        .key_lengths = cache.lengths()});
///
/// Methods throw c10::ValueError or c10::Error and leave the cache as it was.
class KVCache {
 public:
  explicit KVCache(const KVCacheOptions& options);

  /// Takes these tensors over, as they are; lengths (B) is int64.
  KVCache(at::Tensor keys, at::Tensor values, at::Tensor lengths,
          std::optional<int64_t> max_length = {});

  // A copy would share tensors until one of the two grows: see clone().
  KVCache(const KVCache&) = delete;
  KVCache& operator=(const KVCache&) = delete;
  KVCache(KVCache&&) = default;
  KVCache& operator=(KVCache&&) = default;
  ~KVCache() = default;

  /// Writes key (B, G, L, D) and value (B, G, L, Dv) behind what each row has,
  /// converted to the cache's dtype. Of row b the first counts[b] tokens are
  /// written where counts (B), integers from 0 to L, is given.
  void append(const at::Tensor& key, const at::Tensor& value,
              const at::Tensor& counts = {});

  /// Makes the room that appending L tokens will need, or counts[b] of them,
  /// and returns the longest length that this will leave.
  int64_t make_room(int64_t length, const at::Tensor& counts = {});

  /// Makes room for so many tokens in each row.
  void reserve(int64_t capacity);

  /// Of row b the first lengths[b] tokens stay: integers (B) from 0 to what the
  /// row has. The rest may be overwritten.
  void truncate(const at::Tensor& lengths);

  /// Row i becomes what row indices[i] was: integers (B'), for beams. B' may
  /// differ from B.
  void reorder(const at::Tensor& indices);

  /// Every row is empty, and the room stays.
  void reset();

  /// A copy that shares nothing.
  KVCache clone() const;

  /// Writes tokens, lengths and max_length as safetensors: "key", "value" and
  /// "lengths". What lies beyond a length is written as 0.
  void save(const std::string& path) const;

  /// Reads such a file. Throws SafetensorsError, and c10::ValueError where the
  /// file holds no cache.
  static KVCache load(const std::string& path);

  /// Views of the tokens up to the longest length: (B, G, length, D) and
  /// (B, G, length, Dv). Of shorter rows the rest means nothing. A later call
  /// may change what they show. Of kChar they are rows of to_mxint8.
  at::Tensor key() const;
  at::Tensor value() const;

  const at::Tensor& lengths() const { return lengths_; }  ///< (B), int64
  int64_t length() const;                                 ///< the longest
  int64_t capacity() const { return keys_.size(2); }
  const std::optional<int64_t>& max_length() const { return max_length_; }
  int64_t bytes() const;  ///< of keys and values, room included

  /// All of the room.
  const at::Tensor& keys() const { return keys_; }
  const at::Tensor& values() const { return values_; }

 private:
  at::Tensor keys_, values_, lengths_;
  std::optional<int64_t> max_length_;
};

/// Its sizes, dtype, lengths and room.
std::ostream& operator<<(std::ostream& stream, const KVCache& cache);

}  // namespace multihead
