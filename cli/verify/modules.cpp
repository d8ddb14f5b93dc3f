// SPDX-License-Identifier: MIT
//
// multihead::MultiheadAttention and GroupedQueryAttention: projections, masks,
// options, gradients, against each of PyTorch's own routes.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <ranges>

#include "cli/cases/answers.h"
#include "cli/verify/verify.h"

namespace cli {
namespace {

// Output and, where asked for, weights.
std::vector<Part> parts(const Answer& ours, const Answer& pytorch,
                        const GoldenLayer& golden, bool with_weights) {
  std::vector<Part> result{
      make_part("out", std::get<0>(ours), std::get<0>(pytorch), golden.out)};
  if (with_weights)
    result.push_back(make_part("weights", std::get<1>(ours),
                               std::get<1>(pytorch), golden.weights));
  return result;
}

// PyTorch has to agree with the loops as well, but only where their results
// are the same by contract: not with dropout, nor where it answers NaN; and its
// 16-bit layers round more often than the budget allows.
bool loops_know(const LayerCall& call) {
  return call.dropout == 0 && call.mask != LayerMask::kBlockedRow;
}

GoldenLayer golden_beside_exact(const LayerInputs& x, const LayerCall& call) {
  if (!loops_know(call)) return {};
  GoldenLayer golden = golden_layer(x);
  if (at::elementSize(call.dtype) == 2)
    golden.out.allowed = golden.weights.allowed = at::Tensor();
  return golden;
}

// `exact` against a reference that is called with the same arguments.
auto compare_module_exact(Agreement demand,
                          Answer (*reference)(const LayerInputs&),
                          bool fast_path = false) {
  return [=](const LayerCall& call, Random& random) -> Comparison {
    LayerInputs x = draw(call, random);
    const BackendGuard exact(Backend::kExact);
    const at::NoGradGuard no_grad;
    x.options.fast_path(fast_path);
    at::manual_seed(random.seed());
    const Answer ours = ours::module(x);
    at::manual_seed(random.seed());
    const Answer pytorch = reference(x);
    return {.parts = parts(ours, pytorch, golden_beside_exact(x, call),
                           call.need_weights),
            .pytorch = demand};
  };
}

Comparison compare_module_auto(const LayerCall& call, Random& random) {
  const LayerInputs x = draw(call, random);
  const BackendGuard automatic(Backend::kAuto);
  const at::NoGradGuard no_grad;
  return {.parts =
              parts(ours::module(x), {}, golden_layer(x), call.need_weights)};
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
auto compare_module_gradients(Agreement demand,
                              Answer (*reference)(const LayerInputs&)) {
  return [=](const LayerCall& call, Random& random) -> Comparison {
    const LayerInputs drawn = draw(call, random);
    const LayerInputs ours = leaves(drawn), pytorch = leaves(drawn);
    const BackendGuard exact(Backend::kExact);
    at::manual_seed(random.seed());
    const at::Tensor out = std::get<0>(ours::module(ours));
    at::manual_seed(random.seed());
    const at::Tensor expected = std::get<0>(reference(pytorch));
    const at::Tensor dout = random.normal(out.sizes(), call.dtype);
    out.backward(dout);
    expected.backward(dout);
    std::vector<Part> parts = gradient_parts(ours, pytorch);
    parts.push_back(make_part("out", out, expected));
    return {.parts = std::move(parts), .pytorch = demand};
  };
}

// What PyTorch's inference path has, as self-attention: no odd number of heads.
bool native_has(const LayerCall& call) {
  using enum LayerMask;
  const auto masks = {kNone, kBool, kBoolPerHead, kPadding, kBoolAndPadding};
  return std::ranges::find(masks, call.mask) != masks.end() && call.bias &&
         call.H % 2 == 0 && !call.bias_kv && !call.zero_attn && !call.kdim &&
         call.batch_first && call.batched && call.dropout == 0;
}

std::vector<LayerCall> grouped_calls() {
  return {
      {.name = "4 heads, 4 groups", .G = 4},
      {.name = "4 heads, 2 groups", .G = 2},
      {.name = "4 heads, 2 groups, float64", .G = 2, .dtype = at::kDouble},
      {.name = "4 heads, 2 groups, bfloat16", .G = 2, .dtype = at::kBFloat16},
      {.name = "8 heads, one group", .H = 8, .G = 1},
      {.name = "6 heads, 3 groups, masks",
       .E = 24,
       .H = 6,
       .G = 3,
       .mask = LayerMask::kBoolAndPadding},
      {.name = "heads wider than E / H", .G = 2, .D = 10},
      {.name = "kdim 12, vdim 20, no biases",
       .G = 2,
       .kdim = 12,
       .vdim = 20,
       .bias = false},
      {.name = "causal, weights per head",
       .G = 2,
       .mask = LayerMask::kCausal,
       .average = false},
      {.name = "without weights", .G = 2, .need_weights = false},
      {.name = "self-attention", .G = 2, .inputs = Inputs::kSelf},
      {.name = "unbatched", .G = 2, .batched = false},
  };
}

// Every rule in each dtype, with and without weights.
std::vector<LayerCall> layer_calls() {
  using enum LayerMask;
  const std::vector<LayerCall> rules{
      {.name = "self-attention", .inputs = Inputs::kSelf},
      {.name = "key is value", .inputs = Inputs::kKeyIsValue},
      {.name = "query, key, value"},
      {.name = "bool mask", .mask = kBool},
      {.name = "bool mask per head", .mask = kBoolPerHead},
      {.name = "float mask", .mask = kFloat},
      {.name = "float mask per head", .mask = kFloatPerHead},
      {.name = "padding", .mask = kPadding},
      {.name = "float padding", .mask = kFloatPadding},
      {.name = "bool mask and padding", .mask = kBoolAndPadding},
      {.name = "causal", .mask = kCausal},
      {.name = "causal mask and hint", .mask = kCausalHint},
      {.name = "blocked row", .mask = kBlockedRow},
      {.name = "weights per head", .average = false},
      {.name = "bias_kv, batch of 6", .N = 6, .bias_kv = true},
      {.name = "zero_attn", .zero_attn = true},
      {.name = "bias_kv, zero_attn, batch of 6",
       .N = 6,
       .bias_kv = true,
       .zero_attn = true},
      {.name = "bias_kv, zero_attn, masks",
       .mask = kBoolAndPadding,
       .bias_kv = true,
       .zero_attn = true},
      {.name = "kdim = vdim = 12", .kdim = 12, .vdim = 12},
      {.name = "kdim 12, vdim 20", .kdim = 12, .vdim = 20},
      {.name = "one head", .H = 1},
      {.name = "heads of width 1", .H = 16},
      {.name = "longer", .Lq = 96, .Lk = 130, .E = 64},
      {.name = "no biases", .bias = false},
      {.name = "sequence first", .batch_first = false},
      {.name = "unbatched", .mask = kPadding, .batched = false},
      {.name = "dropout 0.1, same seed", .dropout = 0.1},
      {.name = "dropout 0.5, padding", .mask = kPadding, .dropout = 0.5},
  };
  std::vector<LayerCall> calls;
  for (const bool need_weights : {true, false})
    for (auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
      for (const LayerCall& rule : rules) {
        LayerCall& call = calls.emplace_back(rule);
        call.dtype = dtype;
        call.need_weights = need_weights;
        if (!need_weights) call.name += ", no weights";
      }
  return calls;
}

// Whether the operations of Python's module, and torch::nn's, have it.
bool python_module_has(const LayerCall& call) { return call.batched; }

bool nn_module_has(const LayerCall& call) {
  using enum LayerMask;
  const auto lacks = {kBoolPerHead, kFloatPerHead, kFloatPadding};
  return std::ranges::find(lacks, call.mask) == lacks.end() && call.batched &&
         call.kdim == call.vdim && call.need_weights;
}

LayerCall as_self_attention(LayerCall call) {
  call.inputs = Inputs::kSelf;
  return call;
}

}  // namespace

std::vector<Case> module_cases() {
  using std::views::filter;
  const std::vector<LayerCall> calls = layer_calls();
  std::vector<Case> cases;
  add_cases(cases,
            "MultiheadAttention, exact, against the operations of Python's "
            "module",
            calls | filter(python_module_has),
            compare_module_exact(Agreement::kBits, pytorch::python_module));
  // Its linear layers multiply and then add the bias, where Python's do both in
  // one product: some BLAS libraries round the two alike, some do not. Without
  // loops allclose judges, which is no measure of float32.
  add_cases(cases,
            "MultiheadAttention, exact, against torch::nn::MultiheadAttention",
            calls | filter(nn_module_has) | filter([](const LayerCall& call) {
              return call.dtype == at::kDouble ||
                     (call.dtype == at::kFloat && loops_know(call));
            }),
            compare_module_exact(Agreement::kClose, pytorch::nn_module));
  add_cases(
      cases,
      "MultiheadAttention, exact, inference, against "
      "at::_native_multi_head_attention",
      calls | filter(native_has) | std::views::transform(as_self_attention),
      compare_module_exact(Agreement::kBits, pytorch::native,
                           /*fast_path=*/true));
  add_cases(cases,
            "gradients of MultiheadAttention, exact, against the operations of "
            "Python's module",
            calls | filter(python_module_has),
            compare_module_gradients(Agreement::kBits, pytorch::python_module));
  // In float64: beside other operations float32 has no bound that holds for the
  // gradient of every parameter.
  add_cases(cases,
            "gradients of MultiheadAttention, exact, against "
            "torch::nn::MultiheadAttention",
            calls | filter(nn_module_has) | filter([](const LayerCall& call) {
              return call.dtype == at::kDouble;
            }),
            compare_module_gradients(Agreement::kClose, pytorch::nn_module));
  add_cases(cases, "MultiheadAttention, auto, against float64 loops",
            calls | filter([](const LayerCall& call) { return !call.dropout; }),
            compare_module_auto);
  add_cases(cases, "GroupedQueryAttention, auto, against float64 loops",
            grouped_calls(), compare_module_auto);
  return cases;
}

std::vector<std::string> known_wrong_answers(uint64_t seed) {
  const char* name = "torch::nn::MultiheadAttention with a bool mask";
  Random random(seed, name);
  const LayerInputs x = draw({.name = name,
                              .inputs = Inputs::kSelf,
                              .mask = LayerMask::kCausalHint,
                              .batch_first = false},
                             random);
  const at::NoGradGuard no_grad;
  const at::Tensor golden = golden_layer(x).out.value;
  const auto error = [&](const at::Tensor& out) {
    return (out - golden).abs().max().item<double>();
  };
  return {format("%s: wrong by %.2g (it adds True as 1); ours by %.1e", name,
                 error(pytorch::nn_module_unaided(x)),
                 error(std::get<0>(ours::module(x))))};
}

}  // namespace cli
