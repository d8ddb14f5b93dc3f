// SPDX-License-Identifier: MIT
#include "cli/cases/layer_call.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>

#include <cmath>
#include <limits>

#include "cli/cases/attention_call.h"
#include "cli/cases/case.h"

namespace cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// (out, in), of a size that keeps the variance of what it multiplies.
at::Tensor weight(Random& random, const LayerCall& call, int64_t out,
                  int64_t in) {
  return (random.normal({out, in}) / std::sqrt(in)).to(call.dtype);
}

at::Tensor bias(Random& random, const LayerCall& call, int64_t size) {
  return call.bias ? random.normal({size}, call.dtype) : at::Tensor();
}

multihead::AttentionLayer draw_layer(const LayerCall& call, Random& random) {
  const int64_t E = call.E, D = call.D ? call.D : E / call.H;
  const int64_t G = call.G ? call.G : call.H;
  const int64_t kdim = call.kdim ? call.kdim : E;
  const int64_t vdim = call.vdim ? call.vdim : E;
  multihead::AttentionLayer layer;
  layer.embed_dim = E;
  layer.num_heads = call.H;
  if (call.G) layer.num_kv_heads = call.G;
  if (call.D) layer.head_dim = call.D;
  if (!call.G && kdim == E && vdim == E) {
    layer.in_proj_weight = weight(random, call, 3 * E, E);
  } else {
    layer.q_proj_weight = weight(random, call, call.H * D, E);
    layer.k_proj_weight = weight(random, call, G * D, kdim);
    layer.v_proj_weight = weight(random, call, G * D, vdim);
  }
  if (call.G) {
    layer.q_proj_bias = bias(random, call, call.H * D);
    layer.k_proj_bias = bias(random, call, G * D);
    layer.v_proj_bias = bias(random, call, G * D);
  } else {
    layer.in_proj_bias = bias(random, call, 3 * E);
  }
  layer.out_proj_weight = weight(random, call, E, call.H * D);
  layer.out_proj_bias = bias(random, call, E);
  if (call.bias_kv) {
    layer.bias_k = random.normal({1, 1, E}, call.dtype);
    layer.bias_v = random.normal({1, 1, E}, call.dtype);
  }
  layer.add_zero_attn = call.zero_attn;
  layer.dropout_p = call.dropout;
  layer.training = call.dropout > 0;
  layer.batch_first = call.batch_first;
  return layer;
}

// Key 0 stays visible, so that no row is blocked by accident.
at::Tensor blocked(Random& random, at::IntArrayRef sizes) {
  at::Tensor mask = random.chance(sizes, 0.3);
  mask.select(-1, 0).fill_(false);
  return mask;
}

void draw_mask(const LayerCall& call, Random& random,
               multihead::ForwardOptions& options) {
  const int64_t N = call.N, Lq = call.Lq;
  const int64_t Lk = call.inputs == Inputs::kSelf ? Lq : call.Lk;
  const auto padding = [&] {
    return call.batched ? blocked(random, {N, Lk}) : blocked(random, {Lk});
  };
  switch (call.mask) {
    case LayerMask::kNone:
      return;
    case LayerMask::kBool:
      options.attn_mask(blocked(random, {Lq, Lk}));
      return;
    case LayerMask::kBoolPerHead:
      options.attn_mask(blocked(random, {N * call.H, Lq, Lk}));
      return;
    case LayerMask::kFloat:
      options.attn_mask(random.normal({Lq, Lk}, call.dtype));
      return;
    case LayerMask::kFloatPerHead:
      options.attn_mask(random.normal({N * call.H, Lq, Lk}, call.dtype));
      return;
    case LayerMask::kPadding:
      options.key_padding_mask(padding());
      return;
    case LayerMask::kFloatPadding:
      options.key_padding_mask(random.normal({N, Lk}, call.dtype)
                                   .masked_fill(padding(), -kInfinity));
      return;
    case LayerMask::kBoolAndPadding:
      options.attn_mask(blocked(random, {Lq, Lk}));
      options.key_padding_mask(padding());
      return;
    case LayerMask::kCausalHint:
      options.attn_mask(at::ones({Lq, Lk}, at::kBool).triu(/*diagonal=*/1));
      [[fallthrough]];
    case LayerMask::kCausal:
      options.is_causal(true);
      return;
    case LayerMask::kBlockedRow:
      options.attn_mask(blocked(random, {Lq, Lk}));
      options.attn_mask().select(0, 1).fill_(true);
      return;
  }
}

}  // namespace

LayerInputs draw(const LayerCall& call, Random& random) {
  const auto sequence = [&](int64_t length, int64_t width) {
    if (!call.batched) return random.normal({length, width}, call.dtype);
    return call.batch_first
               ? random.normal({call.N, length, width}, call.dtype)
               : random.normal({length, call.N, width}, call.dtype);
  };
  LayerInputs x;
  x.query = sequence(call.Lq, call.E);
  x.key = call.inputs == Inputs::kSelf
              ? x.query
              : sequence(call.Lk, call.kdim ? call.kdim : call.E);
  x.value = call.inputs == Inputs::kDistinct
                ? sequence(call.Lk, call.vdim ? call.vdim : call.E)
                : x.key;
  x.layer = draw_layer(call, random);
  x.options.need_weights(call.need_weights).average_attn_weights(call.average);
  draw_mask(call, random, x.options);
  return x;
}

LayerInputs leaves(const LayerInputs& x) {
  LayerInputs y = x;
  y.query = leaf(x.query);
  y.key = x.key.is_same(x.query) ? y.query : leaf(x.key);
  y.value = x.value.is_same(x.key) ? y.key : leaf(x.value);
  for (auto parameter :
       {&multihead::AttentionLayer::in_proj_weight,
        &multihead::AttentionLayer::in_proj_bias,
        &multihead::AttentionLayer::out_proj_weight,
        &multihead::AttentionLayer::out_proj_bias,
        &multihead::AttentionLayer::bias_k, &multihead::AttentionLayer::bias_v})
    y.layer.*parameter = leaf(x.layer.*parameter);
  y.options.attn_mask(x.options.attn_mask());
  if (x.options.attn_mask().defined() &&
      x.options.attn_mask().is_floating_point())
    y.options.attn_mask(leaf(x.options.attn_mask()));
  return y;
}

std::string shapes(const LayerCall& c) {
  std::string text = c.batched ? c10::str("N", c.N, " ") : "";
  text += c.inputs == Inputs::kSelf ? c10::str("L", c.Lq)
                                    : c10::str("L", c.Lq, " Lk", c.Lk);
  text += c10::str(" E", c.E, " H", c.H);
  if (c.G) text += c10::str(" G", c.G);
  return text + " " + short_name(c.dtype);
}

}  // namespace cli
