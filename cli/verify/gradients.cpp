// SPDX-License-Identifier: MIT
//
// Gradients: of the attention function against float64 loops, of whole layers
// bit for bit against PyTorch's.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>

#include "cli/cases/attention_call.h"
#include "cli/cases/case.h"
#include "cli/cases/golden.h"
#include "cli/cases/layer_call.h"
#include "cli/cases/ours.h"
#include "cli/cases/pytorch.h"

namespace cli {
namespace {

using multihead::Backend;
using multihead::BackendGuard;

struct AttentionGradients {
  at::Tensor query, key, value;
};

template <typename Attention>
AttentionGradients gradients(const AttentionInputs& x, const at::Tensor& dout,
                             Attention attention) {
  const AttentionInputs y = leaves(x);
  attention(y.query, y.key, y.value, y.options).backward(dout);
  return {y.query.grad(), y.key.grad(), y.value.grad()};
}

Comparison compare_attention(const AttentionCall& call, Random& random) {
  const AttentionInputs x = draw(call, random);
  const BackendGuard automatic(Backend::kAuto);
  const at::Tensor dout =
      random.normal({call.B, call.H, call.Lq, x.value.size(3)}, call.dtype);
  const auto ours = gradients(x, dout, multihead::scaled_dot_product_attention);
  AttentionGradients pytorch;
  if (!x.options.softcap && !x.options.sinks.defined())
    pytorch = gradients(x, dout, pytorch::attention_with_mask);
  const GoldenGradients golden =
      golden_gradients(x.query, x.key, x.value, x.options, dout);
  return {
      .parts = {make_part("d query", ours.query, pytorch.query, golden.query),
                make_part("d key", ours.key, pytorch.key, golden.key),
                make_part("d value", ours.value, pytorch.value, golden.value)}};
}

// Gradients of everything that has one, ours beside PyTorch's.
std::vector<Part> gradient_parts(const LayerInputs& ours,
                                 const LayerInputs& pytorch) {
  std::vector<Part> parts;
  const auto add = [&](const char* name, const at::Tensor& a,
                       const at::Tensor& b) {
    if (b.defined() && b.requires_grad())
      parts.push_back(make_part(name, a.grad(), b.grad()));
  };
  add("d query", ours.query, pytorch.query);
  if (!ours.key.is_same(ours.query)) add("d key", ours.key, pytorch.key);
  if (!ours.value.is_same(ours.key)) add("d value", ours.value, pytorch.value);
  const auto &a = ours.layer, &b = pytorch.layer;
  add("d in_proj_weight", a.in_proj_weight, b.in_proj_weight);
  add("d q_proj_weight", a.q_proj_weight, b.q_proj_weight);
  add("d k_proj_weight", a.k_proj_weight, b.k_proj_weight);
  add("d v_proj_weight", a.v_proj_weight, b.v_proj_weight);
  add("d in_proj_bias", a.in_proj_bias, b.in_proj_bias);
  add("d out_proj.weight", a.out_proj_weight, b.out_proj_weight);
  add("d out_proj.bias", a.out_proj_bias, b.out_proj_bias);
  add("d bias_k", a.bias_k, b.bias_k);
  add("d bias_v", a.bias_v, b.bias_v);
  add("d attn_mask", ours.options.attn_mask(), pytorch.options.attn_mask());
  return parts;
}

// `reference` is called with the same leaves.
template <typename Reference>
Comparison compare_layer(const LayerCall& call, Random& random,
                         Agreement demand, Reference reference) {
  const LayerInputs drawn = draw(call, random);
  const LayerInputs ours = leaves(drawn), pytorch = leaves(drawn);
  const BackendGuard exact(Backend::kExact);
  const auto output_of = [&](auto forward, const LayerInputs& x) {
    at::manual_seed(random.seed());
    return std::get<0>(forward(x.query, x.key, x.value, x.layer, x.options));
  };
  const at::Tensor out = output_of(ours::module, ours);
  const at::Tensor expected = output_of(reference, pytorch);
  const at::Tensor dout = random.normal(out.sizes(), call.dtype);
  out.backward(dout);
  expected.backward(dout);
  std::vector<Part> parts = gradient_parts(ours, pytorch);
  parts.push_back(make_part("out", out, expected));
  return {.parts = std::move(parts), .pytorch = demand};
}

Comparison compare_python_module(const LayerCall& call, Random& random) {
  return compare_layer(call, random, Agreement::kBits, pytorch::python_module);
}

Comparison compare_nn_module(const LayerCall& call, Random& random) {
  return compare_layer(call, random, Agreement::kClose, pytorch::nn_module);
}

std::vector<AttentionCall> attention_calls() {
  constexpr auto kBottomRight = multihead::CausalAlignment::kBottomRight;
  std::vector<AttentionCall> calls;
  for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    calls.push_back({.name = "no mask", .dtype = dtype});
  const std::vector<AttentionCall> more{
      {.name = "causal", .options = {.is_causal = true}},
      {.name = "bool mask", .mask = CallMask::kKeep},
      {.name = "float mask per head", .mask = CallMask::kFloatPerHead},
      {.name = "rows without a key", .mask = CallMask::kBlockedRows},
      {.name = "NaN behind the mask", .mask = CallMask::kKeep, .poison = true},
      {.name = "grouped heads 4/2", .G = 2, .options = {.enable_gqa = true}},
      {.name = "window (4, 5), bottom right",
       .options = {.causal_alignment = kBottomRight, .window = {{4, 5}}}},
      {.name = "softcap 1.5", .options = {.softcap = 1.5}},
      {.name = "ALiBi", .alibi = true},
      {.name = "sinks", .sinks = true},
      {.name = "causal, from an offset",
       .B = 3,
       .options = {.is_causal = true},
       .query_offset = true},
      {.name = "key lengths", .B = 3, .key_lengths = true},
      {.name = "key mask and float mask",
       .mask = CallMask::kFloat,
       .key_mask = true},
      {.name = "(B, L, H, D) memory", .layout = Layout::kSequenceMajor},
      {.name = "every rule at once",
       .B = 3,
       .G = 2,
       .options = {.is_causal = true,
                   .scale = 0.21,
                   .enable_gqa = true,
                   .window = {{20, 3}},
                   .softcap = 2.0},
       .mask = CallMask::kFloatPerHead,
       .query_offset = true,
       .key_lengths = true,
       .key_mask = true,
       .alibi = true,
       .sinks = true},
  };
  calls.insert(calls.end(), more.begin(), more.end());
  return calls;
}

std::vector<LayerCall> python_module_calls() {
  std::vector<LayerCall> calls{
      {.name = "self-attention", .inputs = Inputs::kSelf},
      {.name = "self-attention", .dtype = at::kDouble, .inputs = Inputs::kSelf},
      {.name = "self-attention",
       .dtype = at::kBFloat16,
       .inputs = Inputs::kSelf},
      {.name = "key is value", .inputs = Inputs::kKeyIsValue},
      {.name = "query, key, value", .mask = LayerMask::kBool},
      {.name = "padding", .mask = LayerMask::kPadding},
      {.name = "bias_kv, zero_attn, batch of 6",
       .N = 6,
       .bias_kv = true,
       .zero_attn = true},
      {.name = "kdim 12, vdim 20", .kdim = 12, .vdim = 20},
      {.name = "float mask with gradient", .mask = LayerMask::kFloat},
      {.name = "dropout 0.1, same seed", .dropout = 0.1},
  };
  const size_t count = calls.size();
  for (size_t i = 0; i < count; ++i) {
    calls.push_back(calls[i]);
    calls.back().name += ", no weights";
    calls.back().need_weights = false;
  }
  return calls;
}

// In float64: beside other operations float32 has no bound that holds for the
// gradient of every parameter.
std::vector<LayerCall> nn_module_calls() {
  std::vector<LayerCall> calls{
      {.name = "query, key, value"},
      {.name = "padding", .mask = LayerMask::kPadding},
      {.name = "bool mask", .mask = LayerMask::kBool},
      {.name = "bias_kv, zero_attn", .bias_kv = true, .zero_attn = true},
      {.name = "dropout 0.1, same seed", .dropout = 0.1},
  };
  for (LayerCall& call : calls) call.dtype = at::kDouble;
  return calls;
}

}  // namespace

std::vector<Case> gradient_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* group, const auto& calls, auto compare) {
    for (const auto& call : calls)
      cases.push_back(
          {group, call.name, shapes(call),
           [call, compare](Random& random) { return compare(call, random); }});
  };
  add("gradients of MultiheadAttention, exact, against the operations of "
      "Python's module",
      python_module_calls(), compare_python_module);
  add("gradients of MultiheadAttention, exact, against "
      "torch::nn::MultiheadAttention",
      nn_module_calls(), compare_nn_module);
  add("gradients of scaled_dot_product_attention, auto, against float64 loops",
      attention_calls(), compare_attention);
  return cases;
}

}  // namespace cli
