// SPDX-License-Identifier: MIT
//
// What `multihead bench` says must be true of what it ran: useful work against
// brute force, its float64 against the loops, statistics against numbers by
// hand.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "cli/bench_contenders.h"
#include "cli/bench_golden.h"
#include "cli/bench_run.h"
#include "cli/golden.h"

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
  for (const BenchCase& test : bench_cases("avx512_bf16")) {
    EXPECT_TRUE(names.insert(test.name).second) << test.name;
    const bool layer = std::holds_alternative<LayerCall>(test.call);
    for (const auto& [who, ratio] : test.target.ratios) {
      EXPECT_GE(ratio, 1);
      EXPECT_EQ(who != Who::kSdpa, layer) << test.name;
    }
    EXPECT_LT(test.target.share, 1);
    EXPECT_FALSE(test.headline && test.full_only) << test.name;
  }
}

TEST(BenchCases, TargetsFollowTheLengthAndTheInstructionSet) {
  const auto target = [](const char* isa, const std::string& name) {
    const auto cases = bench_cases(isa);
    return std::ranges::find(cases, name, &BenchCase::name)->target;
  };
  EXPECT_EQ(target("avx512_bf16", "causal d64 L512 f32").share, 0.82);
  EXPECT_EQ(target("avx512_bf16", "causal d64 L4096 f32").share, 0.87);
  EXPECT_EQ(target("avx512_bf16", "full d128 L128 f32").share, 0.86);
  EXPECT_EQ(target("avx512_bf16", "full d64 L128 bf16").share, 0);
  EXPECT_EQ(target("avx2", "full d128 L1024 f32").share, 0.84);
  EXPECT_TRUE(target("avx2", "full d64 L1024 bf16").ratios.empty());
  EXPECT_EQ(target("avx512_bf16", "full d64 L1024 f32").scaling, 1.9);
  EXPECT_EQ(target("avx512_bf16", "full d64 L512 f32").scaling, 0);
}

TEST(Bench, UsefulWorkIsThatOfVisiblePairs) {
  for (const AttentionCall& call : calls_of_every_kind()) {
    Random random(1, "flop");
    const AttentionInputs x = draw(call, random);
    const naive::Attention a =
        naive_attention(x.query, x.key, x.value, x.options);
    int64_t pairs = 0;
    for (int64_t b = 0; b < a.B; ++b)
      for (int64_t h = 0; h < a.H; ++h)
        for (int64_t i = 0; i < a.Lq; ++i)
          for (int64_t j = 0; j < a.Lk; ++j)
            pairs += naive::Row(a, b, h, i).sees(a, j);
    EXPECT_EQ(attention_flop(x), 2.0 * pairs * (a.D + a.Dv));
  }
}

TEST(Bench, FourTimesEverythingWithoutAMask) {
  const AttentionInputs x{at::ones({2, 3, 5, 7}),
                          at::ones({2, 3, 11, 7}),
                          at::ones({2, 3, 11, 7}),
                          {}};
  EXPECT_EQ(attention_flop(x), 4.0 * 2 * 3 * 5 * 11 * 7);
}

TEST(Bench, Float64IsThatOfTheLoops) {
  for (const AttentionCall& call : calls_of_every_kind()) {
    Random random(2, "golden");
    const AttentionInputs x = draw(call, random);
    const Reference fast = reference_of(x);
    const naive::Attention a =
        naive_attention(x.query, x.key, x.value, x.options);
    const naive::Output slow = naive::forward(a);
    EXPECT_NEAR(fast.lambda, slow.lambda, 1e-12 * slow.lambda);
    const at::Tensor out = fast.out.contiguous(),
                     scale = fast.out_scale.contiguous();
    ASSERT_EQ(out.numel(), static_cast<int64_t>(slow.out.size()));
    for (size_t i = 0; i < slow.out.size(); ++i) {
      EXPECT_NEAR(out.const_data_ptr<double>()[i], slow.out[i], 1e-13);
      EXPECT_NEAR(scale.const_data_ptr<double>()[i], slow.out_scale[i], 1e-13);
    }
  }
}

TEST(Bench, Float64OfLayersIsThatOfTheLoops) {
  for (const bool batch_first : {true, false}) {
    LayerCall call{.N = 2, .Lq = 6, .E = 12, .H = 3, .inputs = Inputs::kSelf};
    call.mask = LayerMask::kCausalHint;
    call.batch_first = batch_first;
    Random random(3, "layer");
    const LayerInputs x = draw(call, random);
    const Reference fast = reference_of(x);
    const GoldenLayer slow =
        golden_layer(x.query, x.key, x.value, x.layer, x.options);
    EXPECT_TRUE(at::allclose(fast.out, slow.out.value, 0, 1e-12));
    EXPECT_TRUE(at::allclose(fast.weights, slow.weights.value, 0, 1e-12));
    const naive::Precision p = layer_precision(at::kFloat);
    const at::Tensor allowed =
        fast.out_scale * (p.forward * p.unit(fast.lambda)) + p.tiny;
    EXPECT_TRUE(at::allclose(allowed, slow.out.allowed, 1e-12, 0));
  }
}

TEST(Bench, WhatIsWrongExceedsItsBudget) {
  const naive::Precision p = naive::kFloat32;
  const at::Tensor value = at::ones({4}, at::kDouble);
  const auto share = [&](const at::Tensor& x) {
    return budget_share(x, value, value, 0, p);
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

TEST(Bench, ContendersAreRightAndAPlantedErrorIsFound) {
  const at::NoGradGuard no_grad;
  std::vector<BenchCase> cases;
  for (const AttentionCall& call : calls_of_every_kind())
    cases.push_back({.group = "g", .name = "attention", .call = call});

  std::get<AttentionCall>(cases[1].call).options.dropout_p = 0.3;
  LayerCall layer{.N = 2, .Lq = 6, .E = 12, .H = 3, .inputs = Inputs::kSelf};
  for (const bool weights : {false, true})
    for (const auto mask : {LayerMask::kNone, LayerMask::kCausalHint}) {
      layer.need_weights = weights;
      layer.mask = mask;
      cases.push_back({.group = "g", .name = "layer", .call = layer});
    }
  for (const BenchCase& test : cases) {
    // Fully blocked rows are NaN by hand, and in PyTorch's module.
    const auto* call = std::get_if<AttentionCall>(&test.call);
    if (call && call->mask == CallMask::kBlockedRows) continue;
    Random random(5, test.name);
    const Problem problem = make_problem(test, random);
    EXPECT_EQ(problem.contenders.front().who, Who::kOurs);
    EXPECT_GE(problem.contenders.size(), 3u);
    for (const Contender& contender : problem.contenders) {
      auto [out, weights] = contender.verified();
      EXPECT_EQ(contender.fault({out, weights}), "") << name(contender.who);
      EXPECT_NE(contender.fault({out * 1.01, weights}), "");
      if (weights.defined()) {
        EXPECT_NE(contender.fault({out, weights * 1.01}), "");
      }
      EXPECT_TRUE(std::get<0>(contender.timed()).defined());
      if (contender.sums) {
        EXPECT_EQ(implausible_dropout(std::get<0>(contender.sums())), "");
      }
    }
  }
}

TEST(BenchTiming, StatisticsInterpolate) {
  const Statistics s = statistics({4, 1, 3, 2});
  EXPECT_EQ(s.best, 1);
  EXPECT_EQ(s.lower, 1.75);
  EXPECT_EQ(s.median, 2.5);
  EXPECT_EQ(s.upper, 3.25);
  EXPECT_EQ(s.count, 4);
  EXPECT_EQ(s.spread(), 0.6);
  EXPECT_EQ(statistics({7}).median, 7);
  EXPECT_EQ(statistics({}).count, 0);
  EXPECT_EQ(statistics({}).spread(), 0);
}

TEST(BenchTiming, RatiosAreRoundByRound) {
  const Statistics s = paired_ratio({2, 9, 8}, {1, 3});
  EXPECT_EQ(s.count, 2);
  EXPECT_EQ(s.median, 2.5);
}

TEST(BenchTiming, ContendersTakeTurns) {
  std::string order;
  const auto work = [&](char who) {
    return [&order, who] {
      order += who;
      const auto until =
          std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
      while (std::chrono::steady_clock::now() < until) continue;
    };
  };
  const auto times =
      interleave({work('a'), work('b')}, {.rounds = 4, .seconds = 0});
  EXPECT_EQ(order,
            "ab"
            "ab"
            "ba"
            "ab"
            "ba");  // the first round is a warm-up
  ASSERT_EQ(times.size(), 2u);
  for (const auto& series : times) {
    ASSERT_EQ(series.size(), 4u);
    for (const double seconds : series) EXPECT_GE(seconds, 0.9e-3);
  }
}

TEST(BenchTiming, ShortCallsAreRepeatedAndSpareTimeIsUsed) {
  int64_t calls = 0;
  const auto times =
      interleave({[&] { ++calls; }}, {.rounds = 2, .seconds = 0.02});
  EXPECT_GT(times[0].size(), 2u);
  EXPECT_GT(calls, 100 * static_cast<int64_t>(times[0].size()));
}

TEST(BenchTiming, MemoryOfACallIsSeen) {
  constexpr size_t kBytes = size_t{32} << 20;
  const auto bytes = extra_memory([] {
    std::vector<char> block(kBytes);
    std::memset(block.data(), 1, block.size());
  });
  if (!bytes) GTEST_SKIP() << "/proc/self/clear_refs cannot be written here";
  // Linux counts pages per thread and adds them up now and then.
  EXPECT_GT(*bytes, 0.95 * kBytes);
  EXPECT_LT(*bytes, 1.25 * kBytes);
}

TEST(Peak, WiderRegistersAreThereWithTheNarrower) {
  bool narrower = true;
  for (const int bits : {128, 256, 512}) {
    for (const Unit unit : {Unit::kFloat32, Unit::kFloat64}) {
      const auto rate = measure_arithmetic(unit, bits, 1);
      EXPECT_TRUE(narrower || !rate);
      if (!rate) continue;
      EXPECT_GT(rate->mean, 0.1);
      EXPECT_GE(rate->best, rate->mean);
    }
    narrower = measure_arithmetic(Unit::kFloat32, bits, 1).has_value();
    EXPECT_TRUE(narrower || bits > 128);
  }
  EXPECT_FALSE(measure_arithmetic(Unit::kBFloat16Pairs, 256, 1));
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
