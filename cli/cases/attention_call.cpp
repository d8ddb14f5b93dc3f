// SPDX-License-Identifier: MIT
#include "cli/cases/attention_call.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/ones.h>

#include <cmath>
#include <limits>

#include "cli/cases/case.h"

namespace cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

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
  switch (call.mask) {
    case CallMask::kNone:
      return {};
    case CallMask::kKeep:
      return keep({Lq, Lk});
    case CallMask::kKeepPerHead:
      return keep({B, H, Lq, Lk});
    case CallMask::kFloat:
      return random.normal({Lq, Lk}, call.dtype);
    case CallMask::kFloatPerHead:
      return random.normal({B, H, Lq, Lk}, call.dtype)
          .masked_fill(keep({B, H, Lq, Lk}).logical_not(), -kInfinity);
    case CallMask::kBlockedRows:
      return keep({Lq, Lk}).logical_and(
          at::arange(Lq).remainder(3).ne(0).unsqueeze(-1));
    case CallMask::kHalfKeys:
      return at::arange(Lk).lt(Lk / 2).expand({B, 1, 1, Lk}).contiguous();
    case CallMask::kTriangle:
      return at::ones({Lq, Lk}, at::kBool).tril();
  }
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

at::Tensor leaf(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.detach().requires_grad_() : tensor;
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

}  // namespace cli
