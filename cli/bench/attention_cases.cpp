// SPDX-License-Identifier: MIT
#include <algorithm>
#include <iterator>

#include "cli/bench/grid.h"

namespace cli {
namespace {

// Of the grid of squares.
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
          const Target target =
              isa == "avx2" ? goal(kAvx2Goals, call) : goal(kGoals, call);
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
                        std::vector<std::pair<Who, double>> ratios) {
    return BenchCase{.group = "modules",
                     .name = std::move(name),
                     .call = call,
                     .target = {.ratios = std::move(ratios)}};
  };
  LayerCall call{.N = 8, .Lq = 512, .E = 512, .H = 8, .inputs = Inputs::kSelf};
  std::vector<BenchCase> cases;
  cases.push_back(layer("averaged weights", call,
                        {{Who::kNnModule, 1.55}, {Who::kTorchNn, 1.8}}));
  call.need_weights = false;
  cases.push_back(
      layer("no weights", call, {{Who::kNnModule, 1.3}, {Who::kTorchNn, 1.8}}));
  call.mask = LayerMask::kCausalHint;
  cases.push_back(
      layer("causal", call, {{Who::kNnModule, 1.55}, {Who::kTorchNn, 1.8}}));
  for (BenchCase& test : cases) test.headline = true;

  LayerCall small{.N = 3, .Lq = 4, .E = 8, .H = 2, .inputs = Inputs::kSelf};
  small.batch_first = false;
  for (const bool weights : {false, true}) {
    small.need_weights = weights;
    cases.push_back(layer(weights ? "small call, weights" : "small call", small,
                          {{Who::kTorchNn, 2}}));
  }
  return cases;
}

}  // namespace

std::string name(Pass pass) {
  static constexpr const char* kNames[] = {"forward", "backward",
                                           "forward + backward"};
  return kNames[static_cast<int>(pass)];
}

std::string name(Who who) {
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
