// SPDX-License-Identifier: MIT
#include <algorithm>
#include <iterator>

#include "cli/bench/grid.h"

namespace cli {
namespace {

// Of autograd's backward alone.
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
    BenchCase test =
        attention("backward", call,
                  isa == "avx2" ? Target() : goal(kBackwardGoals, call));
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
  add("step, weights returned", layer, {.ratios = {{Who::kNnModule, 1.4}}});
  layer.need_weights = false;
  add("step, no weights", layer, {.ratios = {{Who::kNnModule, 1.2}}});
  layer.mask = LayerMask::kCausalHint;
  add("step, causal", layer, {.ratios = {{Who::kNnModule, 1.4}}});

  const BlockCall block{
      .N = 1, .L = 1024, .E = 768, .H = 12, .dtype = at::kBFloat16};
  add("step, GPT-2 block, dropout 0.1", block,
      {.ratios = {{Who::kSdpa, 1.9}, {Who::kByHand, 1.35}}});
  return cases;
}

}  // namespace

std::vector<BenchCase> training_cases(const std::string& isa) {
  std::vector<BenchCase> cases = backward(isa);
  for (const auto& list : {both_ways(), steps()})
    std::ranges::copy(list, std::back_inserter(cases));
  return cases;
}

}  // namespace cli
