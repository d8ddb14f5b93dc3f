// SPDX-License-Identifier: MIT
//
// A layer whose keys and values stay in a cache: self-attention of new tokens
// over all tokens so far, and attention to what a cache was given once.
#include "multihead/layer/cached_layer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>

#include "multihead/attention/call.h"
#include "multihead/attention/count.h"
#include "multihead/attention/storage.h"
#include "multihead/cache.h"
#include "multihead/layer/checks.h"
#include "multihead/layer/ways.h"
#include "multihead/optional_tensor.h"
#include "multihead/text/shapes.h"

namespace multihead {
namespace {

using at::Tensor;

constexpr std::string_view kForward = "forward with a cache";
constexpr std::string_view kAppend = "append_to_cache";

int64_t length_dim(bool batch_first) { return batch_first ? 1 : 0; }

void check_batched(std::string_view function, const char* name,
                   const Tensor& x) {
  TORCH_CHECK_TYPE(x.defined(), function, ": ", name,
                   " must be a tensor, got None");
  TORCH_CHECK(x.dim() == 3, function, ": ", name,
              " must be batched (3-D), got ", shape_text(x));
}

// What is not given, query, or key and value, as a sequence without tokens: the
// checks of all three are those of every layer.
Sequences completed(const Sequences& given, const AttentionLayer& layer) {
  const bool has_query = given.query.defined();
  const Tensor& like = has_query ? given.query : given.key;
  const auto no_tokens = [&](int64_t width) {
    auto sizes = like.sym_sizes().vec();
    sizes[length_dim(layer.batch_first)] = 0;
    sizes[2] = width;
    return like.new_empty_symint(sizes);
  };
  if (!has_query) {
    check_batched(kAppend, "key", given.key);
    check_batched(kAppend, "value", given.value);
    return {no_tokens(layer.embed_dim), given.key, given.value};
  }
  check_batched(kForward, "query", given.query);
  TORCH_CHECK_TYPE(
      given.key.defined() == given.value.defined(), kForward,
      ": key and value must be two tensors, or None both, got one");
  if (given.key.defined()) return given;
  const auto columns = [&](const Tensor& weight) {
    if (weight.defined()) return weight.size(1);
    return layer.is_projected ? num_kv_heads(layer) * head_dim(layer)
                              : layer.embed_dim;
  };
  return {given.query, no_tokens(columns(layer.k_proj_weight)),
          no_tokens(columns(layer.v_proj_weight))};
}

// The same three, judged.
Sequences checked(const Sequences& given, const AttentionLayer& layer,
                  const ForwardOptions& options) {
  const Sequences inputs = completed(given, layer);
  const std::string_view fn = given.query.defined() ? kForward : kAppend;
  TORCH_CHECK_VALUE(!options.attn_mask().defined(), fn,
                    ": attn_mask must be None, since what a token sees follows "
                    "from the cache, got a tensor");
  TORCH_CHECK_VALUE(given.key.defined() || !options.is_causal(), fn,
                    ": is_causal must be False where key is None, got True");
  TORCH_CHECK_VALUE(
      !options.static_k().defined() && !options.static_v().defined(), fn,
      ": static_k and static_v must be None, got a tensor");
  TORCH_CHECK_VALUE(!layer.bias_k.defined() && !layer.add_zero_attn, fn,
                    ": add_bias_kv and add_zero_attn must be False, got True");
  TORCH_CHECK_VALUE(!layer.training || layer.dropout_p == 0.0, fn,
                    ": dropout must be 0 or the module in eval(), got ",
                    layer.dropout_p, " in training");
  const auto& [query, key, value] = inputs;
  check_forward(query, key, value, layer,
                ForwardOptions().need_weights(options.need_weights()));
  const int64_t dim = length_dim(layer.batch_first);
  TORCH_CHECK(!given.query.defined() || !given.key.defined() ||
                  key.sym_size(dim) == query.sym_size(dim),
              fn, ": key must have as many tokens as query, ",
              query.sym_size(dim), ", got ", key.sym_size(dim));
  for (const Tensor* x : tensors_of(query, key, value, layer, options)) {
    TORCH_CHECK(!call::is_recorded(*x), fn,
                ": no argument or parameter must require gradients, which a "
                "cache does not keep: use torch.no_grad(), got one that does");
  }
  return inputs;
}

// With the bits of a layer without a cache: PyTorch multiplies by a view of a
// parameter otherwise where autograd keeps account of it.
Sequences projected(const Sequences& inputs, const AttentionLayer& layer,
                    const ForwardOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView past_autograd;
  return project_in_for_kernels(inputs, layer, options);
}

// Where nothing is appended, which would say so.
void check_held(const CacheTensors& cache, const Sequences& heads) {
  const Tensor &keys = cache.keys, &query = heads.query, &key = heads.key;
  TORCH_CHECK(keys.sym_size(0) == query.sym_size(0) &&
                  keys.sym_size(1) == key.sym_size(1) &&
                  width_of(keys) == key.sym_size(3) &&
                  width_of(cache.values) == heads.value.sym_size(3),
              kForward, ": cache must have the batch of query, ",
              query.sym_size(0), ", and the layer's ", key.sym_size(1),
              " key heads of width ", key.sym_size(3), ", got keys ",
              shape_text(keys), " and values ", shape_text(cache.values));
  TORCH_CHECK_VALUE(!cache.end || *cache.end > 0, kForward,
                    ": cache must hold tokens where key is None: see "
                    "append_to_cache, got an empty one");
}

void append(const CacheTensors& cache, const Sequences& heads) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("multihead::kv_cache_append", "")
          .typed<void(const Tensor&, const Tensor&, const Tensor&,
                      const Tensor&, const Tensor&,
                      const std::optional<Tensor>&)>();
  op.call(cache.keys, cache.values, cache.lengths, heads.key, heads.value,
          optional(cache.counts));
}

}  // namespace

Tensor right_padded_counts(const Tensor& key_padding_mask, const Tensor& key,
                           bool batch_first, std::string_view function) {
  TORCH_CHECK_VALUE(key.defined(), function,
                    ": key_padding_mask must be None where key is None: "
                    "append_to_cache takes it, got a tensor");
  constexpr auto* condition =
      ": key_padding_mask must block the last tokens of each row and be bool "
      "of the shape (batch, tokens), which is ";
  check_batched(function, "key", key);
  const int64_t dim = length_dim(batch_first);
  const int64_t batch = key.size(1 - dim), length = key.size(dim);
  TORCH_CHECK_VALUE(
      key_padding_mask.scalar_type() == at::kBool &&
          key_padding_mask.sizes() == at::IntArrayRef({batch, length}),
      function, condition, "(", batch, ", ", length, "), got ",
      key_padding_mask.scalar_type(), " ", shape_text(key_padding_mask));
  const Tensor counts = length - key_padding_mask.sum(1);
  if (length > 1) {
    const Tensor opens = key_padding_mask.narrow(1, 0, length - 1)
                             .gt(key_padding_mask.narrow(1, 1, length - 1));
    TORCH_CHECK_VALUE(!opens.any().item<bool>(), function, condition, "(",
                      batch, ", ", length,
                      "), got one that blocks earlier tokens");
  }
  return counts;
}

std::tuple<Tensor, Tensor> attend_cached(const Tensor& query, const Tensor& key,
                                         const Tensor& value,
                                         const AttentionLayer& layer,
                                         const ForwardOptions& options,
                                         const CacheTensors& cache) {
  const Sequences inputs = checked({query, key, value}, layer, options);
  const SourceGuard source(Source::kModule);
  const Sequences heads = projected(inputs, layer, options);
  AttentionOptions attention{.enable_gqa = true, .key_lengths = cache.lengths};
  if (!key.defined()) {
    check_held(cache, heads);
  } else if (cache.counts.defined()) {
    // The last query need not be a row's last token.
    attention.is_causal = true;
    attention.query_offset = cache.lengths.clone();
  } else {
    attention.is_causal = true;
    attention.causal_alignment = CausalAlignment::kBottomRight;
  }
  if (key.defined()) append(cache, heads);
  if (!query.defined()) return {inputs.query, Tensor()};
  const auto seen = [&](const Tensor& room) {
    const Tensor rows = cache.end ? room.narrow_symint(2, 0, *cache.end) : room;
    return is_stored(heads.query, rows) ? rows
                                        : rows.to(heads.query.scalar_type());
  };
  const Tensor keys = seen(cache.keys), values = seen(cache.values);
  if (!options.need_weights()) {
    return {project_out_of_kernels(scaled_dot_product_attention(
                                       heads.query, keys, values, attention),
                                   layer),
            Tensor()};
  }
  const Route way = route(heads.query, keys, values, attention);
  TORCH_CHECK(way.way == Way::kFused, kForward,
              ": need_weights must be False where the kernels do not run, got "
              "True: ",
              way.reason);
  const auto [rows, logsumexp] = scaled_dot_product_attention_with_lse(
      heads.query, keys, values, attention);
  const std::optional<Tensor> no_dropout;
  return {project_out_of_kernels(rows, layer),
          call::run<call::AttentionWeights>(
              heads.query, restored(heads.query, keys), logsumexp,
              options.average_attn_weights(), attention, no_dropout)};
}

std::tuple<Tensor, Tensor> cached_forward(const Tensor& query,
                                          const Tensor& key,
                                          const Tensor& value,
                                          const AttentionLayer& layer,
                                          const ForwardOptions& options) {
  checked({query, key, value}, layer, options);
  const Tensor& padding = options.key_padding_mask();
  const Tensor counts =
      padding.defined()
          ? right_padded_counts(padding, key, layer.batch_first,
                                query.defined() ? kForward : kAppend)
          : Tensor();
  const int64_t dim = length_dim(layer.batch_first);
  KVCache& cache = *options.cache();
  const int64_t end =
      cache.make_room(key.defined() ? key.size(dim) : 0, counts);
  return attend_cached(
      query, key, value, layer, options,
      {cache.keys(), cache.values(), cache.lengths(), counts, end});
}

}  // namespace multihead
