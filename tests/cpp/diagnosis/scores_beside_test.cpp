// SPDX-License-Identifier: MIT
//
// What is done to scores and weights beside attention, and only a trace shows:
// soft caps and sinks.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "tests/cpp/diagnosis/observations.h"

namespace multihead::diagnosis {
namespace {

constexpr double kCap = 3;

// A call of code with this recipe, which shows what it computes; `sink`: a
// learned number for each head, or undefined.
Observation observed(const Recipe& recipe, const Tensor& sink = {}) {
  at::manual_seed(40);
  Observation o = observe(make_layer(kHeads), "beside",
                          {{"query", random({kBatch, kQueries, kEmbed})},
                           {"key", random({kBatch, kKeys, kEmbed})},
                           {"value", random({kBatch, kKeys, kEmbed})}});
  o.tensors["out"] = o.tensors["query"];
  if (sink.defined()) o.tensors["sinks"] = sink;
  const ObservedCall call = read_dump(o);
  call.cap = kCap;
  const std::optional<Stages> stages = simulate(call, recipe);
  TORCH_CHECK(stages.has_value());
  int64_t count = 0;
  for (const Tensor& x : {stages->heads[0], stages->heads[1], stages->scores,
                          stages->weights, stages->context, stages->merged}) {
    o.tensors["trace." + std::to_string(count++)] = x.contiguous();
  }
  o.tensors["out"] = stages->out;
  return o;
}

bool assumes(const Verdict& verdict, std::string_view name) {
  return std::ranges::find(verdict.assumptions, name, &Finding::name) !=
         verdict.assumptions.end();
}

TEST(ScoresBeside, ASoftCapIsReadFromTheTrace) {
  const Verdict verdict = explain(
      std::array{observed(changed([](Recipe& r) { r.softcapped = true; }))});
  EXPECT_EQ(verdict.judgement, Judgement::kRounding) << names(verdict);
  ASSERT_EQ(verdict.conditions.size(), 1);
  EXPECT_EQ(verdict.conditions[0].name, "softcap");
}

TEST(ScoresBeside, AFaultBesideASoftCapIsNamed) {
  Recipe recipe = faulty("scale_by_embed_dim");
  recipe.softcapped = true;
  EXPECT_EQ(names(explain(std::array{observed(recipe)})), "scale_by_embed_dim");
}

// One c for all scores: what is no tanh of them, or only rounds them, is none.
TEST(ScoresBeside, OtherTensorsAreNoCap) {
  at::manual_seed(41);
  const Tensor scores = random({kBatch, kHeads, kQueries, kKeys});
  const Tensor capped = kCap * (scores / kCap).tanh();
  for (const Tensor& other :
       {scores, scores * 0.5, scores.clamp(-1, 1), scores.to(at::kFloat),
        capped + 1e-3, capped.flip(-1), at::zeros_like(scores)}) {
    ObservedCall call;
    call.trace = {other};
    EXPECT_THROW(softcapped(call, scores), Impossible);
    EXPECT_FALSE(call.cap.has_value());
  }
  ObservedCall call;
  call.trace = {scores, capped};
  EXPECT_LT(largest_difference(softcapped(call, scores), capped), 1e-12);
  ASSERT_TRUE(call.cap.has_value());
  EXPECT_NEAR(*call.cap, kCap, 1e-9);
}

// There, a cap that is far above all scores would show as little as none.
TEST(ScoresBeside, PlainFloat32IsNotCapped) {
  Observation o = observed(faulty("scale_by_embed_dim"));
  for (auto& [name, tensor] : o.tensors) tensor = tensor.to(at::kFloat);
  const Verdict verdict = explain(std::array{o});
  EXPECT_EQ(names(verdict), "scale_by_embed_dim");
  EXPECT_FALSE(assumes(verdict, "softcap"));
}

TEST(ScoresBeside, LearnedSinksTakeSomeOfTheWeight) {
  const Recipe sunk = changed([](Recipe& r) { r.sink = Sink::kLearned; });
  const Verdict verdict = explain(
      std::array{observed(sunk, at::linspace(-1, 2, kHeads, at::kDouble))});
  EXPECT_EQ(verdict.judgement, Judgement::kRounding) << names(verdict);
  EXPECT_TRUE(assumes(verdict, "sinks"));
  EXPECT_TRUE(verdict.conditions.empty());
}

TEST(ScoresBeside, SoftmaxPlusOneMustBeMeant) {
  const Recipe plus_one = changed([](Recipe& r) { r.sink = Sink::kZero; });
  const Verdict verdict = explain(std::array{observed(plus_one)});
  EXPECT_EQ(verdict.judgement, Judgement::kRounding) << names(verdict);
  ASSERT_EQ(verdict.conditions.size(), 1);
  EXPECT_EQ(verdict.conditions[0].name, "sinks");
}

TEST(ScoresBeside, AFaultBesideSinksIsNamed) {
  Recipe recipe = faulty("scale_missing");
  recipe.sink = Sink::kLearned;
  const Tensor sink = at::linspace(-1, 2, kHeads, at::kDouble);
  EXPECT_EQ(names(explain(std::array{observed(recipe, sink)})),
            "scale_missing");
}

}  // namespace
}  // namespace multihead::diagnosis
