// SPDX-License-Identifier: MIT
#include "cli/cases/calls.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "multihead/text/dtypes.h"
#include "reference/attention.h"

namespace cli {

Random::Random(uint64_t seed, const std::string& name)
    : seed_(0xcbf29ce484222325 ^ seed) {
  // FNV-1a: the same on every machine, which std::hash does not promise.
  for (const unsigned char c : name) seed_ = (seed_ ^ c) * 0x100000001b3;
  generator_ = at::detail::createCPUGenerator(seed_);
}

at::Tensor Random::normal(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::randn(sizes, generator_, at::kFloat).to(dtype);
}

at::Tensor Random::uniform(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::rand(sizes, generator_, at::kFloat).to(dtype);
}

at::Tensor Random::chance(at::IntArrayRef sizes, double p) {
  return at::empty(sizes, at::kBool).bernoulli_(p, generator_);
}

at::Tensor Random::weight(int64_t out, int64_t in, at::ScalarType dtype) {
  return (normal({out, in}) / std::sqrt(in)).to(dtype);
}

std::string short_name(at::ScalarType dtype) {
  return multihead::short_dtype(multihead::dtype_name(dtype));
}

at::Tensor leaf(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.detach().requires_grad_() : tensor;
}

at::Tensor later_keys(int64_t queries, int64_t keys) {
  return at::ones({queries, keys}, at::kBool).triu(/*diagonal=*/1);
}

// --- Attention ---------------------------------------------------------------

namespace {

at::Tensor heads(Random& random, const AttentionCall& call,
                 at::IntArrayRef sizes) {
  const int64_t B = sizes[0], H = sizes[1], L = sizes[2], D = sizes[3];
  switch (call.layout) {
    case Layout::kContiguous:
      return random.normal({B, H, L, D}, call.dtype);
    case Layout::kSequenceMajor:
      return random.normal({B, L, H, D}, call.dtype).transpose(1, 2);
    case Layout::kGapped:
      return random.normal({B, H, 2 * L, D}, call.dtype)
          .slice(2, 0, 2 * L, /*step=*/2);
  }
  return {};
}

at::Tensor draw_mask(const AttentionCall& call, Random& random) {
  const int64_t B = call.B, H = call.H, Lq = call.Lq, Lk = call.Lk;
  // Key 0 stays visible, so that no row is blocked by accident.
  const auto keep = [&](at::IntArrayRef sizes) {
    at::Tensor mask = random.chance(sizes, 0.75);
    mask.select(-1, 0).fill_(true);
    return mask;
  };
  using enum CallMask;
  if (call.mask == kKeep) return keep({Lq, Lk});
  if (call.mask == kKeepPerHead) return keep({B, H, Lq, Lk});
  if (call.mask == kFloat) return random.normal({Lq, Lk}, call.dtype);
  if (call.mask == kFloatPerHead) {
    const at::Tensor bias = random.normal({B, H, Lq, Lk}, call.dtype);
    return bias.masked_fill(keep(bias.sizes()).logical_not(),
                            -reference::kInfinity);
  }
  if (call.mask == kBlockedRows)
    return keep({Lq, Lk}).logical_and(
        at::arange(Lq).remainder(3).ne(0).unsqueeze(-1));
  if (call.mask == kHalfKeys)
    return at::arange(Lk).lt(Lk / 2).expand({B, 1, 1, Lk}).contiguous();
  if (call.mask == kTriangle) return later_keys(Lq, Lk).logical_not();
  return {};
}

}  // namespace

AttentionInputs draw(const AttentionCall& call, Random& random) {
  const int64_t G = call.G ? call.G : call.H;
  AttentionInputs x;
  x.query = heads(random, call, {call.B, call.H, call.Lq, call.D});
  x.key = heads(random, call, {call.B, G, call.Lk, call.D});
  x.value =
      heads(random, call, {call.B, G, call.Lk, call.Dv ? call.Dv : call.D});
  if (call.magnitude != 1) {
    x.query = x.query * call.magnitude;
    x.key = x.key * call.magnitude;
  }
  x.options = call.options;
  x.options.attn_mask = draw_mask(call, random);
  if (call.poison) {
    x.options.attn_mask.select(-1, call.Lk / 2).fill_(false);
    for (const at::Tensor& tensor : {x.key, x.value})
      tensor.select(2, call.Lk / 2).fill_(std::nan(""));
  }
  if (call.query_offset) x.options.query_offset = 7 - 8 * at::arange(call.B);
  if (call.key_lengths)
    x.options.key_lengths =
        at::linspace(call.shortest, call.Lk, call.B).to(at::kLong);
  if (call.key_mask)
    x.options.key_mask = random.chance({call.B, call.Lk}, 0.75);
  if (call.alibi)
    x.options.alibi_slopes = (at::arange(call.H) + 1).neg().exp2();
  if (call.sinks) x.options.sinks = random.normal({call.H});
  return x;
}

AttentionInputs leaves(const AttentionInputs& x) {
  return {leaf(x.query), leaf(x.key), leaf(x.value), x.options};
}

std::string shapes(const AttentionCall& c) {
  std::string text = c10::str("B", c.B, " H", c.H);
  if (c.G && c.G != c.H) text += c10::str(" G", c.G);
  text += c10::str(" L", c.Lq, " Lk", c.Lk, " D", c.D);
  if (c.Dv) text += c10::str(" Dv", c.Dv);
  return text + " " + short_name(c.dtype);
}

// --- Layers ------------------------------------------------------------------

namespace {

at::Tensor bias(Random& random, const LayerCall& call, int64_t size) {
  return call.bias ? random.normal({size}, call.dtype) : at::Tensor();
}

AttentionLayer draw_layer(const LayerCall& call, Random& random) {
  const int64_t E = call.E, D = call.D ? call.D : E / call.H;
  const int64_t G = call.G ? call.G : call.H;
  const int64_t kdim = call.kdim ? call.kdim : E;
  const int64_t vdim = call.vdim ? call.vdim : E;
  AttentionLayer layer;
  layer.embed_dim = E;
  layer.num_heads = call.H;
  if (call.G) layer.num_kv_heads = call.G;
  if (call.D) layer.head_dim = call.D;
  if (!call.G && kdim == E && vdim == E) {
    layer.in_proj_weight = random.weight(3 * E, E, call.dtype);
  } else {
    layer.q_proj_weight = random.weight(call.H * D, E, call.dtype);
    layer.k_proj_weight = random.weight(G * D, kdim, call.dtype);
    layer.v_proj_weight = random.weight(G * D, vdim, call.dtype);
  }
  if (call.G) {
    layer.q_proj_bias = bias(random, call, call.H * D);
    layer.k_proj_bias = bias(random, call, G * D);
    layer.v_proj_bias = bias(random, call, G * D);
  } else {
    layer.in_proj_bias = bias(random, call, 3 * E);
  }
  layer.out_proj_weight = random.weight(E, call.H * D, call.dtype);
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

void draw_mask(const LayerCall& call, Random& random, ForwardOptions& options) {
  const int64_t N = call.N, Lq = call.Lq;
  const int64_t Lk = call.inputs == Inputs::kSelf ? Lq : call.Lk;
  const auto padding = [&] {
    return call.batched ? blocked(random, {N, Lk}) : blocked(random, {Lk});
  };
  using enum LayerMask;
  const auto is = [&](auto... masks) { return ((call.mask == masks) || ...); };
  if (is(kBool, kBoolAndPadding, kBlockedRow))
    options.attn_mask(blocked(random, {Lq, Lk}));
  if (is(kBoolPerHead))
    options.attn_mask(blocked(random, {N * call.H, Lq, Lk}));
  if (is(kFloat)) options.attn_mask(random.normal({Lq, Lk}, call.dtype));
  if (is(kFloatPerHead))
    options.attn_mask(random.normal({N * call.H, Lq, Lk}, call.dtype));
  if (is(kCausalHint)) options.attn_mask(later_keys(Lq, Lk));
  if (is(kBlockedRow)) options.attn_mask().select(0, 1).fill_(true);
  if (is(kPadding, kBoolAndPadding)) options.key_padding_mask(padding());
  if (is(kFloatPadding)) {
    const at::Tensor bias = random.normal({N, Lk}, call.dtype);
    options.key_padding_mask(
        bias.masked_fill(padding(), -reference::kInfinity));
  }
  options.is_causal(is(kCausal, kCausalHint));
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
       {&AttentionLayer::in_proj_weight, &AttentionLayer::in_proj_bias,
        &AttentionLayer::out_proj_weight, &AttentionLayer::out_proj_bias,
        &AttentionLayer::bias_k, &AttentionLayer::bias_v})
    y.layer.*parameter = leaf(x.layer.*parameter);
  y.options.attn_mask(x.options.attn_mask());
  if (x.options.attn_mask().defined() &&
      x.options.attn_mask().is_floating_point())
    y.options.attn_mask(leaf(x.options.attn_mask()));
  return y;
}

std::string shapes(const LayerCall& c) {
  std::string text = c.batched ? c10::str("N", c.N, " ") : "";
  text += c10::str("L", c.Lq);
  if (c.inputs != Inputs::kSelf && c.Lk != c.Lq) text += c10::str(" Lk", c.Lk);
  text += c10::str(" E", c.E, " H", c.H);
  if (c.G) text += c10::str(" G", c.G);
  return text + " " + short_name(c.dtype);
}

// --- Blocks ------------------------------------------------------------------

namespace {

at::Tensor linear(const at::Tensor& x, const Affine& layer) {
  return at::linear(x, layer.weight, layer.bias);
}

at::Tensor norm(const at::Tensor& x, const Affine& layer) {
  return at::layer_norm(x, layer.weight.sizes(), layer.weight, layer.bias);
}

}  // namespace

std::vector<at::Tensor> Block::leaves() const {
  std::vector<at::Tensor> all{input};
  for (const Affine* part :
       {&attention_norm, &qkv, &merge, &mlp_norm, &up, &down})
    all.insert(all.end(), {part->weight, part->bias});
  return all;
}

int64_t Block::num_weights() const {
  return qkv.weight.numel() + merge.weight.numel() + up.weight.numel() +
         down.weight.numel();
}

Block draw(const BlockCall& call, Random& random) {
  const int64_t E = call.E;
  const auto linear = [&](int64_t out, int64_t in) {
    return Affine{leaf(random.weight(out, in, call.dtype)),
                  leaf(at::zeros({out}, call.dtype))};
  };
  const auto norm = [&] {
    return Affine{leaf(at::ones({E}, call.dtype)),
                  leaf(at::zeros({E}, call.dtype))};
  };
  return {.input = leaf(random.normal({call.N, call.L, E}, call.dtype)),
          .attention_norm = norm(),
          .qkv = linear(3 * E, E),
          .merge = linear(E, E),
          .mlp_norm = norm(),
          .up = linear(4 * E, E),
          .down = linear(E, 4 * E),
          .num_heads = call.H,
          .dropout_p = call.dropout};
}

at::Tensor forward(
    const Block& block,
    const std::function<at::Tensor(const AttentionInputs&)>& attend) {
  const at::Tensor heads =
      linear(norm(block.input, block.attention_norm), block.qkv)
          .unflatten(-1, {3, block.num_heads, -1})
          .permute({2, 0, 3, 1, 4});
  const at::Tensor attended =
      attend({heads[0],
              heads[1],
              heads[2],
              {.dropout_p = block.dropout_p, .is_causal = true}});
  const at::Tensor x =
      block.input + linear(attended.transpose(1, 2).flatten(2), block.merge);
  return x + linear(at::gelu(linear(norm(x, block.mlp_norm), block.up), "tanh"),
                    block.down);
}

std::string shapes(const BlockCall& c) {
  return c10::str("N", c.N, " L", c.L, " E", c.E, " H", c.H, " ",
                  short_name(c.dtype));
}

// --- Sequences and pages -----------------------------------------------------

std::string shapes(const RaggedCall& c) {
  const auto [least, most] = std::ranges::minmax(c.lengths);
  return c10::str("N", c.lengths.size(), " L", least, "-", most, " H", c.H,
                  " D", c.D, " ", short_name(c.dtype));
}

std::string shapes(const PagedCall& c) {
  return c10::str("H", c.H, " G", c.G, " Lk", c.Lk, " D", c.D, " page", c.page,
                  " ", short_name(c.dtype));
}

std::string shapes(const CachedCall& c) {
  const std::string under =
      c.storage == c.dtype ? "" : short_name(c.storage) + " under ";
  return c10::str("H", c.H, " G", c.G, " Lk", c.Lk, " D", c.D, " ", under,
                  short_name(c.dtype));
}

}  // namespace cli
