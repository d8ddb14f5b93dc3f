// SPDX-License-Identifier: MIT
//
// KVCache for Python: its state is three tensors there, so that compiled and
// exported graphs see what a step changes. What reads lengths is an operator
// with kernels; graphs do not look into it.
#include "multihead/cache.h"

#include <torch/library.h>

#include "multihead/cache/room.h"
#include "multihead/functional.h"
#include "multihead/layer/cached_layer.h"
#include "multihead/optional_tensor.h"

namespace multihead {
namespace {

using at::Tensor;
using OptionalTensor = const std::optional<Tensor>&;
using Tensors = std::tuple<Tensor, Tensor, Tensor>;
using MaxLength = std::optional<int64_t>;

Tensors tensors_of(const KVCache& cache) {
  return {cache.keys(), cache.values(), cache.lengths()};
}

Tensors make(int64_t batch_size, int64_t num_kv_heads, int64_t head_dim,
             std::optional<int64_t> value_dim, int64_t capacity,
             MaxLength max_length, std::optional<at::ScalarType> dtype,
             std::optional<at::Device> device) {
  return tensors_of(KVCache(KVCacheOptions(batch_size, num_kv_heads, head_dim)
                                .value_dim(value_dim)
                                .capacity(capacity)
                                .max_length(max_length)
                                .dtype(dtype)
                                .device(device)));
}

// In place, so nothing can grow.
void append(const Tensor& keys, const Tensor& values, const Tensor& lengths,
            const Tensor& key, const Tensor& value, OptionalTensor counts) {
  KVCache(keys, values, lengths, keys.size(2))
      .append(key, value, or_undefined(counts));
}

std::tuple<Tensor, Tensor> extend(const Tensor& keys, const Tensor& values,
                                  const Tensor& lengths, const Tensor& key,
                                  const Tensor& value, OptionalTensor counts,
                                  MaxLength max_length) {
  KVCache cache(keys, values, lengths, max_length);
  cache.append(key, value, or_undefined(counts));
  return {cache.keys(), cache.values()};
}

std::tuple<Tensor, Tensor, int64_t> room(const Tensor& keys,
                                         const Tensor& values,
                                         const Tensor& lengths, int64_t length,
                                         OptionalTensor counts,
                                         MaxLength max_length) {
  KVCache cache(keys, values, lengths, max_length);
  const int64_t end = cache.make_room(length, or_undefined(counts));
  return {cache.keys(), cache.values(), end};
}

std::tuple<Tensor, Tensor> reserve(const Tensor& keys, const Tensor& values,
                                   const Tensor& lengths, int64_t capacity,
                                   MaxLength max_length) {
  KVCache cache(keys, values, lengths, max_length);
  cache.reserve(capacity);
  return {cache.keys(), cache.values()};
}

void truncate(const Tensor& keys, const Tensor& values, const Tensor& lengths,
              const Tensor& kept) {
  KVCache(keys, values, lengths).truncate(kept);
}

Tensors reorder(const Tensor& keys, const Tensor& values, const Tensor& lengths,
                const Tensor& indices) {
  KVCache cache(keys, values, lengths);
  cache.reorder(indices);
  return tensors_of(cache);
}

Tensors clone(const Tensor& keys, const Tensor& values, const Tensor& lengths) {
  return tensors_of(KVCache(keys, values, lengths).clone());
}

void save(const Tensor& keys, const Tensor& values, const Tensor& lengths,
          MaxLength max_length, const std::string& path) {
  KVCache(keys, values, lengths, max_length).save(path);
}

std::tuple<Tensor, Tensor, Tensor, MaxLength> load(const std::string& path) {
  const KVCache cache = KVCache::load(path);
  return {cache.keys(), cache.values(), cache.lengths(), cache.max_length()};
}

Tensor empty(at::IntArrayRef size, at::ScalarType dtype, at::Device device) {
  return empty_room(size, at::TensorOptions(device).dtype(dtype));
}

std::string text(const Tensor& keys, const Tensor& values,
                 const Tensor& lengths, MaxLength max_length) {
  return c10::str(KVCache(keys, values, lengths, max_length));
}

Tensor counts(const Tensor& key_padding_mask, OptionalTensor key,
              bool batch_first, std::string_view function) {
  return right_padded_counts(key_padding_mask, or_undefined(key), batch_first,
                             function);
}

std::tuple<Tensor, std::optional<Tensor>> attend(
    OptionalTensor query, OptionalTensor key, OptionalTensor value,
    const Tensor& keys, const Tensor& values, const Tensor& lengths,
    OptionalTensor counts, std::optional<c10::SymInt> end, int64_t embed_dim,
    int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
    OptionalTensor in_proj_weight, OptionalTensor in_proj_bias,
    OptionalTensor q_proj_weight, OptionalTensor q_proj_bias,
    OptionalTensor k_proj_weight, OptionalTensor k_proj_bias,
    OptionalTensor v_proj_weight, OptionalTensor v_proj_bias,
    OptionalTensor out_proj_weight, OptionalTensor out_proj_bias,
    OptionalTensor bias_k, bool add_zero_attn, double dropout_p, bool training,
    bool need_weights, OptionalTensor attn_mask, bool average_attn_weights,
    bool is_causal, bool batch_first, std::string_view backend) {
  const BackendGuard guard(backend_from_name(backend));
  const AttentionLayer layer{.embed_dim = embed_dim,
                             .num_heads = num_heads,
                             .num_kv_heads = num_kv_heads,
                             .head_dim = head_dim,
                             .in_proj_weight = or_undefined(in_proj_weight),
                             .q_proj_weight = or_undefined(q_proj_weight),
                             .k_proj_weight = or_undefined(k_proj_weight),
                             .v_proj_weight = or_undefined(v_proj_weight),
                             .in_proj_bias = or_undefined(in_proj_bias),
                             .q_proj_bias = or_undefined(q_proj_bias),
                             .k_proj_bias = or_undefined(k_proj_bias),
                             .v_proj_bias = or_undefined(v_proj_bias),
                             .out_proj_weight = or_undefined(out_proj_weight),
                             .out_proj_bias = or_undefined(out_proj_bias),
                             .is_projected = !in_proj_weight && !q_proj_weight,
                             .bias_k = or_undefined(bias_k),
                             .add_zero_attn = add_zero_attn,
                             .dropout_p = dropout_p,
                             .training = training,
                             .batch_first = batch_first};
  const auto [out, weights] = attend_cached(
      or_undefined(query), or_undefined(key), or_undefined(value), layer,
      ForwardOptions()
          .need_weights(need_weights)
          .attn_mask(or_undefined(attn_mask))
          .average_attn_weights(average_attn_weights)
          .is_causal(is_causal),
      {keys, values, lengths, or_undefined(counts), end});
  return {out, optional(weights)};
}

using Tags = std::vector<at::Tag>;

// A step of a decoder: what compiled and exported graphs see.
void define_steps(torch::Library& m, const Tags& tags) {
  m.def(
      "kv_cache_append(Tensor(a!) keys, Tensor(b!) values, "
      "Tensor(c!) lengths, Tensor key, Tensor value, Tensor? counts=None) "
      "-> ()",
      tags);
  m.def(
      "kv_cache_truncate(Tensor keys, Tensor values, Tensor(a!) lengths, "
      "Tensor kept) -> ()",
      tags);
  m.def(
      "kv_cache_reorder(Tensor keys, Tensor values, Tensor lengths, "
      "Tensor indices) -> (Tensor keys, Tensor values, Tensor lengths)",
      tags);
  m.def(
      "kv_cache_counts(Tensor key_padding_mask, Tensor? key, "
      "bool batch_first, str function) -> Tensor",
      tags);
  m.def(
      "cached_attention_forward(Tensor? query, Tensor? key, Tensor? value, "
      "Tensor(a!) keys, Tensor(b!) values, Tensor(c!) lengths, "
      "Tensor? counts, SymInt? end, int embed_dim, int num_heads, "
      "int num_kv_heads, int head_dim, *, Tensor? in_proj_weight=None, "
      "Tensor? in_proj_bias=None, Tensor? q_proj_weight=None, "
      "Tensor? q_proj_bias=None, Tensor? k_proj_weight=None, "
      "Tensor? k_proj_bias=None, Tensor? v_proj_weight=None, "
      "Tensor? v_proj_bias=None, Tensor? out_proj_weight=None, "
      "Tensor? out_proj_bias=None, Tensor? bias_k=None, "
      "bool add_zero_attn=False, float dropout_p=0.0, bool training=False, "
      "bool need_weights=True, Tensor? attn_mask=None, "
      "bool average_attn_weights=True, bool is_causal=False, "
      "bool batch_first=False, "
      "str backend=\"auto\") -> (Tensor out, Tensor? weights)",
      tags);
}

// Not for graphs: results may be arguments, or depend on what is in them.
void define_state(torch::Library& m) {
  const std::string cache = "(Tensor keys, Tensor values, Tensor lengths";
  const std::string room = "(Tensor(a) keys, Tensor(b) values, Tensor lengths";
  m.def(
      "kv_cache_make(int batch_size, int num_kv_heads, int head_dim, "
      "int? value_dim=None, int capacity=0, int? max_length=None, "
      "ScalarType? dtype=None, Device? device=None) -> "
      "(Tensor keys, Tensor values, Tensor lengths)");
  m.def(
      "kv_cache_extend(Tensor(a!) keys, Tensor(b!) values, "
      "Tensor(c!) lengths, Tensor key, Tensor value, Tensor? counts, "
      "int? max_length) -> (Tensor(a!), Tensor(b!))");
  m.def(("kv_cache_room" + room +
         ", int length, Tensor? counts, int? max_length) "
         "-> (Tensor(a), Tensor(b), int end)")
            .c_str());
  m.def(("kv_cache_reserve" + room +
         ", int capacity, int? max_length) -> (Tensor(a), Tensor(b))")
            .c_str());
  m.def(("kv_cache_clone" + cache + ") -> " + cache + ")").c_str());
  m.def(
      ("kv_cache_save" + cache + ", int? max_length, str path) -> ()").c_str());
  m.def(
      "kv_cache_load(str path) -> "
      "(Tensor keys, Tensor values, Tensor lengths, int? max_length)");
  m.def(
      "kv_cache_empty(int[] size, ScalarType dtype, Device device) -> Tensor");
  m.def(("kv_cache_text" + cache + ", int? max_length) -> str").c_str());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(multihead, m) {
  define_steps(m, {at::Tag::pt2_compliant_tag});
  define_state(m);
}

TORCH_LIBRARY_IMPL(multihead, CompositeImplicitAutograd, m) {
  m.impl("cached_attention_forward", &attend);
}

TORCH_LIBRARY_IMPL(multihead, CompositeExplicitAutograd, m) {
  m.impl("kv_cache_make", &make);
  m.impl("kv_cache_extend", &extend);
  m.impl("kv_cache_room", &room);
  m.impl("kv_cache_reserve", &reserve);
  m.impl("kv_cache_clone", &clone);
  m.impl("kv_cache_save", &save);
  m.impl("kv_cache_load", &load);
  m.impl("kv_cache_empty", &empty);
  m.impl("kv_cache_text", &text);
}

template <typename Library>
void implement_steps(Library& m) {
  m.impl("kv_cache_append", &append);
  m.impl("kv_cache_truncate", &truncate);
  m.impl("kv_cache_reorder", &reorder);
  m.impl("kv_cache_counts", &counts);
}

TORCH_LIBRARY_IMPL(multihead, CPU, m) { implement_steps(m); }
TORCH_LIBRARY_IMPL(multihead, CUDA, m) { implement_steps(m); }

TORCH_LIBRARY_IMPL(multihead, Meta, m) {
  m.impl("kv_cache_append",
         [](const Tensor&, const Tensor&, const Tensor&, const Tensor&,
            const Tensor&, OptionalTensor) {});
  m.impl("kv_cache_truncate",
         [](const Tensor&, const Tensor&, const Tensor&, const Tensor&) {});
  m.impl("kv_cache_reorder",
         [](const Tensor& keys, const Tensor& values, const Tensor& lengths,
            const Tensor& indices) -> Tensors {
           const auto rows = [&](const Tensor& x) {
             return x.index_select(0, indices);
           };
           return {rows(keys), rows(values), rows(lengths)};
         });
  m.impl("kv_cache_counts", [](const Tensor& mask, OptionalTensor, bool,
                               std::string_view) { return mask.sum(1); });
}

}  // namespace multihead
