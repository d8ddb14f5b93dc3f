// SPDX-License-Identifier: MIT
//
// The judge of `multihead verify` must be able to say no: each test plants a
// difference and expects the fault that names it.
#include "cli/verify/verify.h"

#include <gtest/gtest.h>

namespace {

using cli::Agreement;
using cli::Comparison;
using cli::FaultKind;
using cli::Part;
using cli::Values;
using cli::Verdict;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Part part(Values ours) {
  return Part{.name = "out", .shape = {2, 2}, .ours = std::move(ours)};
}

Verdict against_pytorch(Values ours, Values pytorch,
                        Agreement demand = Agreement::kBits) {
  Part p = part(std::move(ours));
  p.pytorch = std::move(pytorch);
  return cli::judge({.parts = {p}, .pytorch = demand});
}

Verdict against_golden(Values ours, Values golden, double allowed) {
  Part p = part(std::move(ours));
  p.golden = std::move(golden);
  p.allowed = Values(p.ours.size(), allowed);
  return cli::judge({.parts = {p}});
}

TEST(Judge, EqualBitsAgree) {
  const auto verdict =
      against_pytorch({1, 2, kNaN, kInfinity}, {1, 2, kNaN, kInfinity});
  EXPECT_TRUE(verdict.agrees());
  EXPECT_EQ(verdict.difference, 0);
  EXPECT_EQ(verdict.exercise, true);
  EXPECT_EQ(verdict.budget, std::nullopt);
}

TEST(Judge, OneBitIsAFaultAndIsNamed) {
  const double next = std::nextafter(3.0, 4.0);
  const auto verdict = against_pytorch({1, 2, next, 4}, {1, 2, 3, 4});
  ASSERT_EQ(verdict.faults.size(), 1u);
  EXPECT_EQ(verdict.faults[0].kind, FaultKind::kBits);
  EXPECT_EQ(verdict.faults[0].text,
            "out: 1 of 4 elements differ from PyTorch's bits, first out[1, 0] "
            "= 3.0000000000000004 instead of 3 (one unit in the last place), "
            "largest difference 4.440892e-16");
  EXPECT_EQ(verdict.difference, next - 3);
  EXPECT_EQ(verdict.exercise, true);
}

// What the text prints for x instead of y, numbers of so many bits.
std::string difference_text(double x, double y, int digits) {
  Part p = part({x, 0, 0, 0});
  p.digits = digits;
  p.pytorch = Values{y, 0, 0, 0};
  const std::string text =
      cli::judge({.parts = {p}, .pytorch = Agreement::kBits}).faults.at(0).text;
  const size_t from = text.find("= ") + 2;
  return text.substr(from, text.find(", largest") - from);
}

TEST(Judge, ADifferenceIsPrintedWithTheDigitsOfItsType) {
  const float single = std::nextafter(-2.785015F, 0.0F);
  EXPECT_EQ(difference_text(single, -2.785015F, 24),
            "-2.7850149 instead of -2.785015 (one unit in the last place)");
  EXPECT_EQ(difference_text(1.015625, 1, 8),
            "1.015625 instead of 1 (2 units in the last place)");
  EXPECT_EQ(difference_text(2, 1, 53), "2 instead of 1");
  EXPECT_EQ(difference_text(1e-20, 0, 24), "1e-20 instead of 0");
  EXPECT_EQ(difference_text(kNaN, 1, 24), "nan instead of 1");
}

TEST(Judge, NaNOnOneSideOnlyIsAFault) {
  EXPECT_FALSE(against_pytorch({1, 2, 3, kNaN}, {1, 2, 3, 4}).agrees());
  EXPECT_FALSE(against_pytorch({1, 2, 3, 4}, {1, 2, 3, kNaN}).agrees());
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
  EXPECT_EQ(verdict.faults[0].kind, FaultKind::kBudget);
  EXPECT_NE(verdict.faults[0].text.find("outside the error budget"),
            std::string::npos);
}

TEST(Judge, NothingAllowedMeansEqual) {
  EXPECT_TRUE(against_golden({0, 0, 0, 0}, {0, 0, 0, 0}, 0).agrees());
  EXPECT_FALSE(against_golden({0, 0, 0, 1e-300}, {0, 0, 0, 0}, 0).agrees());
}

TEST(Judge, CloseIsTwiceTheBudget) {
  const auto close = [](double ours, double pytorch) {
    Part p = part({0, 0, 0, ours});
    p.pytorch = Values{0, 0, 0, pytorch};
    p.golden = Values{0, 0, 0, 0};
    p.allowed = Values(4, 1);
    return cli::judge({.parts = {p}, .pytorch = Agreement::kClose});
  };
  EXPECT_TRUE(close(1, -1).agrees());
  EXPECT_TRUE(close(1, 1).agrees());
  const Verdict verdict = close(1, -1.5);
  ASSERT_EQ(verdict.faults.size(), 1u);
  EXPECT_EQ(verdict.faults[0].kind, FaultKind::kClose);
  EXPECT_EQ(close(1.5, 1).faults.at(0).kind, FaultKind::kBudget);
}

TEST(Judge, WithoutABudgetCloseIsTheExercisesAllclose) {
  const auto close = [](double ours) {
    return against_pytorch({0, 0, 0, ours}, {0, 0, 0, 0}, Agreement::kClose);
  };
  EXPECT_TRUE(close(5e-9).agrees());
  EXPECT_EQ(close(5e-9).exercise, true);
  EXPECT_FALSE(close(2e-8).agrees());
  EXPECT_EQ(close(2e-8).exercise, false);
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
  EXPECT_FALSE(
      cli::judge({.parts = {p}, .pytorch = Agreement::kBits}).agrees());
  p.pytorch = p.ours;
  EXPECT_FALSE(cli::judge({.parts = {p}}).agrees());
  p.misfit = "shape [2, 2] instead of [4]";
  EXPECT_FALSE(
      cli::judge({.parts = {p}, .pytorch = Agreement::kBits}).agrees());
}

TEST(Judge, EveryPartIsJudged) {
  Part good = part({1, 2, 3, 4}), bad = good;
  good.pytorch = good.ours;
  bad.name = "weights";
  bad.pytorch = Values{1, 2, 3, 5};
  const auto verdict =
      cli::judge({.parts = {good, bad, good}, .pytorch = Agreement::kBits});
  ASSERT_EQ(verdict.faults.size(), 1u);
  EXPECT_EQ(verdict.faults[0].text.rfind("weights:", 0), 0u);
}

TEST(VerifyReport, WhatFailedStandsAtTheEndWithWhatItMeans) {
  const std::vector<cli::Case> cases{
      {.group = "one", .name = "good", .shapes = "N1", .run = {}},
      {.group = "two", .name = "bad", .shapes = "N2", .run = {}}};
  const std::vector<cli::Outcome> outcomes{
      {&cases[0], against_pytorch({1, 2, 3, 4}, {1, 2, 3, 4}), 0.0},
      {&cases[1], against_pytorch({1, 2, 3, 4}, {1, 2, 3, 5}), 0.0}};
  testing::internal::CaptureStdout();
  cli::VerifyReport report(cases);
  for (const cli::Outcome& outcome : outcomes) report.add(outcome);
  report.closing(outcomes, 0.5, {});
  const std::string text = testing::internal::GetCapturedStdout();
  const std::string end = text.substr(text.find("These cases differ:"));
  EXPECT_EQ(end.find("good"), std::string::npos);
  for (const char* part : {"two: bad, N2\n", "first out[1, 1] = 4 instead of 5",
                           "Bits differ, although both sides",
                           "1 of 2 cases agree; 1 bit for bit"})
    EXPECT_NE(end.find(part), std::string::npos) << part << "\n" << end;
}

}  // namespace
