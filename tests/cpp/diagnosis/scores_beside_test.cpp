// SPDX-License-Identifier: MIT
//
// What is done to scores and weights beside attention, and only a trace shows:
// soft caps, sinks and biases that are lines.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "tests/cpp/diagnosis/observations.h"

namespace multihead::diagnosis {
namespace {

constexpr double kCap = 3;

// (1, H, Lq, Lk): minus the distance, or the distance, times a slope of each
// head.
Tensor alibi(bool falls) {
  const Tensor key = at::arange(kKeys, at::kDouble);
  const Tensor query = at::arange(kQueries, at::kDouble).unsqueeze(-1);
  const Tensor slopes = at::linspace(0.1, 0.7, kHeads, at::kDouble);
  const Tensor line = slopes.view({1, kHeads, 1, 1}) * (key - query).abs();
  return falls ? -line : line;
}

// Likewise the position of the key, or minus it.
Tensor of_position(bool rises) {
  const Tensor slopes = at::linspace(0.1, 0.7, kHeads, at::kDouble);
  const Tensor line =
      slopes.view({1, kHeads, 1, 1}) * at::arange(kKeys, at::kDouble);
  return (rises ? line : -line).expand({1, kHeads, kQueries, kKeys});
}

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
  const PositionBias kind = recipe.position_bias;
  const bool of_keys =
      kind == PositionBias::kLateKeys || kind == PositionBias::kEarlyKeys;
  const bool falls = kind != PositionBias::kRising &&  //
                     kind != PositionBias::kEarlyKeys;
  call.line = {of_keys ? of_position(falls) : alibi(falls), falls, of_keys};
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

TEST(ScoresBeside, TheWeightOfASinkInThePlaceOfAKeysIsNamed) {
  const Tensor sink = at::linspace(-1, 2, kHeads, at::kDouble);
  for (const auto weight : {SinkWeight::kFirst, SinkWeight::kLast}) {
    Recipe recipe;
    recipe.sink = Sink::kLearned;
    recipe.sink_weight = weight;
    const Verdict verdict = explain(std::array{observed(recipe, sink)});
    EXPECT_EQ(names(verdict), "sink_weight_kept");
    EXPECT_TRUE(assumes(verdict, "sinks"));
  }
}

Recipe biased(PositionBias kind) {
  Recipe recipe;
  recipe.position_bias = kind;
  return recipe;
}

TEST(ScoresBeside, ABiasThatFallsWithTheDistanceIsReadFromTheTrace) {
  const Verdict verdict =
      explain(std::array{observed(biased(PositionBias::kFalling))});
  EXPECT_EQ(verdict.judgement, Judgement::kRounding) << names(verdict);
  ASSERT_EQ(verdict.conditions.size(), 1);
  EXPECT_EQ(verdict.conditions[0].name, "falling_bias");
}

TEST(ScoresBeside, ABiasThatTheTextSpeaksOfIsMeant) {
  Observation o = observed(biased(PositionBias::kFalling));
  o.metadata["says_position_bias"] = "true";
  const Verdict verdict = explain(std::array{o});
  EXPECT_EQ(verdict.judgement, Judgement::kRounding) << names(verdict);
  EXPECT_TRUE(assumes(verdict, "position_bias"));
  EXPECT_TRUE(verdict.conditions.empty());
}

TEST(ScoresBeside, OneThatRisesMustBeMeant) {
  const Verdict verdict =
      explain(std::array{observed(biased(PositionBias::kRising))});
  EXPECT_EQ(verdict.judgement, Judgement::kRounding) << names(verdict);
  ASSERT_EQ(verdict.conditions.size(), 1);
  EXPECT_EQ(verdict.conditions[0].name, "rising_bias");
}

// Where the trace shows weights of keys ahead of their query.
TEST(ScoresBeside, ABiasOfKeysMustBeMeant) {
  for (const auto& [kind, name] :
       {std::pair(PositionBias::kLateKeys, "bias_of_late_keys"),
        std::pair(PositionBias::kEarlyKeys, "bias_of_early_keys")}) {
    const Verdict verdict = explain(std::array{observed(biased(kind))});
    EXPECT_EQ(verdict.judgement, Judgement::kRounding) << names(verdict);
    ASSERT_EQ(verdict.conditions.size(), 1) << name;
    EXPECT_EQ(verdict.conditions[0].name, name);
  }
}

TEST(ScoresBeside, AFaultBesideABiasIsNamed) {
  for (const char* fault : {"scale_missing", "merge_not_transposed"}) {
    Recipe recipe = faulty(fault);
    recipe.position_bias = PositionBias::kFalling;
    EXPECT_EQ(names(explain(std::array{observed(recipe)})), fault);
  }
}

// Alone, what is no line is no bias of positions that could be believed; behind
// a mask, a line goes on.
TEST(ScoresBeside, OnlyALineIsABias) {
  at::manual_seed(42);
  const Tensor scores = random({kBatch, kHeads, kQueries, kKeys});
  const Tensor line = scores + alibi(true);
  const auto found = [&](const Tensor& shown) {
    ObservedCall call;
    call.trace = {scores, shown};
    try {
      return with_position_bias(call, PositionBias::kFalling, scores, 1.0,
                                /*adds_mask=*/true);
    } catch (const Impossible&) {
      return Tensor();
    }
  };
  EXPECT_FALSE(found(scores).defined());
  EXPECT_FALSE(found(scores + 1.0).defined());
  EXPECT_FALSE(found(scores + alibi(true).square()).defined());
  EXPECT_FALSE(found(scores + random({1, kHeads, kQueries, kKeys})).defined());
  EXPECT_FALSE(found(scores + alibi(false)).defined());  // it rises
  EXPECT_LT(largest_difference(found(line), line), 1e-12);
  const Tensor later =
      at::ones({kQueries, kKeys}, at::kBool).triu(kKeys - kQueries + 1);
  for (const double blocked : {-kInfinity, -1e9}) {
    const Tensor seen = found(line.masked_fill(later, blocked));
    ASSERT_TRUE(seen.defined());
    EXPECT_LT(largest_difference(seen.masked_fill(later, 0.0),
                                 line.masked_fill(later, 0.0)),
              1e-12);
  }
}

}  // namespace
}  // namespace multihead::diagnosis
