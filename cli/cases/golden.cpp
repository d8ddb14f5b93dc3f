// SPDX-License-Identifier: MIT
#include "cli/cases/golden.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "cli/cases/case.h"
#include "reference/layer.h"

namespace cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Values values(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const at::Tensor dense = tensor.detach().to(at::kDouble).contiguous();
  const double* data = dense.const_data_ptr<double>();
  return {data, data + dense.numel()};
}

at::Tensor to_tensor(const Values& numbers, at::IntArrayRef sizes) {
  return at::from_blob(const_cast<double*>(numbers.data()), sizes, at::kDouble)
      .clone();
}

// bool `blocked` → 0 or −inf; float stays.
at::Tensor additive(const at::Tensor& mask, bool true_blocks) {
  if (mask.scalar_type() != at::kBool) return mask.to(at::kDouble);
  return at::zeros(mask.sizes(), at::kDouble)
      .masked_fill_(true_blocks ? mask : mask.logical_not(), -kInfinity);
}

// (B, Lq, Lk) sizes of a layer's call with the batch first.
at::Tensor batch_first(const at::Tensor& x,
                       const multihead::AttentionLayer& layer) {
  if (x.dim() == 2) return x.unsqueeze(0);
  return layer.batch_first ? x : x.transpose(0, 1);
}

// Every mask of a layer's call in one: (B, H, Lq, Lk + appended columns).
Values layer_bias(const reference::Attention& a, int64_t appended,
                  const multihead::ForwardOptions& options) {
  const int64_t keys = a.Lk - appended;
  at::Tensor bias = at::zeros({a.B, a.H, a.Lq, keys}, at::kDouble);
  if (const at::Tensor& mask = options.attn_mask(); mask.defined()) {
    const at::Tensor added = additive(mask, /*true_blocks=*/true);
    bias =
        bias + (mask.dim() == 3 ? added.view({a.B, a.H, a.Lq, keys}) : added);
  }
  if (const at::Tensor& padding = options.key_padding_mask();
      padding.defined()) {
    bias = bias + additive(padding, true).view({a.B, 1, 1, keys});
  }
  if (options.is_causal()) {
    const at::Tensor later =
        at::ones({a.Lq, keys}, at::kBool).triu(/*diagonal=*/1);
    bias = bias + additive(later, true);
  }
  return values(at::constant_pad_nd(bias, {0, appended}));
}

reference::Linear projection(const at::Tensor& own_weight,
                             const at::Tensor& own_bias,
                             const multihead::AttentionLayer& layer,
                             int64_t index) {
  const auto third = [&](const at::Tensor& packed) {
    return packed.defined() ? packed.chunk(3)[index] : packed;
  };
  return {
      values(own_weight.defined() ? own_weight : third(layer.in_proj_weight)),
      values(own_bias.defined() ? own_bias : third(layer.in_proj_bias))};
}

reference::Layer reference_layer(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value,
                                 const multihead::AttentionLayer& layer,
                                 const multihead::ForwardOptions& options) {
  const at::Tensor q = batch_first(query, layer), k = batch_first(key, layer),
                   v = batch_first(value, layer);
  const int64_t appended = layer.bias_k.defined() + layer.add_zero_attn;
  reference::Layer result;
  reference::Attention& a = result.attention;
  a.B = q.size(0);
  a.H = layer.num_heads;
  a.G = layer.num_kv_heads.value_or(layer.num_heads);
  a.Lq = q.size(1);
  a.Lk = k.size(1) + appended;
  a.D = a.Dv = layer.head_dim.value_or(layer.embed_dim / a.H);
  a.bias = layer_bias(a, appended, options);
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

std::string describe(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes());
}

int significand_bits(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return 8;
    case at::kHalf:
      return 11;
    case at::kFloat:
      return 24;
    default:
      return 53;
  }
}

}  // namespace

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

reference::Attention reference_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const multihead::AttentionOptions& options) {
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
  if (options.attn_mask.defined())
    a.bias = values(additive(options.attn_mask, /*true_blocks=*/false)
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

GoldenAttention golden_attention(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value,
                                 const multihead::AttentionOptions& options) {
  const reference::Attention a =
      reference_attention(query, key, value, options);
  const reference::Output result = reference::forward(a);
  const reference::Precision p = attention_precision(query.scalar_type());
  const std::vector<int64_t> out{a.B, a.H, a.Lq, a.Dv},
      pairs{a.B, a.H, a.Lq, a.Lk}, rows{a.B, a.H, a.Lq};
  const double lambda = result.lambda;
  return {{to_tensor(result.out, out),
           to_tensor(p.allowed(result.out_scale, lambda, p.forward), out)},
          {to_tensor(result.weights, pairs),
           to_tensor(p.allowed(result.weights, lambda, p.forward), pairs)},
          {to_tensor(result.logsumexp, rows),
           to_tensor(p.allowed_logsumexp(result.logsumexp, lambda), rows)}};
}

GoldenGradients golden_gradients(const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value,
                                 const multihead::AttentionOptions& options,
                                 const at::Tensor& dout) {
  const reference::Attention a =
      reference_attention(query, key, value, options);
  const reference::Output result = reference::forward(a);
  const reference::Gradients g = reference::backward(a, result, values(dout));
  const reference::Precision p = attention_precision(query.scalar_type());
  const auto golden = [&](const Values& value, const Values& scale, double c,
                          at::IntArrayRef sizes) {
    return Golden{to_tensor(value, sizes),
                  to_tensor(p.allowed(scale, result.lambda, c), sizes)};
  };
  return {golden(g.query, g.query_scale, p.backward, query.sizes()),
          golden(g.key, g.key_scale, p.backward, key.sizes()),
          golden(g.value, g.value_scale, p.backward_value, value.sizes())};
}

GoldenLayer golden_layer(const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value,
                         const multihead::AttentionLayer& layer,
                         const multihead::ForwardOptions& options) {
  const reference::Layer problem =
      reference_layer(query, key, value, layer, options);
  const reference::Attention& a = problem.attention;
  const reference::LayerOutput result = reference::forward(problem);
  const reference::Precision p = layer_precision(query.scalar_type());

  const auto like_query = [&](const Values& rows) {
    const at::Tensor out = to_tensor(rows, {a.B, a.Lq, layer.embed_dim});
    if (query.dim() == 2) return out.squeeze(0);
    return layer.batch_first ? out : out.transpose(0, 1);
  };
  const bool average = options.average_attn_weights();
  const Values weights =
      average ? reference::average_heads(result.weights, a) : result.weights;
  const auto like_weights = [&](const Values& pairs) {
    const at::Tensor all = average ? to_tensor(pairs, {a.B, a.Lq, a.Lk})
                                   : to_tensor(pairs, {a.B, a.H, a.Lq, a.Lk});
    return query.dim() == 2 ? all.squeeze(0) : all;
  };
  return {{like_query(result.out.value),
           like_query(p.allowed(result.out.scale, result.lambda, p.forward))},
          {like_weights(weights),
           like_weights(p.allowed(weights, result.lambda, p.forward))}};
}

Part make_part(std::string name, const at::Tensor& ours,
               const at::Tensor& pytorch, const std::optional<Golden>& golden) {
  Part part{.name = std::move(name), .shape = {}};
  if (!ours.defined()) {
    part.misfit = "missing";
    return part;
  }
  part.shape = ours.sizes().vec();
  part.digits = significand_bits(ours.scalar_type());
  part.ours = values(ours);
  if (pytorch.defined()) {
    part.pytorch = values(pytorch);
    if (ours.sizes() != pytorch.sizes() ||
        ours.scalar_type() != pytorch.scalar_type())
      part.misfit = describe(ours) + " instead of " + describe(pytorch);
  }
  if (golden) {
    part.golden = values(golden->value);
    if (golden->allowed.defined()) part.allowed = values(golden->allowed);
    if (ours.sizes() != golden->value.sizes())
      part.misfit = c10::str("shape ", ours.sizes(), " instead of ",
                             golden->value.sizes());
  }
  return part;
}

std::string short_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "f64";
    case at::kFloat:
      return "f32";
    case at::kBFloat16:
      return "bf16";
    case at::kHalf:
      return "f16";
    default:
      return c10::toString(dtype);
  }
}

}  // namespace cli
