// SPDX-License-Identifier: MIT
//
// `multihead bench --compare`: records written by hand, so that nothing here
// depends on time.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <stdexcept>

#include "cli/bench/compare.h"
#include "cli/bench/report.h"

namespace {

using namespace cli;
using Json = nlohmann::json;

Json contender(const std::string& name, double ratio, double half_spread) {
  return {{"name", name},
          {"status", "ok"},
          {"seconds", {{"best", 1e-3}}},
          {"ratio",
           {{"best", ratio},
            {"paired",
             {{"best", ratio},
              {"lower_quartile", ratio - half_spread},
              {"median", ratio},
              {"upper_quartile", ratio + half_spread},
              {"rounds", 10}}}}}};
}

Json measurement(const std::string& name, double ratio, int threads = 1,
                 double half_spread = 0.01, const char* who = "SDPA") {
  return {{"group", "g"},
          {"case", name},
          {"shapes", "B1"},
          {"threads", threads},
          {"contenders",
           {contender("ours", 1, 0), contender(who, ratio, half_spread)}}};
}

Json record(std::vector<Json> measurements) {
  return {{"environment",
           {{"version", "0.1.0"},
            {"torch", {{"running", "2.13.0"}}},
            {"blas", "MKL"},
            {"cpu", {{"model", "A"}, {"id", "family 1"}}}}},
          {"date", "2026-01-02"},
          {"isa", "avx2"},
          {"pytorch_held_to_isa", false},
          {"measurements", std::move(measurements)}};
}

Record parsed(const Json& json) { return parse_record(json.dump(), "x.json"); }

std::string refusal(const std::string& text) {
  try {
    parse_record(text, "x.json");
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(BenchCompare, WhatChangedMoreThanTheSpreadIsNamed) {
  const auto change = [](double then, double now, double half_spread) {
    const Record a = parsed(record({measurement("c", then, 1, half_spread)})),
                 b = parsed(record({measurement("c", now, 1, half_spread)}));
    return compare(a, b).at(0).change;
  };
  EXPECT_EQ(change(1, 1.1, 0.01), Change::kFaster);
  EXPECT_EQ(change(1.1, 1, 0.01), Change::kSlower);
  EXPECT_EQ(change(1, 1.1, 0.06), Change::kNoise);     // the quartiles overlap
  EXPECT_EQ(change(1, 1.015, 0.001), Change::kNoise);  // less than 2 %
  EXPECT_EQ(change(1, 1, 0), Change::kNoise);
}

TEST(BenchCompare, BestCallsThatSayTheOppositeMakeNoise) {
  Json now = measurement("c", 1.1);
  now["contenders"][1]["ratio"]["best"] = 0.99;
  const Record a = parsed(record({measurement("c", 1)})),
               b = parsed(record({now}));
  EXPECT_EQ(compare(a, b).at(0).change, Change::kNoise);
}

TEST(BenchCompare, CasesAreTheSameByTitleAndThreads) {
  const Record a = parsed(
                   record({measurement("both", 1, 1), measurement("both", 2, 2),
                           measurement("then", 1, 1)})),
               b = parsed(record(
                   {measurement("now", 1, 1), measurement("both", 3, 2)}));
  const auto all = compare(a, b);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].now->threads, 2);
  EXPECT_EQ(all[0].ratio(), 1.5);
  EXPECT_EQ(a.threads_of("g: both B1"), (std::vector{1, 2}));
  EXPECT_TRUE(a.threads_of("g: now B1").empty());
}

TEST(BenchCompare, TheContenderIsRightInBoth) {
  Json two = measurement("c", 2);
  two["contenders"].push_back(contender("by hand", 3, 0));
  Json wrong = two;
  wrong["contenders"][1] = {{"name", "SDPA"}, {"status", "wrong"}};
  Json ours = two;
  ours["contenders"][0] = {{"name", "ours"}, {"status", "failed"}};
  const Record a = parsed(record({two}));
  EXPECT_EQ(compare(a, a).at(0).rival_now->name, "SDPA");
  EXPECT_EQ(compare(a, parsed(record({wrong}))).at(0).rival_now->name,
            "by hand");
  EXPECT_TRUE(compare(a, parsed(record({ours}))).empty());
  // PyTorch's comes before ours in another way, wherever it stands.
  Json ragged = measurement("c", 2, 1, 0, "one by one");
  ragged["contenders"].push_back(contender("SDPA", 3, 0));
  const Record r = parsed(record({ragged}));
  EXPECT_EQ(compare(r, r).at(0).rival_now->name, "SDPA");
}

TEST(BenchCompare, ARecordKeepsWhatIsAskedFor) {
  const auto kept = [](const std::string& filter, std::vector<int> threads) {
    Record a =
        parsed(record({measurement("one", 1, 1), measurement("one", 1, 2),
                       measurement("two", 1, 1)}));
    a.keep(filter, threads);
    return a.cases.size();
  };
  EXPECT_EQ(kept("", {}), 3u);
  EXPECT_EQ(kept("g: one", {}), 2u);
  EXPECT_EQ(kept("one", {2}), 1u);
  EXPECT_EQ(kept("", {4}), 0u);
}

TEST(BenchCompare, TimesAreOfOneProcessor) {
  Json other = record({});
  other["environment"]["cpu"]["id"] = "family 2";
  EXPECT_TRUE(same_processor(parsed(record({})), parsed(record({}))));
  EXPECT_FALSE(same_processor(parsed(record({})), parsed(other)));
}

TEST(BenchCompare, WhatIsNoRecordIsRefused) {
  EXPECT_EQ(refusal(record({measurement("c", 1)}).dump()), "");
  EXPECT_NE(
      refusal("x").find("--compare must be JSON, got x.json: parse error"),
      std::string::npos);
  const std::string no_record =
      "bench: --compare must be a record that bench --json wrote, got x.json: ";
  EXPECT_EQ(refusal("{}"), no_record + "key 'environment' not found");
  EXPECT_TRUE(refusal("[]").starts_with(no_record));
  EXPECT_EQ(refusal(record({measurement("c", 0)}).dump()),
            no_record + "best must be positive, got 0.0");
  Json test = measurement("c", 1);
  test["threads"] = "one";
  EXPECT_EQ(refusal(record({test}).dump()),
            no_record + "type must be number, but is string");
}

// What to_json writes, parse_record reads.
TEST(BenchCompare, ARunIsARecord) {
  const BenchCase test{
      .group = "g", .name = "n", .call = AttentionCall{.name = "", .D = 8}};
  BenchRun run{.environment = {},
               .date = "2026-01-02",
               .isa = "avx2",
               .family = "avx2",
               .plan = {}};
  run.environment.cpu = "A";
  run.environment.commit = "b25ce6d";
  const Statistics ratio = statistics({1.4, 1.5, 1.6});
  run.measurements.push_back({.test = &test,
                              .threads = 2,
                              .peak = {},
                              .entries = {{.who = Implementation::kOurs,
                                           .time = statistics({1e-3, 2e-3})},
                                          {.who = Implementation::kSdpa,
                                           .time = statistics({2e-3}),
                                           .ratio = 2,
                                           .paired = ratio}}});
  const Record read = parse_record(to_json(run), "this run");
  EXPECT_EQ(headline(read.run), headline(run));
  ASSERT_EQ(read.cases.size(), 1u);
  EXPECT_EQ(read.cases[0].threads, 2);
  EXPECT_EQ(read.cases[0].seconds, 1e-3);
  ASSERT_EQ(read.cases[0].rivals.size(), 1u);
  EXPECT_EQ(read.cases[0].rivals[0].best, 2);
  EXPECT_EQ(read.cases[0].rivals[0].paired.median, ratio.median);
  EXPECT_EQ(read.cases[0].rivals[0].paired.upper, ratio.upper);
}

}  // namespace
