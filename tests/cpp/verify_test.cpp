// SPDX-License-Identifier: MIT
//
// The judge of `multihead verify` must be able to say no: each test plants a
// difference and expects the fault that names it.
#include <gtest/gtest.h>

#include "cli/judge.h"

namespace {

using cli::Comparison;
using cli::Part;
using cli::Values;
using cli::Verdict;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Part part(Values ours) {
  return Part{.name = "out", .shape = {2, 2}, .ours = std::move(ours)};
}

Verdict against_pytorch(Values ours, Values pytorch, bool bits,
                        std::optional<cli::Tolerance> close = {}) {
  Part p = part(std::move(ours));
  p.pytorch = std::move(pytorch);
  return cli::judge({.parts = {p}, .bits = bits, .close = close});
}

Verdict against_golden(Values ours, Values golden, double allowed) {
  Part p = part(std::move(ours));
  p.golden = std::move(golden);
  p.allowed = Values(p.ours.size(), allowed);
  return cli::judge({.parts = {p}});
}

TEST(Judge, EqualBitsAgree) {
  const auto verdict =
      against_pytorch({1, 2, kNaN, kInfinity}, {1, 2, kNaN, kInfinity}, true);
  EXPECT_TRUE(verdict.agrees());
  EXPECT_EQ(verdict.difference, 0);
  EXPECT_EQ(verdict.exercise, true);
  EXPECT_EQ(verdict.budget, std::nullopt);
}

TEST(Judge, OneBitIsAFaultAndIsNamed) {
  const double next = std::nextafter(3.0, 4.0);
  const auto verdict = against_pytorch({1, 2, next, 4}, {1, 2, 3, 4}, true);
  ASSERT_EQ(verdict.faults.size(), 1u);
  EXPECT_NE(verdict.faults[0].find("out: 1 of 4 elements differ from PyTorch's "
                                   "bits, first out[1, 0] = 3 instead of 3"),
            std::string::npos)
      << verdict.faults[0];
  EXPECT_EQ(verdict.difference, next - 3);
  EXPECT_EQ(verdict.exercise, true);
}

TEST(Judge, NaNOnOneSideOnlyIsAFault) {
  EXPECT_FALSE(against_pytorch({1, 2, 3, kNaN}, {1, 2, 3, 4}, true).agrees());
  EXPECT_FALSE(against_pytorch({1, 2, 3, 4}, {1, 2, 3, kNaN}, true).agrees());
  EXPECT_FALSE(against_golden({1, 2, 3, kNaN}, {1, 2, 3, 4}, 1e9).agrees());
  EXPECT_FALSE(against_golden({1, 2, 3, kInfinity}, {1, 2, 3, -kInfinity}, 1e9)
                   .agrees());
}

TEST(Judge, BudgetIsPerElementAndReportsItsShare) {
  auto verdict = against_golden({1, 2, 3, 4.5}, {1, 2, 3, 4}, 1);
  EXPECT_TRUE(verdict.agrees());
  EXPECT_EQ(verdict.budget, 0.5);
  EXPECT_EQ(verdict.error, 0.5);
  verdict = against_golden({1, 2, 3, 4.5}, {1, 2, 3, 4}, 0.25);
  EXPECT_EQ(verdict.budget, 2);
  ASSERT_EQ(verdict.faults.size(), 1u);
  EXPECT_NE(verdict.faults[0].find("outside the error budget"),
            std::string::npos);
}

TEST(Judge, NothingAllowedMeansEqual) {
  EXPECT_TRUE(against_golden({0, 0, 0, 0}, {0, 0, 0, 0}, 0).agrees());
  EXPECT_FALSE(against_golden({0, 0, 0, 1e-300}, {0, 0, 0, 0}, 0).agrees());
}

TEST(Judge, ToleranceIsAllclose) {
  const cli::Tolerance loose{1e-6, 0};
  const auto verdict =
      against_pytorch({0, 0, 0, 5e-7}, {0, 0, 0, 0}, false, loose);
  EXPECT_TRUE(verdict.agrees());
  EXPECT_EQ(verdict.exercise, false);  // 5e-7 > 1e-8, reported all the same
  EXPECT_FALSE(
      against_pytorch({0, 0, 0, 2e-6}, {0, 0, 0, 0}, false, loose).agrees());
}

TEST(Judge, ErrorsOfBothSidesAreReported) {
  Part p = part({1, 1, 1, 1});
  p.pytorch = Values{1, 1, 1, 1.5};
  p.golden = Values{1, 1, 1, 1.25};
  p.allowed = Values(4, 1);
  const auto verdict = cli::judge({.parts = {p}});
  EXPECT_EQ(verdict.error, 0.25);
  EXPECT_EQ(verdict.pytorch_error, 0.25);
  EXPECT_EQ(verdict.difference, 0.5);
}

TEST(Judge, DemandingNothingIsAFault) {
  EXPECT_FALSE(cli::judge({}).agrees());
  Part p = part({1, 2, 3, 4});
  EXPECT_FALSE(cli::judge({.parts = {p}, .bits = true}).agrees());
  p.pytorch = p.ours;
  EXPECT_FALSE(cli::judge({.parts = {p}}).agrees());
  p.misfit = "shape [2, 2] instead of [4]";
  EXPECT_FALSE(cli::judge({.parts = {p}, .bits = true}).agrees());
}

TEST(Judge, EveryPartIsJudged) {
  Part good = part({1, 2, 3, 4}), bad = good;
  good.pytorch = good.ours;
  bad.name = "weights";
  bad.pytorch = Values{1, 2, 3, 5};
  const auto verdict = cli::judge({.parts = {good, bad, good}, .bits = true});
  ASSERT_EQ(verdict.faults.size(), 1u);
  EXPECT_EQ(verdict.faults[0].rfind("weights:", 0), 0u);
}

}  // namespace
