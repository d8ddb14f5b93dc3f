// SPDX-License-Identifier: MIT
#include "cli/bench/case.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <span>

#include "cli/bench/isa.h"
#include "cli/cases/case.h"

namespace cli {
namespace {

// --- What the lists below are written with -----------------------------------

constexpr std::array kWidths = {at::kFloat, at::kBFloat16};

// A share and a ratio to SDPA that squares shall reach, from a length on, up
// to the next row's. D = 0: of every head width.
struct Goal {
  at::ScalarType dtype;
  bool causal;
  int64_t D, from;
  double share, ratio;
};

std::string size_of(const AttentionCall& c) {
  std::string text = c10::str(" d", c.D, " L", c.Lq);
  if (c.Lk != c.Lq) text += c10::str("x", c.Lk);
  return text + " " + short_name(c.dtype);
}

Target against_sdpa(double ratio, double share = 0) {
  return {.share = share, .ratios = {{Implementation::kSdpa, ratio}}};
}

// The last of `goals` that the call meets; none: nothing is demanded.
Target goal(std::span<const Goal> goals, const AttentionCall& call) {
  Target target;
  for (const Goal& g : goals)
    if (g.dtype == call.dtype && g.causal == call.options.is_causal &&
        (g.D == 0 || g.D == call.D) && g.from <= call.Lq)
      target = against_sdpa(g.ratio, g.share);
  return target;
}

// B1 H8, Lq = Lk = L.
AttentionCall square(std::string name, int64_t L, int64_t D,
                     at::ScalarType dtype) {
  return {.name = std::move(name),
          .B = 1,
          .H = 8,
          .Lq = L,
          .Lk = L,
          .D = D,
          .dtype = dtype};
}

AttentionCall causal(std::string name, int64_t L, int64_t D,
                     at::ScalarType dtype) {
  AttentionCall call = square(std::move(name), L, D, dtype);
  call.options.is_causal = true;
  return call;
}

// Named after the call and its sizes: "causal d64 L512 f32".
BenchCase attention(std::string group, const AttentionCall& call,
                    Target target = {}) {
  return {.group = std::move(group),
          .name = call.name + size_of(call),
          .call = call,
          .target = std::move(target)};
}

// --- Forward ----------------------------------------------------------------

// The goals of the grid of squares.
constexpr Goal kGoals[] = {
    {at::kFloat, false, 0, 128, 0.86, 1.35},
    {at::kFloat, false, 64, 512, 0.88, 1.25},
    {at::kFloat, false, 128, 512, 0.91, 1.15},
    {at::kFloat, true, 0, 128, 0.72, 2.2},
    {at::kFloat, true, 0, 512, 0.82, 2.2},
    {at::kFloat, true, 0, 1024, 0.85, 1.7},
    {at::kFloat, true, 0, 2048, 0.87, 1.35},
    {at::kBFloat16, false, 64, 512, 0.83, 2.4},
    {at::kBFloat16, false, 128, 512, 0.88, 2.3},
    {at::kBFloat16, true, 0, 512, 0.77, 4.2},
    {at::kBFloat16, true, 0, 1024, 0.80, 3.2},
    {at::kBFloat16, true, 0, 2048, 0.83, 2.7},
};
// The same with MULTIHEAD_ISA=avx2 and PyTorch held to AVX2 as well.
constexpr Goal kAvx2Goals[] = {
    {at::kFloat, false, 0, 512, 0.84, 1.12},
    {at::kFloat, true, 0, 512, 0.80, 1.4},
};

std::vector<BenchCase> squares(const std::string& isa) {
  std::vector<BenchCase> cases;
  for (const at::ScalarType dtype : kWidths)
    for (const bool is_causal : {false, true})
      for (const int64_t D : {64, 128})
        for (const int64_t L : {128, 512, 1024, 2048, 4096}) {
          const AttentionCall call = is_causal ? causal("causal", L, D, dtype)
                                               : square("full", L, D, dtype);
          const Target target = facts_of(isa).targets == TargetSet::kAvx2
                                    ? goal(kAvx2Goals, call)
                                    : goal(kGoals, call);
          BenchCase test = attention(
              dtype == at::kFloat ? "float32" : "bfloat16", call, target);
          test.full_only = L == 4096;
          test.headline = D == 64 && (L == 512 || L == 2048);
          cases.push_back(std::move(test));
        }
  return cases;
}

std::vector<BenchCase> short_sequences() {
  std::vector<BenchCase> cases;
  for (const at::ScalarType dtype : kWidths) {
    const bool single = dtype == at::kFloat;
    AttentionCall call = square("512 heads", 64, 64, dtype);
    call.B = 64;
    BenchCase cold =
        attention("short", call,
                  single ? against_sdpa(1.6, 0.65) : against_sdpa(2.8, 0.55));
    cold.cold = true;
    cases.push_back(std::move(cold));
    call = square("96 heads", 196, 64, dtype);  // a vision transformer's
    call.H = 12;
    call.B = 8;
    cases.push_back(attention("short", call));
  }
  return cases;
}

std::vector<BenchCase> dropout() {
  std::vector<BenchCase> cases;
  for (const at::ScalarType dtype : kWidths)
    for (const int64_t D : {64, 128}) {
      AttentionCall call = square("dropout 0.1", 1024, D, dtype);
      call.options.dropout_p = 0.1;
      BenchCase test = attention(
          "dropout", call,
          dtype == at::kFloat ? against_sdpa(D == 64 ? 6.5 : 4) : Target());
      test.headline = dtype == at::kFloat && D == 64;
      cases.push_back(std::move(test));
    }
  return cases;
}

std::vector<BenchCase> grouped() {
  std::vector<BenchCase> cases;
  for (const at::ScalarType dtype : kWidths) {
    AttentionCall call = causal("grouped 32/8 causal", 1024, 128, dtype);
    call.H = 32;
    call.G = 8;
    call.options.enable_gqa = true;
    BenchCase test = attention("grouped", call,
                               against_sdpa(dtype == at::kFloat ? 1.7 : 3.2));
    test.headline = true;
    cases.push_back(std::move(test));
  }
  return cases;
}

std::vector<BenchCase> masks() {
  std::vector<BenchCase> cases;
  for (const at::ScalarType dtype : kWidths) {
    const bool single = dtype == at::kFloat;
    AttentionCall half = square("half-masked keys", 2048, 64, dtype);
    half.B = 4;
    half.mask = CallMask::kHalfKeys;
    cases.push_back(attention("masks", half, against_sdpa(2.2)));
    cases.back().headline = single;

    AttentionCall tril = square("tril as a tensor", 2048, 64, dtype);
    tril.B = 4;
    tril.mask = CallMask::kTriangle;
    cases.push_back(attention("masks", tril, against_sdpa(2.2)));

    AttentionCall bias = square("bias", 1024, 64, dtype);
    bias.mask = CallMask::kFloat;
    cases.push_back(attention("masks", bias));

    AttentionCall window = square("window 512", 4096, 64, dtype);
    window.options.window = {{511, 0}};
    cases.push_back(attention("masks", window, against_sdpa(single ? 5 : 10)));
    cases.back().headline = true;

    AttentionCall lengths = square("key lengths", 1024, 64, dtype);
    lengths.B = 4;
    lengths.key_lengths = true;
    lengths.shortest = 256;
    cases.push_back(attention("masks", lengths));
  }
  return cases;
}

std::vector<BenchCase> head_widths() {
  std::vector<BenchCase> cases;
  for (const at::ScalarType dtype : kWidths)
    for (const int64_t D : {32, 40, 48, 96})
      for (const int64_t L : {512, 1024, 2048, 4096}) {
        cases.push_back(attention("head widths", square("full", L, D, dtype),
                                  against_sdpa(dtype == at::kFloat ? 1.2 : 2)));
        cases.back().full_only = L != 1024;
      }
  return cases;
}

std::vector<BenchCase> layouts() {
  std::vector<BenchCase> cases;
  for (const at::ScalarType dtype : kWidths)
    for (const bool is_causal : {false, true}) {
      AttentionCall call = is_causal
                               ? causal("(B,L,H,D) causal", 1024, 64, dtype)
                               : square("(B,L,H,D)", 1024, 64, dtype);
      call.layout = Layout::kSequenceMajor;
      cases.push_back(attention("layout", call));
      cases.back().full_only = is_causal;
    }
  return cases;
}

std::vector<BenchCase> other_dtypes() {
  std::vector<BenchCase> cases;
  for (const at::ScalarType dtype : {at::kHalf, at::kDouble})
    for (const int64_t L : {512, 1024}) {
      cases.push_back(attention("other dtypes", square("full", L, 64, dtype)));
      cases.push_back(
          attention("other dtypes", causal("causal", L, 64, dtype)));
      for (auto test = cases.end() - 2; test != cases.end(); ++test)
        test->full_only = dtype == at::kDouble || L == 512;
    }
  return cases;
}

std::vector<BenchCase> few_queries() {
  std::vector<BenchCase> cases;
  for (const at::ScalarType dtype : kWidths)
    for (const int64_t Lq : {1, 4, 16}) {
      AttentionCall call = square("few queries", Lq, 128, dtype);
      call.Lk = 4096;
      BenchCase test = attention("few queries", call);
      test.cold = test.memory_bound = true;
      test.full_only = Lq == 4;
      cases.push_back(std::move(test));
    }
  return cases;
}

std::vector<BenchCase> modules() {
  const auto layer = [](std::string name, const LayerCall& call,
                        std::vector<std::pair<Implementation, double>> ratios) {
    return BenchCase{.group = "modules",
                     .name = std::move(name),
                     .call = call,
                     .target = {.ratios = std::move(ratios)}};
  };
  LayerCall call{.N = 8, .Lq = 512, .E = 512, .H = 8, .inputs = Inputs::kSelf};
  std::vector<BenchCase> cases;
  cases.push_back(layer(
      "averaged weights", call,
      {{Implementation::kNnModule, 1.55}, {Implementation::kTorchNn, 1.8}}));
  call.need_weights = false;
  cases.push_back(layer(
      "no weights", call,
      {{Implementation::kNnModule, 1.3}, {Implementation::kTorchNn, 1.8}}));
  call.mask = LayerMask::kCausalHint;
  cases.push_back(layer(
      "causal", call,
      {{Implementation::kNnModule, 1.55}, {Implementation::kTorchNn, 1.8}}));
  for (BenchCase& test : cases) test.headline = true;

  LayerCall small{.N = 3, .Lq = 4, .E = 8, .H = 2, .inputs = Inputs::kSelf};
  small.batch_first = false;
  for (const bool weights : {false, true}) {
    small.need_weights = weights;
    cases.push_back(layer(weights ? "small call, weights" : "small call", small,
                          {{Implementation::kTorchNn, 2}}));
  }
  return cases;
}

// --- Backward, and training steps --------------------------------------------

// The goals of autograd's backward alone.
constexpr Goal kBackwardGoals[] = {
    {at::kFloat, false, 64, 512, 0.85, 1.3},
    {at::kFloat, false, 64, 1024, 0.87, 1.3},
    {at::kFloat, false, 64, 2048, 0.90, 1.3},
    {at::kFloat, false, 128, 1024, 0.88, 1.2},
    {at::kFloat, true, 64, 512, 0.75, 2.3},
    {at::kFloat, true, 64, 1024, 0.79, 1.65},
    {at::kFloat, true, 64, 2048, 0.85, 1.5},
    {at::kBFloat16, false, 64, 512, 0.81, 2.2},
    {at::kBFloat16, false, 64, 1024, 0.83, 1.65},
    {at::kBFloat16, true, 64, 512, 0.70, 4},
    {at::kBFloat16, true, 64, 1024, 0.75, 2.4},
    {at::kBFloat16, true, 64, 2048, 0.81, 2.1},
};

std::vector<BenchCase> backward(const std::string& isa) {
  std::vector<BenchCase> cases;
  const auto add = [&](const AttentionCall& call) {
    BenchCase test = attention("backward", call,
                               facts_of(isa).targets == TargetSet::kAvx2
                                   ? Target()
                                   : goal(kBackwardGoals, call));
    test.pass = Pass::kBackward;
    // With all threads, one length stands for the others.
    test.one_thread = call.Lq != 1024;
    test.headline = call.D == 64 && call.Lq == 1024;
    // Its targets are those of L = 1024.
    test.full_only = call.Lq == 2048 && call.dtype == at::kBFloat16 &&
                     !call.options.is_causal;
    cases.push_back(std::move(test));
  };
  for (const at::ScalarType dtype : kWidths)
    for (const bool is_causal : {false, true})
      for (const int64_t L : {512, 1024, 2048})
        add(is_causal ? causal("causal backward", L, 64, dtype)
                      : square("backward", L, 64, dtype));
  add(square("backward", 1024, 128, at::kFloat));
  return cases;
}

std::vector<BenchCase> both_ways() {
  std::vector<BenchCase> cases;
  const auto add = [&](const AttentionCall& call, Target target) {
    cases.push_back(attention("forward + backward", call, std::move(target)));
    cases.back().pass = Pass::kBoth;
    cases.back().one_thread = true;
  };
  for (const int64_t L : {1024, 2048}) {
    AttentionCall call = square("dropout 0.1, both ways", L, 64, at::kFloat);
    call.options.dropout_p = 0.1;
    Target target = against_sdpa(3.2);
    target.memory = 5;
    add(call, target);
    cases.back().headline = L == 1024;
  }
  AttentionCall window = square("window 512, both ways", 4096, 64, at::kFloat);
  window.options.window = {{511, 0}};
  add(window, against_sdpa(5));
  cases.back().headline = true;

  AttentionCall head = square("one head, both ways", 4096, 64, at::kFloat);
  head.H = 1;
  add(head, {.scaling = 1.8});
  cases.back().one_thread = false;
  return cases;
}

std::vector<BenchCase> steps() {
  std::vector<BenchCase> cases;
  const auto add = [&](std::string name, auto call, Target target) {
    cases.push_back({.group = "training steps",
                     .name = std::move(name),
                     .call = call,
                     .pass = Pass::kBoth,
                     .target = std::move(target),
                     .one_thread = true,
                     .headline = true});
  };
  LayerCall layer{.N = 8, .Lq = 512, .E = 512, .H = 8, .inputs = Inputs::kSelf};
  add("step, weights returned", layer,
      {.ratios = {{Implementation::kNnModule, 1.4}}});
  layer.need_weights = false;
  add("step, no weights", layer,
      {.ratios = {{Implementation::kNnModule, 1.2}}});
  layer.mask = LayerMask::kCausalHint;
  add("step, causal", layer, {.ratios = {{Implementation::kNnModule, 1.4}}});

  const BlockCall block{
      .N = 1, .L = 1024, .E = 768, .H = 12, .dtype = at::kBFloat16};
  add("step, GPT-2 block, dropout 0.1", block,
      {.ratios = {{Implementation::kSdpa, 1.9},
                  {Implementation::kByHand, 1.35}}});
  return cases;
}

std::vector<BenchCase> training_cases(const std::string& isa) {
  std::vector<BenchCase> cases = backward(isa);
  for (const auto& list : {both_ways(), steps()})
    std::ranges::copy(list, std::back_inserter(cases));
  return cases;
}

}  // namespace

std::string name(Pass pass) {
  static constexpr const char* kNames[] = {"forward", "backward",
                                           "forward + backward"};
  return kNames[static_cast<int>(pass)];
}

std::string name(Implementation who) {
  static constexpr const char* kNames[] = {
      "ours",      "SDPA",      "by hand",   "nn.MHA",
      "torch::nn", "fast path", "SDPA layer"};
  return kNames[static_cast<int>(who)];
}

std::vector<BenchCase> bench_cases(const std::string& isa) {
  std::vector<BenchCase> cases = squares(isa);
  for (const auto& list :
       {short_sequences(), dropout(), grouped(), masks(), head_widths(),
        layouts(), other_dtypes(), few_queries(), modules()})
    std::ranges::copy(list, std::back_inserter(cases));
  for (BenchCase& test : cases)
    if (const auto* call = std::get_if<AttentionCall>(&test.call);
        call && call->Lq == call->Lk && call->Lq >= 1024)
      test.target.scaling = 1.9;
  std::ranges::copy(training_cases(isa), std::back_inserter(cases));
  return cases;
}

std::string shapes(const BenchCase& test) {
  return std::visit([](const auto& call) { return shapes(call); }, test.call);
}

at::ScalarType dtype_of(const BenchCase& test) {
  return std::visit([](const auto& call) { return call.dtype; }, test.call);
}

}  // namespace cli
