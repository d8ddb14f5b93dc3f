// SPDX-License-Identifier: MIT
//
// What `multihead bench` says must be true of what it ran: useful work against
// brute force, its float64 against the loops.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cli/bench/contenders.h"
#include "cli/bench/runner.h"
#include "cli/bench/targets.h"
#include "cli/cases/answers.h"
#include "cli/cases/golden.h"

namespace {

using namespace cli;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

AttentionCall small_call() {
  return {.name = "small",
          .B = 2,
          .H = 4,
          .G = 2,
          .Lq = 9,
          .Lk = 13,
          .D = 8,
          .options = {.enable_gqa = true}};
}

void expect_near(const Scaled& x, const reference::Values& value,
                 const reference::Values& scale) {
  const reference::Values values_of_x = values(x.value),
                          scales = values(x.scale);
  ASSERT_EQ(values_of_x.size(), value.size());
  for (size_t i = 0; i < value.size(); ++i) {
    EXPECT_NEAR(values_of_x[i], value[i], 1e-13 * (1 + scale[i]));
    EXPECT_NEAR(scales[i], scale[i], 1e-13 * (1 + scale[i]));
  }
}

// The output and the gradients of query, key and value.
std::vector<at::Tensor> gradients_of_pytorch(const AttentionInputs& inputs,
                                             const at::Tensor& dout) {
  const AttentionInputs x = leaves(inputs);
  const at::Tensor out = pytorch::attention_with_mask(x);
  out.backward(dout);
  return {out, x.query.grad(), x.key.grad(), x.value.grad()};
}

// How many outputs of a case are compared with float64.
size_t judged(const BenchCase& test) {
  const bool trains = test.pass != Pass::kForward;
  if (const auto* layer = std::get_if<LayerCall>(&test.call))
    return 1 + layer->need_weights + 5 * trains;
  return trains ? 4 : 1;
}

std::vector<AttentionCall> calls_of_every_kind() {
  std::vector<AttentionCall> calls(8, small_call());
  calls[1].options.is_causal = true;
  calls[2].options.is_causal = true;
  calls[2].options.causal_alignment = multihead::CausalAlignment::kBottomRight;
  calls[3].options.window = {{3, 0}};
  calls[4].options.window = {{2, 1}};
  calls[4].options.causal_alignment = multihead::CausalAlignment::kBottomRight;
  calls[4].key_lengths = true;
  calls[4].shortest = 9;
  calls[5].mask = CallMask::kHalfKeys;
  calls[6].mask = CallMask::kTriangle;
  calls[7].mask = CallMask::kBlockedRows;
  calls[7].Dv = 6;
  return calls;
}

TEST(BenchCases, NamesAreUniqueAndTargetsNameContenders) {
  std::set<std::string> names;
  for (const BenchCase& test : bench_cases(Family::kAvx512)) {
    EXPECT_TRUE(names.insert(test.name).second) << test.name;
    const bool layer = std::holds_alternative<LayerCall>(test.call);
    for (const auto& [who, ratio] : test.target.ratios) {
      // Pages may take a tenth longer than rows.
      EXPECT_GE(ratio, who == Implementation::kContiguous ? 1 / 1.1 : 1);
      EXPECT_NE(
          who == Implementation::kNnModule || who == Implementation::kTorchNn,
          !layer)
          << test.name;
    }
    EXPECT_LT(test.target.share, 1);
    EXPECT_FALSE(test.headline && test.full_only) << test.name;
  }
}

TEST(BenchCases, ThoseThatTrainHaveTheirTargets) {
  int backward = 0, both = 0;
  for (const BenchCase& test : bench_cases(Family::kAvx512)) {
    const bool has_target = !test.target.ratios.empty() ||
                            test.target.scaling > 0 || test.target.memory > 0;
    if (test.pass == Pass::kForward) continue;
    EXPECT_TRUE(has_target) << test.name;
    backward += test.pass == Pass::kBackward;
    both += test.pass == Pass::kBoth;
    EXPECT_EQ(test.target.share > 0, test.pass == Pass::kBackward);
    // Targets of scaling need all threads.
    EXPECT_FALSE(test.one_thread && test.target.scaling > 0) << test.name;
  }
  EXPECT_EQ(backward, 13);
  EXPECT_EQ(both, 10);
}

TEST(BenchCases, TheFamilyFollowsKernelsAndMaker) {
  const std::string amd = "AuthenticAMD, family 26, model 2",
                    intel = "GenuineIntel, family 6, model 173";
  const auto family = [](const std::string& isa, const std::string& cpu) {
    return name(family_of(isa, cpu));
  };
  EXPECT_EQ(family("amx", intel), "amx");
  EXPECT_EQ(family("amx", amd), "amx");
  EXPECT_EQ(family("avx512_bf16", amd), "avx512-amd");
  EXPECT_EQ(family("avx512", amd), "avx512-amd");
  EXPECT_EQ(family("avx512_bf16", intel), "avx512");
  EXPECT_EQ(family("avx512", ""), "avx512");
  EXPECT_EQ(family("avx2", amd), "avx2");
  EXPECT_EQ(family("avx2", intel), "avx2");
  EXPECT_EQ(family("portable", amd), "other");
  EXPECT_EQ(family("unheard-of", ""), "other");
}

TEST(BenchCases, TargetsFollowTheLengthAndTheFamily) {
  using enum Family;
  const auto target = [](Family family, const std::string& name) {
    const auto cases = bench_cases(family);
    return std::ranges::find(cases, name, &BenchCase::name)->target;
  };
  const auto times = [&](Family family, const std::string& name,
                         Implementation who = Implementation::kSdpa) {
    for (const auto& [other, ratio] : target(family, name).ratios)
      if (who == other) return ratio;
    return 0.;
  };
  EXPECT_EQ(target(kAvx512, "causal d64 L512 f32").share, 0.76);
  EXPECT_EQ(target(kAvx512Amd, "causal d64 L4096 f32").share, 0.82);
  EXPECT_EQ(times(kAvx512Amd, "causal d64 L4096 f32"), 1.35);
  EXPECT_EQ(target(kAvx512, "full d128 L128 f32").share, 0.86);
  EXPECT_EQ(target(kAvx512, "full d64 L128 bf16").share, 0);
  EXPECT_EQ(times(kAvx512, "full d48 L1024 bf16"), 2);
  EXPECT_EQ(times(kAvx2, "full d48 L1024 bf16"), 1.2);
  EXPECT_EQ(target(kAvx2, "full d64 L512 f32").share, 0.86);
  EXPECT_EQ(target(kAvx2, "full d128 L1024 f32").share, 0.92);
  EXPECT_TRUE(target(kAvx2, "full d64 L128 f32").ratios.empty());
  EXPECT_TRUE(target(kAvx2, "full d64 L1024 bf16").ratios.empty());
  EXPECT_EQ(target(kAvx512, "backward d64 L2048 f32").share, 0.90);
  EXPECT_EQ(target(kAvx512, "causal backward d64 L512 bf16").share, 0.70);
  EXPECT_TRUE(target(kAvx2, "backward d64 L512 f32").ratios.empty());
  EXPECT_EQ(target(kAvx2, "backward d64 L512 f32").share, 0.86);
  EXPECT_EQ(target(kAmx, "full d64 L512 bf16").share, 0);
  EXPECT_EQ(times(kAmx, "causal d64 L512 bf16"), 1.75);
  EXPECT_EQ(times(kAvx512Amd, "no weights", Implementation::kNnModule), 2.8);
  EXPECT_EQ(times(kAvx512Amd, "no weights", Implementation::kTorchNn), 1.8);
  EXPECT_EQ(times(kAvx512, "no weights", Implementation::kNnModule), 1.5);
  EXPECT_EQ(times(kAvx2, "no weights", Implementation::kNnModule), 1.4);
  EXPECT_EQ(times(kAvx2, "decode 32/8 d128 L1x4096 bf16"), 35);
  for (const Family any : {kAmx, kAvx512, kAvx512Amd, kAvx2, kOther}) {
    EXPECT_EQ(target(any, "full d64 L1024 f32").scaling, 1.9);
    EXPECT_EQ(target(any, "full d64 L512 f32").scaling, 0);
    EXPECT_EQ(times(any, "ragged d64 f32", Implementation::kSeparate), 1);
  }
  EXPECT_TRUE(target(kOther, "full d64 L1024 f32").ratios.empty());
}

TEST(Bench, UsefulWorkIsThatOfVisiblePairs) {
  for (const AttentionCall& call : calls_of_every_kind()) {
    Random random(1, "flop");
    const AttentionInputs x = draw(call, random);
    const reference::Attention a = reference_attention(x);
    int64_t pairs = 0;
    for (int64_t b = 0; b < a.B; ++b)
      for (int64_t h = 0; h < a.H; ++h)
        for (int64_t i = 0; i < a.Lq; ++i)
          for (int64_t j = 0; j < a.Lk; ++j)
            pairs += reference::Row(a, b, h, i).sees(a, j);
    const double forward = 2.0 * pairs * (a.D + a.Dv),
                 backward = 2.0 * pairs * (3 * a.D + 2 * a.Dv);
    EXPECT_EQ(attention_flop(x, Pass::kForward), forward);
    EXPECT_EQ(attention_flop(x, Pass::kBackward), backward);
    EXPECT_EQ(attention_flop(x, Pass::kBoth), forward + backward);
  }
}

TEST(Bench, FourAndTenTimesEverythingWithoutAMask) {
  const AttentionInputs x{at::ones({2, 3, 5, 7}),
                          at::ones({2, 3, 11, 7}),
                          at::ones({2, 3, 11, 7}),
                          {}};
  const double everything = 2 * 3 * 5 * 11 * 7;
  EXPECT_EQ(attention_flop(x, Pass::kForward), 4 * everything);
  EXPECT_EQ(attention_flop(x, Pass::kBackward), 10 * everything);
}

TEST(Bench, LinearLayersCountTwiceAgainInBackward) {
  EXPECT_EQ(linear_flop(5, 12, Pass::kForward), 120);
  EXPECT_EQ(linear_flop(5, 12, Pass::kBackward), 240);
  EXPECT_EQ(linear_flop(5, 12, Pass::kBoth), 360);
  for (const bool batch_first : {true, false}) {
    LayerCall call{.N = 2, .Lq = 6, .E = 12, .H = 3, .inputs = Inputs::kSelf};
    call.batch_first = batch_first;
    Random random(8, "layer");
    const LayerInputs x = draw(call, random);
    const double pairs = 2 * 3 * 6 * 6, width = 4, rows = 2 * 6;
    EXPECT_EQ(layer_flop(x, Pass::kForward),
              4 * pairs * width + 2 * rows * 4 * 12 * 12);
    EXPECT_EQ(layer_flop(x, Pass::kBoth),
              14 * pairs * width + 6 * rows * 4 * 12 * 12);
  }
}

TEST(Bench, Float64IsThatOfTheLoops) {
  for (const AttentionCall& call : calls_of_every_kind()) {
    Random random(2, "golden");
    const AttentionInputs x = draw(call, random);
    const at::Tensor dout = random.normal({2, 4, 9, x.value.size(3)});
    const Reference fast = reference_of(x, dout);
    const reference::Attention a = reference_attention(x);
    const reference::Output slow = reference::forward(a);
    const reference::Gradients g = reference::backward(a, slow, values(dout));
    EXPECT_NEAR(fast.lambda, slow.lambda, 1e-12 * slow.lambda);
    ASSERT_EQ(fast.parts.size(), 4u);
    expect_near(fast.parts[0].result, slow.out, slow.out_scale);
    expect_near(fast.parts[1].result, g.query, g.query_scale);
    expect_near(fast.parts[2].result, g.key, g.key_scale);
    expect_near(fast.parts[3].result, g.value, g.value_scale);
    EXPECT_EQ(reference_of(x).parts.size(), 1u);
  }
}

TEST(Bench, Float64OfLongSequencesIsThatOfPyTorch) {
  AttentionCall call = small_call();
  call.Lq = call.Lk = 1100;  // three tiles of queries
  call.options.window = {{100, 20}};
  call.dtype = at::kDouble;
  Random random(2, "tiles");
  const AttentionInputs x = draw(call, random);
  const at::Tensor dout = random.normal(x.query.sizes(), at::kDouble);
  const Reference fast = reference_of(x, dout);
  const auto pytorch = gradients_of_pytorch(x, dout);
  for (size_t i = 0; i < 4; ++i)
    EXPECT_TRUE(at::allclose(fast.parts[i].result.value, pytorch[i], 0, 1e-12));
}

TEST(Bench, Float64OfLayersIsThatOfTheLoops) {
  for (const bool batch_first : {true, false}) {
    LayerCall call{.N = 2, .Lq = 6, .E = 12, .H = 3, .inputs = Inputs::kSelf};
    call.mask = LayerMask::kCausalHint;
    call.batch_first = batch_first;
    Random random(3, "layer");
    const LayerInputs x = draw(call, random);
    const Reference fast = reference_of(x);
    const GoldenLayer slow = golden_layer(x);
    const Scaled& out = fast.parts[0].result;
    EXPECT_TRUE(at::allclose(out.value, slow.out.value, 0, 1e-12));
    EXPECT_TRUE(
        at::allclose(fast.parts[1].result.value, slow.weights.value, 0, 1e-12));
    const reference::Precision p = layer_precision(at::kFloat);
    const at::Tensor allowed =
        out.scale * (p.forward * p.unit(fast.lambda)) + p.tiny;
    EXPECT_TRUE(at::allclose(allowed, slow.out.allowed, 1e-12, 0));
  }
}

TEST(Bench, WhatIsWrongExceedsItsBudget) {
  const reference::Precision p = reference::kFloat32;
  const at::Tensor value = at::ones({4}, at::kDouble);
  const auto share = [&](const at::Tensor& x) {
    return budget_share(x, Scaled(value), p.forward, 0, p);
  };
  EXPECT_EQ(share(at::ones({4})), 0);
  const double allowed = p.forward * p.unit(0);
  EXPECT_NEAR(share(value + allowed / 2), 0.5, 1e-6);
  EXPECT_GT(share(value + 2 * allowed), 1);
  at::Tensor nan = value.clone();
  nan[2] = std::nan("");
  EXPECT_EQ(share(nan), kInfinity);
  EXPECT_EQ(share(at::ones({2, 2})), kInfinity);
  EXPECT_EQ(share({}), kInfinity);
}

TEST(Bench, DropoutIsJudgedByItsSums) {
  Random random(4, "dropout");
  const at::Tensor kept = random.chance({64, 100, 50}, 0.9).to(at::kFloat);
  const at::Tensor sums = (kept / 0.9).mean(-1, /*keepdim=*/true);
  EXPECT_EQ(implausible_dropout(sums), "");
  EXPECT_NE(implausible_dropout(sums * 0.9), "");
  EXPECT_NE(implausible_dropout(at::ones({64, 100, 1})), "");
}

TEST(Bench, DropoutIsTheSameInBackward) {
  Random random(4, "dropout");
  const at::Tensor w = random.chance({2, 3, 60, 50}, 0.9).to(at::kDouble);
  const at::Tensor rows = w.sum(-1, /*keepdim=*/true),
                   columns = w.sum(-2).unsqueeze(-1);
  EXPECT_EQ(implausible_gradient(rows, columns, 1e-12), "");
  const at::Tensor other = random.chance({2, 3, 60, 50}, 0.9).to(at::kDouble);
  EXPECT_NE(implausible_gradient(rows, other.sum(-2).unsqueeze(-1), 1e-5), "");
  EXPECT_NE(implausible_gradient(rows, columns / 0.9, 0.05), "");
  EXPECT_NE(implausible_gradient(rows, columns * std::nan(""), 1), "");
}

TEST(Bench, ACallThatTheKernelsCannotTakeIsRefused) {
  Random random(6, "fused");
  AttentionInputs x = draw(small_call(), random);
  EXPECT_NO_THROW(expect_fused(x));
  x.query = x.query.to_sparse();
  EXPECT_THROW(expect_fused(x), c10::Error);
}

// Whether the graph that made `x` has a node of that name.
bool was_made_by(const std::string& name, const torch::autograd::Node* node) {
  if (!node) return false;
  if (node->name().find(name) != std::string::npos) return true;
  return std::ranges::any_of(node->next_edges(), [&](const auto& edge) {
    return was_made_by(name, edge.function.get());
  });
}

// Every small attention call with every pass, layers, and a block.
std::vector<BenchCase> small_cases() {
  std::vector<BenchCase> cases;
  for (const Pass pass : {Pass::kForward, Pass::kBackward, Pass::kBoth}) {
    const size_t first = cases.size();
    for (const AttentionCall& call : calls_of_every_kind())
      cases.push_back(
          {.group = "g", .name = "attention", .call = call, .pass = pass});
    std::get<AttentionCall>(cases[first + 1].call).options.dropout_p = 0.3;
  }
  LayerCall layer{.N = 2, .Lq = 6, .E = 12, .H = 3, .inputs = Inputs::kSelf};
  for (const bool weights : {false, true})
    for (const auto mask : {LayerMask::kNone, LayerMask::kCausalHint}) {
      layer.need_weights = weights;
      layer.mask = mask;
      for (const Pass pass : {Pass::kForward, Pass::kBoth})
        cases.push_back(
            {.group = "g", .name = "layer", .call = layer, .pass = pass});
    }
  cases.push_back({.group = "g",
                   .name = "block",
                   .call = BlockCall(),
                   .pass = Pass::kBoth});
  for (const Pass pass : {Pass::kForward, Pass::kBoth})
    cases.push_back(
        {.group = "g", .name = "ragged", .call = RaggedCall(), .pass = pass});
  cases.push_back({.group = "g", .name = "paged", .call = PagedCall()});
  for (const at::ScalarType storage : {at::kFloat, at::kBFloat16, at::kChar})
    cases.push_back({.group = "g",
                     .name = "cache",
                     .call = CachedCall{.storage = storage}});
  AttentionCall chunk = small_call();
  chunk.options.is_causal = true;
  chunk.options.causal_alignment = multihead::CausalAlignment::kBottomRight;
  cases.push_back({.group = "g",
                   .name = "chunk",
                   .call = chunk,
                   .target = {.ratios = {{Implementation::kSeparate, 1}}}});
  return cases;
}

TEST(Bench, ContendersAreRightAndAPlantedErrorIsFound) {
  const at::NoGradGuard no_grad;
  for (const BenchCase& test : small_cases()) {
    // Fully blocked rows are NaN by hand, and in PyTorch's module.
    const auto* call = std::get_if<AttentionCall>(&test.call);
    if (call && call->mask == CallMask::kBlockedRows) continue;
    Random random(5, test.name);
    const PreparedCase prepared = prepare_case(test, random);
    EXPECT_EQ(prepared.contenders.front().who, Implementation::kOurs);
    EXPECT_GE(prepared.contenders.size(), 2u);
    for (const Contender& contender : prepared.contenders) {
      contender.prepare();
      const Outputs out = contender.verified();
      EXPECT_EQ(contender.fault(out), "") << name(contender.who);
      for (size_t i = 0; i < judged(test); ++i) {
        Outputs wrong = out;
        wrong[i] = out[i] * 1.01;
        EXPECT_NE(contender.fault(wrong), "") << i;
        wrong.resize(i);
        EXPECT_NE(contender.fault(wrong), "") << i;
      }
      const Outputs timed = contender.timed();
      EXPECT_GE(timed.size(), judged(test));
      const torch::autograd::Node* node = timed[0].grad_fn().get();
      EXPECT_EQ(was_made_by("FusedAttention", node) ||
                    was_made_by("FusedVarlen", node),
                test.pass != Pass::kForward && is_ours(contender.who));
      if (contender.dropout_fault) {
        EXPECT_EQ(contender.dropout_fault(), "") << name(contender.who);
      }
    }
  }
}

TEST(Bench, SequencesAndPagesHaveTheContendersThatTheyAreHeldTo) {
  using enum Implementation;
  const auto contenders = [](const BenchCase& test) {
    Random random(7, test.name);
    std::vector<Implementation> found;
    for (const Contender& c : prepare_case(test, random).contenders)
      found.push_back(c.who);
    return found;
  };
  const std::vector<Implementation> ragged{kOurs, kSeparate, kPadded, kSdpa},
      paged{kOurs, kContiguous, kCache}, cache{kOurs, kContiguous, kSdpa},
      narrow{kOurs, kWide};
  EXPECT_EQ(contenders({.group = "g", .name = "ragged", .call = RaggedCall()}),
            ragged);
  EXPECT_EQ(contenders({.group = "g", .name = "paged", .call = PagedCall()}),
            paged);
  EXPECT_EQ(contenders({.group = "g",
                        .name = "cache",
                        .call = CachedCall{.storage = at::kFloat}}),
            cache);
  EXPECT_EQ(contenders({.group = "g", .name = "stored", .call = CachedCall()}),
            narrow);
}

TEST(Bench, UsefulWorkOfSequencesIsThatOfTheirOwnPairs) {
  Random random(7, "ragged");
  const PreparedCase prepared = prepare_case(
      {.group = "g", .name = "r", .call = RaggedCall{.lengths = {3, 7, 1}}},
      random);
  EXPECT_EQ(prepared.flop, 4.0 * 8 * 2 * (9 + 49 + 1));
}

TEST(BenchRun, ACaseIsJudgedAndTimedAtEachNumberOfThreads) {
  const BenchCase test{.group = "g", .name = "n", .call = small_call()};
  Runner runner(multihead::kernel_isa(), {.rounds = 3, .seconds = 0},
                /*seed=*/0);
  std::vector<Measurement> found;
  runner.run(test, {1, 2}, [&](Measurement m) { found.push_back(m); });
  ASSERT_EQ(found.size(), 2u);
  EXPECT_TRUE(found[1].scaling);
  for (const Measurement& m : found)
    for (const Entry& entry : m.entries) {
      EXPECT_EQ(entry.status, Status::kRight) << entry.fault;
      EXPECT_EQ(entry.time.count, 3);
      EXPECT_GT(entry.share, 0);
      EXPECT_GT(entry.ratio, 0);
    }
}

}  // namespace
