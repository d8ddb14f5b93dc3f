// SPDX-License-Identifier: MIT
#include "cli/cases/answers.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_native_multi_head_attention.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/activation.h>

#include <cmath>
#include <optional>

#include "multihead/modules.h"
#include "reference/attention.h"

namespace cli {
namespace {

// Keeps the state of torch's own generator as it is over its lifetime: making
// a module draws parameters, which must not shift the dropout that follows.
class KeepGenerator {
 public:
  KeepGenerator() : state_(generator().get_state()) {}
  ~KeepGenerator() { generator().set_state(state_); }
  KeepGenerator(const KeepGenerator&) = delete;
  KeepGenerator& operator=(const KeepGenerator&) = delete;

 private:
  static at::Generator generator() {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Tensor state_;
};

// MultiheadAttention, ours or torch::nn's, holding the layer's own tensors.
template <typename Module, typename Options>
Module multi_head(const AttentionLayer& layer, Options options) {
  const KeepGenerator keep;
  options.dropout(layer.dropout_p)
      .bias(layer.in_proj_bias.defined())
      .add_bias_kv(layer.bias_k.defined())
      .add_zero_attn(layer.add_zero_attn);
  if (!layer.in_proj_weight.defined())
    options.kdim(layer.k_proj_weight.size(1)).vdim(layer.v_proj_weight.size(1));
  Module module(options);
  module->train(layer.training);
  module->in_proj_weight = layer.in_proj_weight;
  module->q_proj_weight = layer.q_proj_weight;
  module->k_proj_weight = layer.k_proj_weight;
  module->v_proj_weight = layer.v_proj_weight;
  module->in_proj_bias = layer.in_proj_bias;
  module->out_proj->weight = layer.out_proj_weight;
  module->out_proj->bias = layer.out_proj_bias;
  module->bias_k = layer.bias_k;
  module->bias_v = layer.bias_v;
  return module;
}

multihead::GroupedQueryAttention grouped_query(const AttentionLayer& layer) {
  const KeepGenerator keep;
  multihead::GroupedQueryAttentionOptions options(
      layer.embed_dim, layer.num_heads, *layer.num_kv_heads);
  options.dropout(layer.dropout_p)
      .bias(layer.q_proj_bias.defined())
      .kdim(layer.k_proj_weight.size(1))
      .vdim(layer.v_proj_weight.size(1))
      .batch_first(layer.batch_first);
  options.head_dim(layer.head_dim);
  multihead::GroupedQueryAttention module(options);
  module->train(layer.training);
  module->q_proj->weight = layer.q_proj_weight;
  module->k_proj->weight = layer.k_proj_weight;
  module->v_proj->weight = layer.v_proj_weight;
  module->out_proj->weight = layer.out_proj_weight;
  module->q_proj->bias = layer.q_proj_bias;
  module->k_proj->bias = layer.k_proj_bias;
  module->v_proj->bias = layer.v_proj_bias;
  module->out_proj->bias = layer.out_proj_bias;
  return module;
}

template <typename Holder>
LayerForm forward_of(Holder module) {
  return [module](const LayerInputs& x) mutable {
    return module->forward(x.query, x.key, x.value, x.options);
  };
}

// --- The steps of Python's module --------------------------------------------

torch::nn::MultiheadAttention torch_module(const AttentionLayer& layer) {
  return multi_head<torch::nn::MultiheadAttention>(
      layer,
      torch::nn::MultiheadAttentionOptions(layer.embed_dim, layer.num_heads));
}

// Length, batch, head sizes of sequence-first input.
struct Sizes {
  int64_t L, S, N, E, H, d;
};

// A mask (…, S) with a visible column for each key that the layer appends.
at::Tensor pad(at::Tensor mask, const AttentionLayer& layer) {
  for (const bool appends : {layer.bias_k.defined(), layer.add_zero_attn})
    if (appends && mask.defined()) mask = at::constant_pad_nd(mask, {0, 1});
  return mask;
}

// The layer's masks as one float mask (1 or N·H, L or 1, S), or undefined.
at::Tensor merged_mask(const Sizes& s, at::ScalarType dtype,
                       const LayerInputs& inputs) {
  const auto& [query, key, value, layer, options] = inputs;
  at::Tensor mask = options.attn_mask();
  if (options.is_causal() && !mask.defined()) mask = later_keys(s.L, s.S);
  mask = pad(pytorch::additive(mask, dtype), layer);
  const at::Tensor padding =
      pad(pytorch::additive(options.key_padding_mask(), dtype), layer);
  if (mask.defined() && mask.dim() == 2) mask = mask.unsqueeze(0);
  if (!padding.defined()) return mask;
  const int64_t keys = padding.size(1);
  const at::Tensor rows = padding.view({s.N, 1, 1, keys})
                              .expand({s.N, s.H, 1, keys})
                              .reshape({s.N * s.H, 1, keys});
  return mask.defined() ? mask + rows : rows;
}

// A transposed view; tensors that were one stay one.
struct SequenceFirst {
  explicit SequenceFirst(const LayerInputs& x)
      : query(first(x.query, x)),
        key(x.key.is_same(x.query) ? query : first(x.key, x)),
        value(x.value.is_same(x.key) ? key : first(x.value, x)) {}
  static at::Tensor first(const at::Tensor& sequence, const LayerInputs& x) {
    return x.layer.batch_first ? sequence.transpose(0, 1) : sequence;
  }
  at::Tensor query, key, value;
};

// (L, N, E) inputs → projected; one product where inputs are one tensor, as
// its shape decides the last bit.
AttentionInputs project(const SequenceFirst& inputs,
                        const AttentionLayer& layer) {
  const auto& [query, key, value] = inputs;
  const at::Tensor &w = layer.in_proj_weight, &b = layer.in_proj_bias;
  const int64_t E = layer.embed_dim;
  const auto bias = [&](int64_t from, int64_t to) {
    return b.defined() ? b.slice(0, from, to) : b;
  };
  if (!w.defined())
    return {at::linear(query, layer.q_proj_weight, bias(0, E)),
            at::linear(key, layer.k_proj_weight, bias(E, 2 * E)),
            at::linear(value, layer.v_proj_weight, bias(2 * E, 3 * E))};
  const auto rows = [&](const at::Tensor& x, int64_t from, int64_t to) {
    return at::linear(x, w.slice(0, from, to), bias(from, to));
  };
  const auto parts = [&](const at::Tensor& joint, int64_t count) {
    return joint.unflatten(-1, {count, E})
        .unsqueeze(0)
        .transpose(0, -2)
        .squeeze(-2)
        .contiguous();
  };
  if (query.is_same(key) && key.is_same(value)) {
    const at::Tensor all = parts(at::linear(query, w, b), 3);
    return {all.select(0, 0), all.select(0, 1), all.select(0, 2)};
  }
  if (key.is_same(value)) {
    const at::Tensor both = parts(rows(key, E, 3 * E), 2);
    return {rows(query, 0, E), both.select(0, 0), both.select(0, 1)};
  }
  return {rows(query, 0, E), rows(key, E, 2 * E), rows(value, 2 * E, 3 * E)};
}

// Projected rows (L, N, E), the layer's bias row (1, 1, E) if it has one, and
// its zero row → heads (N·H, L, d).
at::Tensor cut_heads(at::Tensor rows, const at::Tensor& bias, bool zero,
                     const Sizes& s) {
  if (bias.defined()) rows = at::cat({rows, bias.repeat({1, s.N, 1})});
  const at::Tensor heads =
      rows.view({rows.size(0), s.N * s.H, s.d}).transpose(0, 1);
  if (!zero) return heads;
  return at::cat({heads, at::zeros({s.N * s.H, 1, s.d}, heads.options())}, 1);
}

// softmax(q·kᵀ/√d + mask)·v of heads (N·H, L, d), and the weights.
std::tuple<at::Tensor, at::Tensor> attend(const AttentionInputs& heads,
                                          const at::Tensor& mask, double p) {
  const double d = heads.query.size(2);
  const at::Tensor query = heads.query * std::sqrt(1.0 / d),
                   keys = heads.key.transpose(-2, -1);
  at::Tensor weights = at::softmax(
      mask.defined() ? at::baddbmm(mask, query, keys) : at::bmm(query, keys),
      -1);
  if (p > 0) weights = at::dropout(weights, p, /*train=*/true);
  const at::Tensor out = at::bmm(weights, heads.value);
  return {out.transpose(0, 1).contiguous(), weights};
}

// The same without weights, by PyTorch's function: (L, N·H, d).
at::Tensor attend_without_weights(const AttentionInputs& heads, at::Tensor mask,
                                  double p, bool is_causal, const Sizes& s) {
  const auto view = [&](const at::Tensor& x) {
    return x.view({s.N, s.H, x.size(1), s.d});
  };
  if (mask.defined())
    mask = mask.size(0) == 1
               ? mask.unsqueeze(0)
               : mask.view({s.N, s.H, mask.size(1), mask.size(2)});
  const at::Tensor out = at::scaled_dot_product_attention(
      view(heads.query), view(heads.key), view(heads.value),
      mask.defined() ? std::optional(mask) : std::nullopt, p, is_causal);
  return out.permute({2, 0, 1, 3}).contiguous();
}

// Positions of queries among the keys, (B or 1, 1, Lq, 1).
at::Tensor positions(const AttentionInputs& x, const at::Tensor& lengths) {
  const AttentionOptions& options = x.options;
  const int64_t Lq = x.query.size(2);
  const at::Tensor rows = at::arange(Lq).view({1, 1, Lq, 1});
  if (options.query_offset.defined())
    return rows + options.query_offset.view({-1, 1, 1, 1});
  const bool last_at_last =
      options.causal_alignment == multihead::CausalAlignment::kBottomRight;
  return last_at_last ? rows + lengths - Lq : rows;
}

// (B or 1, 1, 1, 1)
at::Tensor key_lengths(const AttentionInputs& x) {
  const at::Tensor& lengths = x.options.key_lengths;
  return lengths.defined() ? lengths.view({-1, 1, 1, 1})
                           : at::full({1, 1, 1, 1}, x.key.size(2), at::kLong);
}

}  // namespace

namespace ours {

LayerForm make_module(const AttentionLayer& layer) {
  if (layer.num_kv_heads) return forward_of(grouped_query(layer));
  multihead::MultiheadAttentionOptions options(layer.embed_dim,
                                               layer.num_heads);
  return forward_of(multi_head<multihead::MultiheadAttention>(
      layer, options.batch_first(layer.batch_first)));
}

Answer module(const LayerInputs& x) { return make_module(x.layer)(x); }

at::Tensor attention(const AttentionInputs& x) {
  return multihead::scaled_dot_product_attention(x.query, x.key, x.value,
                                                 x.options);
}

}  // namespace ours

namespace pytorch {

at::Tensor additive(const at::Tensor& mask, at::ScalarType dtype) {
  if (!mask.defined() || mask.scalar_type() != at::kBool) return mask;
  return at::zeros(mask.sizes(), dtype)
      .masked_fill_(mask, -reference::kInfinity);
}

LayerForm make_nn_module(const AttentionLayer& layer) {
  return [module = torch_module(layer)](const LayerInputs& inputs) mutable {
    const SequenceFirst x(inputs);
    const ForwardOptions& options = inputs.options;
    at::Tensor mask = options.attn_mask();
    if (options.is_causal() && !mask.defined())
      mask = later_keys(x.query.size(0), x.key.size(0));
    auto [out, weights] = module->forward(
        x.query, x.key, x.value, options.key_padding_mask(),
        options.need_weights(), additive(mask, x.query.scalar_type()),
        options.average_attn_weights());
    return Answer(SequenceFirst::first(out, inputs), weights);
  };
}

Answer nn_module(const LayerInputs& x) { return make_nn_module(x.layer)(x); }

at::Tensor nn_module_unaided(const LayerInputs& x) {
  return std::get<0>(torch_module(x.layer)->forward(
      x.query, x.key, x.value, x.options.key_padding_mask(),
      x.options.need_weights(), x.options.attn_mask(),
      x.options.average_attn_weights()));
}

AttentionLayer draw_layer(int64_t embed_dim, int64_t num_heads) {
  const torch::nn::MultiheadAttention module(
      torch::nn::MultiheadAttentionOptions(embed_dim, num_heads).bias(false));
  AttentionLayer layer;
  layer.embed_dim = embed_dim;
  layer.num_heads = num_heads;
  layer.in_proj_weight = module->in_proj_weight;
  layer.out_proj_weight = module->out_proj->weight;
  layer.batch_first = true;
  return layer;
}

Answer python_module(const LayerInputs& inputs) {
  const AttentionLayer& layer = inputs.layer;
  const ForwardOptions& options = inputs.options;
  const SequenceFirst x(inputs);
  const int64_t H = layer.num_heads, E = layer.embed_dim;
  const Sizes s{x.query.size(0), x.key.size(0), x.query.size(1), E, H, E / H};
  const AttentionInputs rows = project(x, layer);
  const bool zero = layer.add_zero_attn;
  const AttentionInputs heads{cut_heads(rows.query, {}, false, s),
                              cut_heads(rows.key, layer.bias_k, zero, s),
                              cut_heads(rows.value, layer.bias_v, zero, s)};
  const double p = layer.training ? layer.dropout_p : 0.0;
  // Without weights PyTorch takes the hint and drops the mask.
  const bool causal = options.is_causal() && !options.need_weights() &&
                      !options.key_padding_mask().defined();
  const at::Tensor mask =
      causal ? at::Tensor() : merged_mask(s, x.query.scalar_type(), inputs);
  at::Tensor out, weights;
  if (options.need_weights()) {
    std::tie(out, weights) = attend(heads, mask, p);
    weights = weights.view({s.N, H, s.L, weights.size(2)});
    if (options.average_attn_weights()) weights = weights.mean(1);
  } else {
    out = attend_without_weights(heads, mask, p, causal, s);
  }
  out = at::linear(out.view({s.L * s.N, E}), layer.out_proj_weight,
                   layer.out_proj_bias)
            .view({s.L, s.N, E});
  return {SequenceFirst::first(out, inputs), weights};
}

Answer native(const LayerInputs& inputs) {
  const auto& [query, key, value, layer, options] = inputs;
  const int64_t N = query.size(0), L = query.size(1), H = layer.num_heads;
  std::optional<at::Tensor> mask;
  std::optional<int64_t> type;
  if (const at::Tensor& padding = options.key_padding_mask();
      padding.defined()) {
    mask = padding;
    type = 1;
  }
  if (const at::Tensor& attn = options.attn_mask(); attn.defined()) {
    at::Tensor all =
        attn.dim() == 3 ? attn.view({N, H, L, L}) : attn.expand({N, H, L, L});
    if (mask) all = all.logical_or(mask->view({N, 1, 1, L}));
    mask = all;
    type = 2;
  }
  return at::_native_multi_head_attention(
      query, query, query, layer.embed_dim, H, layer.in_proj_weight,
      layer.in_proj_bias, layer.out_proj_weight, layer.out_proj_bias, mask,
      options.need_weights(), options.average_attn_weights(), type);
}

at::Tensor attention(const AttentionInputs& x) {
  const AttentionOptions& options = x.options;
  return at::scaled_dot_product_attention(
      x.query, x.key, x.value,
      options.attn_mask.defined() ? std::optional(options.attn_mask)
                                  : std::nullopt,
      options.dropout_p, options.is_causal, options.scale, options.enable_gqa);
}

bool has_bias(const AttentionOptions& options) {
  return options.attn_mask.defined() &&
         options.attn_mask.scalar_type() != at::kBool;
}

at::Tensor keep_mask(const AttentionInputs& x) {
  const AttentionOptions& options = x.options;
  const at::Tensor lengths = key_lengths(x), at_key = positions(x, lengths),
                   keys = at::arange(x.key.size(2));
  at::Tensor keep = keys.lt(lengths);
  if (options.key_mask.defined())
    keep = keep.logical_and(options.key_mask.unsqueeze(1).unsqueeze(1));
  if (options.is_causal) keep = keep.logical_and(keys.le(at_key));
  if (options.window) {
    const auto [left, right] = *options.window;
    if (left >= 0) keep = keep.logical_and(keys.ge(at_key - left));
    if (right >= 0) keep = keep.logical_and(keys.le(at_key + right));
  }
  const at::Tensor& given = options.attn_mask;
  return given.defined() && !has_bias(options) ? keep.logical_and(given) : keep;
}

at::Tensor attention_with_mask(const AttentionInputs& x) {
  const auto& [query, key, value, options] = x;
  const int64_t B = query.size(0), H = query.size(1), Lq = query.size(2),
                Lk = key.size(2), group = H / key.size(1);
  at::Tensor mask = at::zeros({B, H, Lq, Lk}, at::kDouble);
  if (has_bias(options)) mask = mask + options.attn_mask;
  if (options.alibi_slopes.defined()) {
    const at::Tensor at_key = positions(x, key_lengths(x));
    mask = mask - options.alibi_slopes.view({-1, H, 1, 1}) *
                      (at_key - at::arange(Lk)).abs();
  }
  mask = mask.masked_fill(keep_mask(x).logical_not(), -reference::kInfinity);
  return at::scaled_dot_product_attention(
      query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1),
      mask.to(query.scalar_type()), 0.0, false, options.scale);
}

}  // namespace pytorch
}  // namespace cli
