// SPDX-License-Identifier: MIT
//
// Statistics of `multihead bench` against numbers by hand, its inputs_by_turns,
// memory and peaks against what is certain of them.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "cli/bench/timing.h"

namespace {

using namespace cli;

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

}  // namespace
