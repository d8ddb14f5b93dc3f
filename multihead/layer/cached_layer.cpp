// SPDX-License-Identifier: MIT
//
// A layer whose keys and values stay in a cache: self-attention of new tokens
// over all tokens so far.
#include "multihead/layer/cached_layer.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "multihead/attention/call.h"
#include "multihead/attention/count.h"
#include "multihead/cache.h"
#include "multihead/layer/checks.h"
#include "multihead/layer/ways.h"
#include "multihead/optional_tensor.h"
#include "multihead/text/shapes.h"

namespace multihead {
namespace {

using at::Tensor;

constexpr auto* kPrefix = "forward with a cache: ";

void check_cached(const Sequences& inputs, const AttentionLayer& layer,
                  const ForwardOptions& options) {
  const Tensor& query = inputs.query;
  TORCH_CHECK(query.dim() == 3, kPrefix, "query must be batched (3-D), got ",
              shape_text(query));
  TORCH_CHECK_VALUE(!options.attn_mask().defined(), kPrefix,
                    "attn_mask must be None, since it is causal by itself, "
                    "got a tensor");
  TORCH_CHECK_VALUE(
      !options.static_k().defined() && !options.static_v().defined(), kPrefix,
      "static_k and static_v must be None, got a tensor");
  TORCH_CHECK_VALUE(!layer.bias_k.defined() && !layer.add_zero_attn, kPrefix,
                    "add_bias_kv and add_zero_attn must be False, got True");
  TORCH_CHECK_VALUE(!layer.training || layer.dropout_p == 0.0, kPrefix,
                    "dropout must be 0 or the module in eval(), got ",
                    layer.dropout_p, " in training");
  check_forward(query, inputs.key, inputs.value, layer,
                ForwardOptions().need_weights(options.need_weights()));
  const int64_t length_dim = layer.batch_first ? 1 : 0;
  TORCH_CHECK(inputs.key.sym_size(length_dim) == query.sym_size(length_dim),
              kPrefix, "key must have as many tokens as query, ",
              query.sym_size(length_dim), ", got ",
              inputs.key.sym_size(length_dim));
  for (const Tensor* x :
       tensors_of(query, inputs.key, inputs.value, layer, options)) {
    TORCH_CHECK(!call::is_recorded(*x), kPrefix,
                "no argument or parameter must require gradients, which a "
                "cache does not keep: use torch.no_grad(), got one that does");
  }
}

void append(const CacheTensors& cache, const Tensor& key, const Tensor& value) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("multihead::kv_cache_append", "")
          .typed<void(const Tensor&, const Tensor&, const Tensor&,
                      const Tensor&, const Tensor&,
                      const std::optional<Tensor>&)>();
  op.call(cache.keys, cache.values, cache.lengths, key, value,
          optional(cache.counts));
}

}  // namespace

Tensor right_padded_counts(const Tensor& key_padding_mask, const Tensor& query,
                           bool batch_first) {
  constexpr auto* condition =
      "key_padding_mask must block the last tokens of each row and be bool of "
      "the shape (batch, tokens), which is ";
  TORCH_CHECK(query.dim() == 3, kPrefix, "query must be batched (3-D), got ",
              shape_text(query));
  const int64_t batch = query.size(batch_first ? 0 : 1);
  const int64_t length = query.size(batch_first ? 1 : 0);
  TORCH_CHECK_VALUE(
      key_padding_mask.scalar_type() == at::kBool &&
          key_padding_mask.sizes() == at::IntArrayRef({batch, length}),
      kPrefix, condition, "(", batch, ", ", length, "), got ",
      key_padding_mask.scalar_type(), " ", shape_text(key_padding_mask));
  const Tensor counts = length - key_padding_mask.sum(1);
  if (length > 1) {
    const Tensor opens = key_padding_mask.narrow(1, 0, length - 1)
                             .gt(key_padding_mask.narrow(1, 1, length - 1));
    TORCH_CHECK_VALUE(!opens.any().item<bool>(), kPrefix, condition, "(", batch,
                      ", ", length, "), got one that blocks earlier tokens");
  }
  return counts;
}

std::tuple<Tensor, Tensor> attend_cached(const Tensor& query, const Tensor& key,
                                         const Tensor& value,
                                         const AttentionLayer& layer,
                                         const ForwardOptions& options,
                                         const CacheTensors& cache) {
  check_cached({query, key, value}, layer, options);
  const SourceGuard source(Source::kModule);
  const Sequences heads =
      project_in_for_kernels({query, key, value}, layer, options);
  AttentionOptions attention{.is_causal = true,
                             .enable_gqa = true,
                             .causal_alignment = CausalAlignment::kBottomRight,
                             .key_lengths = cache.lengths};
  if (cache.counts
          .defined()) {  // the last query need not be a row's last token
    attention.causal_alignment = CausalAlignment::kTopLeft;
    attention.query_offset = cache.lengths.clone();
  }
  append(cache, heads.key, heads.value);
  const auto seen = [&](const Tensor& room) {
    const Tensor rows = cache.end ? room.narrow_symint(2, 0, *cache.end) : room;
    return rows.to(heads.query.scalar_type());
  };
  const Tensor keys = seen(cache.keys), values = seen(cache.values);
  if (!options.need_weights()) {
    return {project_out_of_kernels(scaled_dot_product_attention(
                                       heads.query, keys, values, attention),
                                   layer),
            Tensor()};
  }
  const Route way = route(heads.query, keys, values, attention);
  TORCH_CHECK(way.way == Way::kFused, kPrefix,
              "need_weights must be False where the kernels do not run, got "
              "True: ",
              way.reason);
  const auto [rows, logsumexp] = scaled_dot_product_attention_with_lse(
      heads.query, keys, values, attention);
  const std::optional<Tensor> no_dropout;
  return {project_out_of_kernels(rows, layer),
          call::run<call::AttentionWeights>(heads.query, keys, logsumexp,
                                            options.average_attn_weights(),
                                            attention, no_dropout)};
}

std::tuple<Tensor, Tensor> cached_forward(const Tensor& query,
                                          const Tensor& key,
                                          const Tensor& value,
                                          const AttentionLayer& layer,
                                          const ForwardOptions& options) {
  check_cached({query, key, value}, layer, options);
  const Tensor& padding = options.key_padding_mask();
  const Tensor counts =
      padding.defined() ? right_padded_counts(padding, query, layer.batch_first)
                        : Tensor();
  KVCache& cache = *options.cache();
  const int64_t end =
      cache.make_room(query.size(layer.batch_first ? 1 : 0), counts);
  return attend_cached(
      query, key, value, layer, options,
      {cache.keys(), cache.values(), cache.lengths(), counts, end});
}

}  // namespace multihead
