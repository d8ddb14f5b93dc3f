// SPDX-License-Identifier: MIT
//
// multihead::MultiheadAttention and GroupedQueryAttention: projections, masks,
// options, against each of PyTorch's own routes.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include "cli/cases/case.h"
#include "cli/cases/golden.h"
#include "cli/cases/layer_call.h"
#include "cli/cases/ours.h"
#include "cli/cases/pytorch.h"
#include "cli/terminal/format.h"

namespace cli {
namespace {

using multihead::Backend;
using multihead::BackendGuard;

// Output and, where asked for, weights.
std::vector<Part> parts(const std::tuple<at::Tensor, at::Tensor>& ours,
                        const std::tuple<at::Tensor, at::Tensor>& pytorch,
                        const std::optional<GoldenLayer>& golden,
                        bool with_weights) {
  const auto part = [&](const char* name, auto select) {
    return make_part(
        name, select(ours), select(pytorch),
        golden ? std::optional(name == std::string("out") ? golden->out
                                                          : golden->weights)
               : std::nullopt);
  };
  std::vector<Part> result{
      part("out", [](const auto& pair) { return std::get<0>(pair); })};
  if (with_weights)
    result.push_back(
        part("weights", [](const auto& pair) { return std::get<1>(pair); }));
  return result;
}

// PyTorch has to agree with the loops as well, but only where their results
// are the same by contract: not with dropout, nor where it answers NaN; and its
// 16-bit layers round more often than the budget allows.
std::optional<GoldenLayer> golden_beside_exact(const LayerInputs& x,
                                               const LayerCall& call) {
  if (call.dropout > 0 || call.mask == LayerMask::kBlockedRow) return {};
  GoldenLayer golden =
      golden_layer(x.query, x.key, x.value, x.layer, x.options);
  if (at::elementSize(call.dtype) == 2)
    golden.out.allowed = golden.weights.allowed = at::Tensor();
  return golden;
}

// `exact` against a reference that is called with the same arguments.
template <typename Reference>
Comparison compare_exact(const LayerCall& call, Random& random,
                         Agreement demand, Reference reference) {
  LayerInputs x = draw(call, random);
  const BackendGuard exact(Backend::kExact);
  const at::NoGradGuard no_grad;
  x.options.fast_path(false);
  at::manual_seed(random.seed());
  const auto ours = ours::module(x.query, x.key, x.value, x.layer, x.options);
  at::manual_seed(random.seed());
  const auto pytorch = reference(x.query, x.key, x.value, x.layer, x.options);
  return {.parts = parts(ours, pytorch, golden_beside_exact(x, call),
                         call.need_weights),
          .pytorch = demand};
}

Comparison compare_python_module(const LayerCall& call, Random& random) {
  return compare_exact(call, random, Agreement::kBits, pytorch::python_module);
}

// Its linear layers multiply and then add the bias, where Python's do both in
// one product: some BLAS libraries round the two alike, some do not.
Comparison compare_nn_module(const LayerCall& call, Random& random) {
  return compare_exact(call, random, Agreement::kClose, pytorch::nn_module);
}

Comparison compare_native(const LayerCall& call, Random& random) {
  const LayerInputs x = draw(call, random);
  const BackendGuard exact(Backend::kExact);
  const at::NoGradGuard no_grad;
  const auto ours = ours::module(x.query, x.query, x.query, x.layer, x.options);
  const auto pytorch = pytorch::native(x.query, x.layer, x.options);
  return {.parts = parts(ours, pytorch, golden_beside_exact(x, call),
                         call.need_weights),
          .pytorch = Agreement::kBits};
}

Comparison compare_auto(const LayerCall& call, Random& random) {
  const LayerInputs x = draw(call, random);
  const BackendGuard automatic(Backend::kAuto);
  const at::NoGradGuard no_grad;
  const auto ours = ours::module(x.query, x.key, x.value, x.layer, x.options);
  const auto golden = golden_layer(x.query, x.key, x.value, x.layer, x.options);
  return {.parts = parts(ours, {}, golden, call.need_weights)};
}

constexpr auto kWide = {at::kFloat, at::kDouble};
constexpr auto kEvery = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

// What Python's module has and the C++ one has too.
std::vector<LayerCall> common_calls() {
  std::vector<LayerCall> calls;
  for (auto dtype : kWide) {
    const auto add = [&](LayerCall call) {
      call.dtype = dtype;
      calls.push_back(call);
    };
    add({.name = "self-attention", .inputs = Inputs::kSelf});
    add({.name = "key is value", .inputs = Inputs::kKeyIsValue});
    add({.name = "query, key, value"});
    add({.name = "bool mask", .mask = LayerMask::kBool});
    add({.name = "padding", .mask = LayerMask::kPadding});
    add({.name = "bool mask and padding", .mask = LayerMask::kBoolAndPadding});
    add({.name = "causal", .mask = LayerMask::kCausal});
    add({.name = "weights per head", .average = false});
    add({.name = "bias_kv, batch of 6", .N = 6, .bias_kv = true});
  }
  const std::vector<LayerCall> more{
      {.name = "float mask", .mask = LayerMask::kFloat},
      {.name = "sequence first", .batch_first = false},
      {.name = "no biases", .bias = false},
      {.name = "zero_attn", .zero_attn = true},
      {.name = "bias_kv, zero_attn, masks",
       .mask = LayerMask::kBoolAndPadding,
       .bias_kv = true,
       .zero_attn = true},
      {.name = "kdim = vdim = 12", .kdim = 12, .vdim = 12},
      {.name = "one head", .H = 1},
      {.name = "heads of width 1", .H = 16},
      {.name = "longer", .Lq = 96, .Lk = 130, .E = 64},
  };
  calls.insert(calls.end(), more.begin(), more.end());
  return calls;
}

// In float64 alone: no float64 loops know these results, and allclose is no
// measure of float32.
std::vector<LayerCall> nn_module_calls() {
  std::vector<LayerCall> calls = common_calls();
  const std::vector<LayerCall> more{
      {.name = "blocked row is NaN",
       .dtype = at::kDouble,
       .mask = LayerMask::kBlockedRow},
      {.name = "dropout 0.1, same seed", .dtype = at::kDouble, .dropout = 0.1},
      {.name = "dropout 0.5, padding",
       .dtype = at::kDouble,
       .mask = LayerMask::kPadding,
       .dropout = 0.5},
  };
  calls.insert(calls.end(), more.begin(), more.end());
  return calls;
}

std::vector<LayerCall> python_module_calls() {
  std::vector<LayerCall> calls = common_calls();
  for (auto dtype : {at::kBFloat16, at::kHalf})
    calls.push_back({.name = "bool mask and padding",
                     .dtype = dtype,
                     .mask = LayerMask::kBoolAndPadding});
  const std::vector<LayerCall> more{
      {.name = "bool mask per head", .mask = LayerMask::kBoolPerHead},
      {.name = "float padding", .mask = LayerMask::kFloatPadding},
      {.name = "kdim 12, vdim 20", .kdim = 12, .vdim = 20},
      {.name = "blocked row is NaN", .mask = LayerMask::kBlockedRow},
      {.name = "dropout 0.1, same seed", .dropout = 0.1},
      {.name = "dropout 0.5, padding",
       .mask = LayerMask::kPadding,
       .dropout = 0.5},
  };
  calls.insert(calls.end(), more.begin(), more.end());
  return calls;
}

std::vector<LayerCall> calls_without_weights() {
  std::vector<LayerCall> calls;
  for (auto dtype : kEvery) {
    const auto add = [&](LayerCall call) {
      call.dtype = dtype;
      calls.push_back(call);
    };
    add({.name = "self-attention", .inputs = Inputs::kSelf});
    add({.name = "query, key, value"});
    add({.name = "bool mask per head", .mask = LayerMask::kBoolPerHead});
    add({.name = "float mask", .mask = LayerMask::kFloat});
  }
  const std::vector<LayerCall> more{
      {.name = "key is value", .inputs = Inputs::kKeyIsValue},
      {.name = "causal", .mask = LayerMask::kCausal},
      {.name = "padding", .mask = LayerMask::kPadding},
      {.name = "float padding", .mask = LayerMask::kFloatPadding},
      {.name = "bool mask and padding", .mask = LayerMask::kBoolAndPadding},
      {.name = "float mask per head", .mask = LayerMask::kFloatPerHead},
      {.name = "blocked row is the bias", .mask = LayerMask::kBlockedRow},
      {.name = "bias_kv, zero_attn", .bias_kv = true, .zero_attn = true},
      {.name = "sequence first", .batch_first = false},
      {.name = "no biases", .bias = false},
      {.name = "dropout 0.1, same seed", .dropout = 0.1},
      {.name = "longer", .Lq = 96, .Lk = 130, .E = 64},
  };
  calls.insert(calls.end(), more.begin(), more.end());
  for (LayerCall& call : calls) call.need_weights = false;
  return calls;
}

std::vector<LayerCall> native_calls() {
  std::vector<LayerCall> calls;
  for (auto dtype : kEvery)
    calls.push_back({.name = "self-attention", .dtype = dtype});
  const std::vector<LayerCall> more{
      {.name = "padding", .mask = LayerMask::kPadding},
      {.name = "bool mask", .mask = LayerMask::kBool},
      {.name = "bool mask per head", .mask = LayerMask::kBoolPerHead},
      {.name = "bool mask and padding", .mask = LayerMask::kBoolAndPadding},
      {.name = "weights per head", .average = false},
      {.name = "without weights", .need_weights = false},
  };
  calls.insert(calls.end(), more.begin(), more.end());
  for (LayerCall& call : calls) call.inputs = Inputs::kSelf;
  return calls;
}

std::vector<LayerCall> auto_calls() {
  std::vector<LayerCall> calls;
  for (auto dtype : kEvery) {
    calls.push_back({.name = "query, key, value", .dtype = dtype});
    calls.push_back({.name = "without weights",
                     .dtype = dtype,
                     .mask = LayerMask::kBoolAndPadding,
                     .need_weights = false});
  }
  const std::vector<LayerCall> more{
      {.name = "self-attention", .inputs = Inputs::kSelf},
      {.name = "weights per head", .average = false},
      {.name = "unbatched", .mask = LayerMask::kPadding, .batched = false},
      {.name = "bool mask per head", .mask = LayerMask::kBoolPerHead},
      {.name = "float mask per head", .mask = LayerMask::kFloatPerHead},
      {.name = "float padding", .mask = LayerMask::kFloatPadding},
      {.name = "causal", .mask = LayerMask::kCausal},
      {.name = "causal mask and hint", .mask = LayerMask::kCausalHint},
      {.name = "blocked row is 0", .mask = LayerMask::kBlockedRow},
      {.name = "blocked row is bias, no weights",
       .mask = LayerMask::kBlockedRow,
       .need_weights = false},
      {.name = "kdim 12, vdim 20", .kdim = 12, .vdim = 20},
      {.name = "bias_kv, zero_attn, masks",
       .mask = LayerMask::kBoolAndPadding,
       .bias_kv = true,
       .zero_attn = true},
      {.name = "sequence first", .batch_first = false},
  };
  calls.insert(calls.end(), more.begin(), more.end());
  return calls;
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

}  // namespace

std::vector<Case> module_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* group, const auto& calls, auto compare) {
    for (const LayerCall& call : calls)
      cases.push_back(
          {group, call.name, shapes(call),
           [call, compare](Random& random) { return compare(call, random); }});
  };
  add("MultiheadAttention, exact, against the operations of Python's module",
      python_module_calls(), compare_python_module);
  add("MultiheadAttention, exact, without weights, against the operations of "
      "Python's module",
      calls_without_weights(), compare_python_module);
  add("MultiheadAttention, exact, against torch::nn::MultiheadAttention",
      nn_module_calls(), compare_nn_module);
  add("MultiheadAttention, exact, inference, against "
      "at::_native_multi_head_attention",
      native_calls(), compare_native);
  add("MultiheadAttention, auto, against float64 loops", auto_calls(),
      compare_auto);
  add("GroupedQueryAttention, auto, against float64 loops", grouped_calls(),
      compare_auto);
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
  const at::Tensor golden =
      golden_layer(x.query, x.query, x.query, x.layer, x.options).out.value;
  const double error =
      (pytorch::nn_module_unaided(x.query, x.layer, x.options) - golden)
          .abs()
          .max()
          .item<double>();
  const auto [ours, weights] =
      ours::module(x.query, x.query, x.query, x.layer, x.options);
  const double our_error = (ours - golden).abs().max().item<double>();
  return {format("%s: wrong by %.2g (it adds True as 1); ours by %.1e", name,
                 error, our_error)};
}

}  // namespace cli
