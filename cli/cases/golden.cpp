// SPDX-License-Identifier: MIT
#include "cli/cases/golden.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "cli/cases/answers.h"
#include "reference/layer.h"

namespace cli {
namespace {

at::Tensor to_tensor(const Values& numbers, at::IntArrayRef sizes) {
  return at::from_blob(const_cast<double*>(numbers.data()), sizes, at::kDouble)
      .clone();
}

// bool `blocked` → 0 or −inf; float stays.
at::Tensor additive(const at::Tensor& mask) {
  return pytorch::additive(mask, at::kDouble).to(at::kDouble);
}

// (B, Lq, Lk) sizes of a layer's call with the batch first.
at::Tensor batch_first(const at::Tensor& x, const AttentionLayer& layer) {
  if (x.dim() == 2) return x.unsqueeze(0);
  return layer.batch_first ? x : x.transpose(0, 1);
}

// Every mask of a layer's call in one: (B, H, Lq, Lk + appended columns).
Values layer_bias(const reference::Attention& a, int64_t appended,
                  const ForwardOptions& options) {
  const int64_t keys = a.Lk - appended;
  at::Tensor bias = at::zeros({a.B, a.H, a.Lq, keys}, at::kDouble);
  if (const at::Tensor& mask = options.attn_mask(); mask.defined()) {
    const at::Tensor added = additive(mask);
    bias =
        bias + (mask.dim() == 3 ? added.view({a.B, a.H, a.Lq, keys}) : added);
  }
  if (const at::Tensor& padding = options.key_padding_mask();
      padding.defined()) {
    bias = bias + additive(padding).view({a.B, 1, 1, keys});
  }
  if (options.is_causal()) bias = bias + additive(later_keys(a.Lq, keys));
  return values(at::constant_pad_nd(bias, {0, appended}));
}

reference::Linear projection(const at::Tensor& own_weight,
                             const at::Tensor& own_bias,
                             const AttentionLayer& layer, int64_t index) {
  const auto third = [&](const at::Tensor& packed) {
    return packed.defined() ? packed.chunk(3)[index] : packed;
  };
  return {
      values(own_weight.defined() ? own_weight : third(layer.in_proj_weight)),
      values(own_bias.defined() ? own_bias : third(layer.in_proj_bias))};
}

reference::Layer reference_layer(const LayerInputs& x) {
  const AttentionLayer& layer = x.layer;
  const at::Tensor q = batch_first(x.query, layer),
                   k = batch_first(x.key, layer),
                   v = batch_first(x.value, layer);
  const int64_t appended = layer.bias_k.defined() + layer.add_zero_attn;
  reference::Layer result;
  reference::Attention& a = result.attention;
  a.B = q.size(0);
  a.H = layer.num_heads;
  a.G = layer.num_kv_heads.value_or(layer.num_heads);
  a.Lq = q.size(1);
  a.Lk = k.size(1) + appended;
  a.D = a.Dv = layer.head_dim.value_or(layer.embed_dim / a.H);
  a.bias = layer_bias(a, appended, x.options);
  result.embed_dim = q.size(2);
  result.kdim = k.size(2);
  result.vdim = v.size(2);
  result.query = values(q);
  result.key = values(k);
  result.value = values(v);
  result.q = projection(layer.q_proj_weight, layer.q_proj_bias, layer, 0);
  result.k = projection(layer.k_proj_weight, layer.k_proj_bias, layer, 1);
  result.v = projection(layer.v_proj_weight, layer.v_proj_bias, layer, 2);
  result.out = {values(layer.out_proj_weight), values(layer.out_proj_bias)};
  result.bias_k = values(layer.bias_k);
  result.bias_v = values(layer.bias_v);
  result.add_zero_attn = layer.add_zero_attn;
  return result;
}

using reference::Attended;
using reference::Heads;
using reference::LinearGradients;
using reference::Precision;

at::Tensor no_bias() { return at::zeros({}, at::kDouble); }

// (B, L, H·D) ↔ (B, H, L, D)
Scaled split(const Scaled& rows, int64_t num_heads) {
  return rows.view([=](const at::Tensor& x) {
    return x.unflatten(-1, {num_heads, -1}).transpose(1, 2);
  });
}
Scaled merged(const Scaled& heads) {
  return heads.view(
      [](const at::Tensor& x) { return x.transpose(1, 2).flatten(2); });
}

Heads project(const LayerInputs& inputs) {
  const AttentionLayer& layer = inputs.layer;
  const auto heads = [&](const at::Tensor& x, int64_t index) {
    const at::Tensor& bias = layer.in_proj_bias;
    return split(linear(Scaled(batch_first(x, layer)),
                        layer.in_proj_weight.chunk(3)[index],
                        bias.defined() ? bias.chunk(3)[index] : bias),
                 layer.num_heads);
  };
  Heads x{.query = heads(inputs.query, 0),
          .key = heads(inputs.key, 1),
          .value = heads(inputs.value, 2),
          .keep = {},
          .bias = no_bias(),
          .scale = 1 / std::sqrt(layer.embed_dim / layer.num_heads),
          .average_weights = inputs.options.need_weights()};
  x.keep = pytorch::keep_mask({x.query.value,
                               x.key.value,
                               x.value.value,
                               {.is_causal = inputs.options.is_causal()}});
  if (const at::Tensor& mask = inputs.options.attn_mask(); mask.defined())
    x.keep = x.keep.logical_and(mask.logical_not());
  return x;
}

// `dy` is the gradient of the output, batch first.
void add_gradients(const LayerInputs& inputs, const Attended& x,
                   const Scaled& dy, Reference& reference) {
  const AttentionLayer& layer = inputs.layer;
  const Scaled q = merged(x.dquery), k = merged(x.dkey), v = merged(x.dvalue);
  const Scaled drows{at::cat({q.value, k.value, v.value}, -1),
                     at::cat({q.scale, k.scale, v.scale}, -1)};
  const Scaled dinput =
      matmul(drows, Scaled(layer.in_proj_weight))
          .view([&](const at::Tensor& t) { return batch_first(t, layer); });
  const LinearGradients in = linear_backward(
                            Scaled(batch_first(inputs.query, layer)), drows),
                        out = linear_backward(merged(x.out), dy);
  for (const auto& [name, gradient] : {std::pair("d query", dinput),
                                       {"d in_proj_weight", in.weight},
                                       {"d in_proj_bias", in.bias},
                                       {"d out_proj_weight", out.weight},
                                       {"d out_proj_bias", out.bias}})
    reference.parts.push_back({name, gradient, &Precision::backward});
}

}  // namespace

Values values(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const at::Tensor dense = tensor.detach().to(at::kDouble).contiguous();
  const double* data = dense.const_data_ptr<double>();
  return {data, data + dense.numel()};
}

reference::Precision attention_precision(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return reference::kFloat64;
    case at::kFloat:
      return reference::kFloat32;
    case at::kBFloat16:
      return reference::kBFloat16;
    case at::kHalf:
      return reference::kFloat16;
    default:
      TORCH_CHECK(false, "attention_precision: dtype must be floating, got ",
                  dtype);
  }
}

// The rounding of stored queries, keys and values counts as often as Λ is
// large.
reference::Precision layer_precision(at::ScalarType dtype) {
  reference::Precision p = attention_precision(dtype);
  if (p.own > 0) p.base = p.own;
  return p;
}

reference::Attention reference_attention(const AttentionInputs& x) {
  const auto& [query, key, value, options] = x;
  reference::Attention a;
  a.B = query.size(0);
  a.H = query.size(1);
  a.G = key.size(1);
  a.Lq = query.size(2);
  a.Lk = key.size(2);
  a.D = query.size(3);
  a.Dv = value.size(3);
  a.query = values(query);
  a.key = values(key);
  a.value = values(value);
  if (const at::Tensor& mask = options.attn_mask; mask.defined())
    a.bias =
        values(additive(pytorch::has_bias(options) ? mask : mask.logical_not())
                   .expand({a.B, a.H, a.Lq, a.Lk}));
  a.is_causal = options.is_causal;
  a.bottom_right =
      options.causal_alignment == multihead::CausalAlignment::kBottomRight;
  if (options.query_offset.defined()) {
    for (double offset : values(options.query_offset.expand({a.B})))
      a.query_offsets.push_back(static_cast<int64_t>(offset));
  }
  a.window = options.window;
  for (double length : values(options.key_lengths))
    a.key_lengths.push_back(static_cast<int64_t>(length));
  for (double keep : values(options.key_mask)) a.key_mask.push_back(keep != 0);
  a.scale = options.scale;
  a.softcap = options.softcap;
  if (options.alibi_slopes.defined())
    a.alibi_slopes = values(options.alibi_slopes.expand({a.B, a.H}));
  a.sinks = values(options.sinks);
  return a;
}

GoldenAttention golden_attention(const AttentionInputs& x,
                                 const at::Tensor& dout) {
  const reference::Attention a = reference_attention(x);
  const reference::Output result = reference::forward(a);
  const reference::Precision p = attention_precision(x.query.scalar_type());
  const double lambda = result.lambda;
  const auto golden = [&](const Values& value, const Values& scale, double c,
                          at::IntArrayRef sizes) {
    return Golden{to_tensor(value, sizes),
                  to_tensor(p.allowed(scale, lambda, c), sizes)};
  };
  const std::vector<int64_t> rows{a.B, a.H, a.Lq};
  GoldenAttention all{
      .out = golden(result.out, result.out_scale, p.forward,
                    {a.B, a.H, a.Lq, a.Dv}),
      .weights = golden(result.weights, result.weights, p.forward,
                        {a.B, a.H, a.Lq, a.Lk}),
      .logsumexp = {
          to_tensor(result.logsumexp, rows),
          to_tensor(p.allowed_logsumexp(result.logsumexp, lambda), rows)}};
  if (!dout.defined()) return all;
  const reference::Gradients g = reference::backward(a, result, values(dout));
  all.query = golden(g.query, g.query_scale, p.backward, x.query.sizes());
  all.key = golden(g.key, g.key_scale, p.backward, x.key.sizes());
  all.value = golden(g.value, g.value_scale, p.backward_value, x.value.sizes());
  return all;
}

GoldenLayer golden_layer(const LayerInputs& x) {
  const AttentionLayer& layer = x.layer;
  const reference::Layer problem = reference_layer(x);
  const reference::Attention& a = problem.attention;
  const reference::LayerOutput result = reference::forward(problem);
  const reference::Precision p = layer_precision(x.query.scalar_type());
  const bool batched = x.query.dim() == 3;
  const auto like_query = [&](const Values& rows) {
    const at::Tensor out = to_tensor(rows, {a.B, a.Lq, layer.embed_dim});
    if (!batched) return out.squeeze(0);
    return layer.batch_first ? out : out.transpose(0, 1);
  };
  const bool average = x.options.average_attn_weights();
  const Values weights =
      average ? reference::average_heads(result.weights, a) : result.weights;
  const auto like_weights = [&](const Values& pairs) {
    const at::Tensor all = average ? to_tensor(pairs, {a.B, a.Lq, a.Lk})
                                   : to_tensor(pairs, {a.B, a.H, a.Lq, a.Lk});
    return batched ? all : all.squeeze(0);
  };
  return {{like_query(result.out.value),
           like_query(p.allowed(result.out.scale, result.lambda, p.forward))},
          {like_weights(weights),
           like_weights(p.allowed(weights, result.lambda, p.forward))}};
}

// --- By matrix products ------------------------------------------------------

Reference reference_of(const AttentionInputs& inputs, const at::Tensor& dout) {
  const AttentionOptions& options = inputs.options;
  const int64_t G = inputs.key.size(1), group = inputs.query.size(1) / G;
  const auto repeated = [&](const at::Tensor& heads) {
    return Scaled(heads.detach().repeat_interleave(group, 1));
  };
  const Heads x{
      .query = Scaled(inputs.query),
      .key = repeated(inputs.key),
      .value = repeated(inputs.value),
      .keep = pytorch::keep_mask(inputs),
      .bias = pytorch::has_bias(options) ? options.attn_mask.to(at::kDouble)
                                         : no_bias(),
      .scale = options.scale.value_or(1 / std::sqrt(inputs.query.size(3))),
      .average_weights = false};
  const Attended y = attend(x, dout.defined() ? Scaled(dout) : Scaled());
  Reference reference{.parts = {{"output", y.out}}, .lambda = y.lambda};
  if (!dout.defined()) return reference;
  const auto grouped = [&](const at::Tensor& heads) {
    return heads.unflatten(1, {G, group}).sum(2);
  };
  reference.parts.insert(
      reference.parts.end(),
      {{"d query", y.dquery, &Precision::backward},
       {"d key", y.dkey.view(grouped), &Precision::backward},
       {"d value", y.dvalue.view(grouped), &Precision::backward_value}});
  return reference;
}

Reference reference_of(const LayerInputs& inputs, const at::Tensor& dout) {
  const AttentionLayer& layer = inputs.layer;
  Scaled dy, dheads;
  if (dout.defined()) {
    dy = Scaled(batch_first(dout, layer));
    dheads = split(matmul(dy, Scaled(layer.out_proj_weight)), layer.num_heads);
  }
  const Attended x = attend(project(inputs), dheads);
  const Scaled out =
      linear(merged(x.out), layer.out_proj_weight, layer.out_proj_bias)
          .view([&](const at::Tensor& t) { return batch_first(t, layer); });
  Reference reference{.parts = {{"output", out}}, .lambda = x.lambda};
  if (x.weights.defined())
    reference.parts.push_back({"weights", {x.weights, x.weights}});
  if (dout.defined()) add_gradients(inputs, x, dy, reference);
  return reference;
}

}  // namespace cli
