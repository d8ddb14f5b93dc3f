// SPDX-License-Identifier: MIT
//
// Right, right if something is meant, wrong, not judged.
#include <gtest/gtest.h>

#include <array>

#include "tests/cpp/diagnosis/observations.h"

namespace multihead::diagnosis {
namespace {

std::vector<std::string> names_of(const std::vector<Condition>& conditions) {
  std::vector<std::string> names;
  for (const Condition& condition : conditions) names.push_back(condition.name);
  return names;
}

std::vector<std::string> names_of(const std::vector<Finding>& findings) {
  std::vector<std::string> names;
  for (const Finding& one : findings) names.push_back(one.name);
  return names;
}

using Names = std::vector<std::string>;

// A call with a mask of which nobody says what it means, and with padding.
std::vector<Observation> masked(const Layer& layer) {
  const Tensors cross = inputs(at::kDouble, 1.0);
  return {
      observe(layer, "mask",
              with(cross, "mask", random_mask({kQueries, kKeys}))),
      observe(layer, "padding",
              with(cross, "key_padding_mask", random_mask({kBatch, kKeys})))};
}

TEST(Conditions, APolarityThatNothingStatesDecides) {
  at::manual_seed(1);
  const Layer layer = make_layer(kHeads);
  Verdict verdict = explain(results(masked(layer), Recipe{}));
  EXPECT_EQ(names_of(verdict.conditions),
            (Names{"mask_blocks", "padding_blocks"}));
  EXPECT_EQ(names_of(verdict.assumptions),
            (Names{"mask_blocks", "padding_blocks"}));
  EXPECT_EQ(outcome_of(verdict), Outcome::kRightIf);
  const std::string text = to_text(verdict, /*width=*/200);
  EXPECT_TRUE(text.starts_with(
      "! This attention is right if True in the mask means blocked and True in "
      "the padding mask means padding: within rounding of PyTorch in both "
      "cases."))
      << text;
  EXPECT_NE(text.find("If that is so, say --allow mask_blocks,padding_blocks, "
                      "allow=\"all\" in Python, or \"mask: True = blocked\" in "
                      "the docstring of the code."),
            std::string::npos)
      << text;

  verdict = explain(results(masked(layer), changed([](Recipe& r) {
                              r.mask_keeps = r.padding_keeps = true;
                            })));
  EXPECT_EQ(names_of(verdict.conditions),
            (Names{"mask_keeps", "padding_keeps"}));
}

TEST(Conditions, WhatIsStatedIsNone) {
  at::manual_seed(2);
  std::vector<Observation> stated = masked(make_layer(kHeads));
  for (Observation& o : stated) o.metadata["mask"] = "blocked";
  stated = results(stated, Recipe{});
  EXPECT_EQ(outcome_of(explain(stated)), Outcome::kRight);
  EXPECT_TRUE(explain(stated).assumptions.empty());

  // The code's own text is quoted, in what is assumed and where it is not kept.
  stated[0].metadata["mask_says"] = "blocked";
  stated[0].metadata["mask_text"] = "True = hidden";
  const Verdict quoted = explain(stated);
  EXPECT_EQ(outcome_of(quoted), Outcome::kRight);
  ASSERT_EQ(names_of(quoted.assumptions), Names{"mask_blocks"});
  EXPECT_NE(quoted.assumptions[0].sentence.find("\"True = hidden\""),
            std::string::npos);
  for (Observation& o : stated) o.metadata["mask"] = "keep";
  stated[0].metadata["mask_says"] = "keep";
  const Verdict inverted = explain(stated);
  EXPECT_EQ(names(inverted), "mask_inverted+padding_inverted");
  EXPECT_EQ(inverted.faults[0].detail, "Its text says: \"True = hidden\".");
  EXPECT_TRUE(inverted.conditions.empty());
}

TEST(Conditions, CausalByItselfUnlessItsTextSaysSo) {
  at::manual_seed(3);
  std::vector<Observation> calls = {observe(make_layer(kHeads), "x",
                                            inputs(at::kDouble, 1.0),
                                            {{"is_causal", "infer"}})};
  calls = results(calls, changed([](Recipe& r) { r.causal_by_itself = true; }));
  EXPECT_EQ(names_of(explain(calls).conditions), Names{"causal_by_itself"});
  calls[0].metadata["causal_text"] = "class CausalSelfAttention";
  const Verdict stated = explain(calls);
  EXPECT_EQ(outcome_of(stated), Outcome::kRight);
  ASSERT_EQ(names_of(stated.assumptions), Names{"causal_by_itself"});
  EXPECT_NE(stated.assumptions[0].sentence.find("CausalSelfAttention"),
            std::string::npos);
}

// A call without a mask and one with it, of code that may be causal.
std::vector<Observation> with_and_without(const char* name, const Tensor& mask,
                                          const char* stated) {
  const Layer layer = make_layer(kHeads);
  const Tensors cross = inputs(at::kDouble, 1.0);
  return {observe(layer, "x", cross, {{"is_causal", "infer"}}),
          observe(layer, "masked", with(cross, name, mask),
                  {{"is_causal", "infer"}, {stated, "blocked"}})};
}

TEST(Conditions, CausalUnlessMaskedWhateverItsTextSays) {
  at::manual_seed(3);
  std::vector<Observation> calls =
      results(with_and_without("mask", random_mask({kQueries, kKeys}), "mask"),
              changed([](Recipe& r) { r.causal_unless_masked = true; }));
  EXPECT_EQ(names_of(explain(calls).conditions), Names{"causal_unless_masked"});
  // That it is causal does not say that a mask may change it.
  calls[0].metadata["causal_text"] = "class CausalSelfAttention";
  EXPECT_EQ(names_of(explain(calls).conditions), Names{"causal_unless_masked"});
}

TEST(Conditions, CausalUnlessPaddedIsNoConvention) {
  at::manual_seed(3);
  std::vector<Observation> calls = with_and_without(
      "key_padding_mask", random_mask({kBatch, kKeys}), "padding");
  const Recipe causal = changed([](Recipe& r) { r.causal_by_itself = true; });
  calls[0] = results({calls[0]}, causal)[0];
  calls[1] = results({calls[1]}, Recipe{})[0];
  EXPECT_EQ(outcome_of(explain(calls)), Outcome::kWrong);
}

TEST(Conditions, NoOutputProjectionDecidesWhereHeadsAreProjected) {
  at::manual_seed(4);
  const auto verdict_of = [](Layer layer, const char* heads) {
    for (const char* name : {"out_proj.weight", "out_proj.bias"})
      layer.tensors.erase(name);
    layer.facts["num_heads"] = layer.facts["num_kv_heads"] = heads;
    return explain(
        results({observe(layer, "x", inputs(at::kDouble, 1.0))}, Recipe{}));
  };
  Layer layer = make_layer(kHeads);
  EXPECT_EQ(names_of(verdict_of(layer, "8").conditions),
            Names{"no_output_projection"});
  EXPECT_TRUE(verdict_of(layer, "1").conditions.empty());
  for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
    layer.tensors[std::string(name) + ".weight"] = at::eye(kEmbed, at::kDouble);
    layer.tensors.erase(std::string(name) + ".bias");
  }
  EXPECT_TRUE(verdict_of(layer, "8").conditions.empty());
}

// Calls that are a part of what the code does: its heads.
TEST(Conditions, WhatStandsBesideItsHeadsDecides) {
  at::manual_seed(9);
  const auto verdict_of = [](const char* beside, const Recipe& recipe) {
    const Tensors heads = {
        {"query", random({kBatch, kHeads, kQueries, kEmbed / kHeads})},
        {"key", random({kBatch, kHeads, kKeys, kEmbed / kHeads})},
        {"value", random({kBatch, kHeads, kKeys, kEmbed / kHeads})}};
    return explain(results(
        {observe({}, "heads", heads, {{"core_beside", beside}})}, recipe));
  };
  const Verdict right = verdict_of("`conv.weight`", Recipe{});
  EXPECT_EQ(names_of(right.conditions), Names{"layers_beside"});
  ASSERT_EQ(names_of(right.assumptions), Names{"layers_beside"});
  EXPECT_NE(right.assumptions[0].sentence.find("`conv.weight`"),
            std::string::npos);
  const Verdict wrong = verdict_of("", faulty("scale_by_embed_dim"));
  EXPECT_EQ(names(wrong), "scale_by_embed_dim");
  EXPECT_EQ(names_of(wrong.assumptions), Names{"heads_only"});
  EXPECT_TRUE(wrong.conditions.empty());
}

// Scores that are no products come as queries whose keys are the unit vectors.
TEST(Conditions, ScoresThatAreGivenAndOtherPositionsDecide) {
  at::manual_seed(9);
  const auto verdict_of = [](const char* beside, const Recipe& recipe) {
    const Tensors heads = {
        {"query", random({kBatch, kHeads, kQueries, kKeys})},
        {"key", at::eye(kKeys, at::kDouble).expand({kBatch, kHeads, -1, -1})},
        {"value", random({kBatch, kHeads, kKeys, kEmbed / kHeads})}};
    return explain(results({observe({}, "heads", heads,
                                    {{"core_beside", beside},
                                     {"own_scale", "true"},
                                     {"scores_given", "true"}})},
                           recipe));
  };
  EXPECT_EQ(names_of(verdict_of("", Recipe{}).conditions),
            Names{"scores_given"});
  EXPECT_EQ(names_of(verdict_of("what is behind it", Recipe{}).conditions),
            (Names{"scores_given", "layers_beside"}));
  EXPECT_EQ(names(verdict_of("", faulty("softmax_twice"))), "softmax_twice");
  // They have no faults of their own.
  const Verdict unscaled = verdict_of("", faulty("scale_missing"));
  EXPECT_EQ(names(unscaled).find("scale"), std::string::npos);

  const Tensors heads = {
      {"query", random({kBatch, kHeads, kQueries, kEmbed / kHeads})},
      {"key", random({kBatch, kHeads, kKeys, kEmbed / kHeads})},
      {"value", random({kBatch, kHeads, kKeys, kEmbed / kHeads})}};
  const Verdict others = explain(results(
      {observe({}, "heads", heads,
               {{"core_beside", "`conv.weight`"}, {"attends_elsewhere", "7"}})},
      Recipe{}));
  EXPECT_EQ(names_of(others.conditions),
            (Names{"attends_elsewhere", "layers_beside"}));
  EXPECT_NE(others.assumptions[0].sentence.find("attends to 7 things"),
            std::string::npos);
}

TEST(Conditions, WhatItRefusesOrWasGuessedMayDecide) {
  at::manual_seed(5);
  const std::vector<Observation> calls = results(
      {observe(make_layer(kHeads), "x", inputs(at::kDouble, 1.0))}, Recipe{});
  const auto conditions = [&](const char* fact, const char* value) {
    std::vector<Observation> with_fact = calls;
    with_fact[0].metadata[fact] = value;
    return names_of(explain(with_fact).conditions);
  };
  EXPECT_EQ(conditions("takes_only", "equal_lengths"),
            Names{"equal_lengths_only"});
  EXPECT_EQ(conditions("takes_only", "one_sequence"),
            Names{"self_attention_only"});
  EXPECT_EQ(conditions("order_guessed", "true"), Names{"sequence_first"});
  EXPECT_EQ(conditions("additive_guessed", "true"), Names{"mask_additive"});
  EXPECT_EQ(conditions("switched_off", "`use_rope`"), Names{"switched_off"});
  EXPECT_EQ(conditions("order_inside", "true"), Names{});
  EXPECT_EQ(conditions("num_heads_guessed", "true"), Names{});
}

TEST(Conditions, AllHaveNamesOfTheirOwn) {
  Names names = names_of(all_conditions());
  EXPECT_EQ(names.size(), 57);
  std::ranges::sort(names);
  EXPECT_TRUE(std::ranges::adjacent_find(names) == names.end());
  for (const Condition& condition : all_conditions())
    EXPECT_FALSE(condition.sentence.empty()) << condition.name;
}

TEST(Conditions, AnUnknownFaultAssumesWhatSomeCallSupports) {
  at::manual_seed(6);
  const Layer layer = make_layer(kHeads);
  std::vector<Observation> calls = masked(layer);
  calls.push_back(observe(layer, "plain", inputs(at::kDouble, 1.0)));
  const Recipe keeps = changed([](Recipe& r) { r.mask_keeps = true; });
  const std::vector<Observation> right = results(calls, keeps, false);
  std::vector<Observation> wrong = right;
  for (Observation& o : wrong) o.tensors["out"] = o.tensors["out"].square();
  wrong[0].metadata["order_guessed"] = "true";
  Verdict verdict = explain(wrong);
  EXPECT_EQ(verdict.judgement, Judgement::kUnknown);
  EXPECT_TRUE(verdict.assumptions.empty()) << verdict.assumptions.at(0).name;
  wrong[0].tensors["out"] = right[0].tensors.at("out");
  verdict = explain(wrong);
  EXPECT_EQ(verdict.judgement, Judgement::kUnknown);
  EXPECT_EQ(names_of(verdict.assumptions),
            (Names{"mask_keeps", "sequence_first"}));
  EXPECT_TRUE(verdict.conditions.empty());
}

TEST(Conditions, WhatWasMadeUpIsNotJudged) {
  at::manual_seed(7);
  const auto verdict_of = [](const char* fault, const char* made_up) {
    std::vector<Observation> calls = {observe(
        make_layer(kHeads), "x",
        with(inputs(at::kDouble, 1.0), "mask", random_mask({kQueries, kKeys})),
        {{"mask", "blocked"}, {"made_up", made_up}})};
    return explain(results(calls, faulty(fault)));
  };
  const auto outcome = [&](const char* fault, const char* made_up) {
    const Verdict verdict = verdict_of(fault, made_up);
    EXPECT_EQ(names(verdict), fault);
    return outcome_of(verdict);
  };
  EXPECT_EQ(outcome("scale_missing", "number"), Outcome::kNotJudged);
  EXPECT_EQ(outcome("scale_missing", "mask"), Outcome::kWrong);
  EXPECT_EQ(outcome("mask_ignored", "nothing"), Outcome::kNotJudged);
  EXPECT_EQ(outcome("mask_ignored", "number"), Outcome::kWrong);
  EXPECT_EQ(outcome("mask_ignored", "number,mask"), Outcome::kNotJudged);
  EXPECT_EQ(outcome("inputs_swapped", "order"), Outcome::kNotJudged);
  EXPECT_EQ(outcome("inputs_swapped", "nothing"), Outcome::kWrong);
  EXPECT_EQ(outcome("output_forgotten", "nothing,number"), Outcome::kWrong);
}

TEST(Conditions, OutcomesOfReports) {
  const auto outcome = [](const std::string& json) {
    return std::pair(name_of(outcome_of(json)), exit_status(outcome_of(json)));
  };
  const std::string open =
      R"({"verdict": "bits", "conditions": [{"name": "mask_keeps"}])";
  using Pair = std::pair<std::string_view, int>;
  EXPECT_EQ(outcome(R"({"verdict": "bits"})"), Pair("right", 0));
  EXPECT_EQ(outcome(open + "}"), Pair("right_if", 3));
  EXPECT_EQ(outcome(open + R"(, "allowed": ["mask_blocks"]})"),
            Pair("right_if", 3));
  EXPECT_EQ(outcome(open + R"(, "allowed": ["mask_keeps"]})"),
            Pair("right", 0));
  EXPECT_EQ(outcome(open + R"(, "allowed": ["all"]})"), Pair("right", 0));
  EXPECT_EQ(outcome(open + R"(, "findings": [{"name": "raises"}]})"),
            Pair("wrong", 1));
  EXPECT_EQ(outcome(R"({"verdict": "fault"})"), Pair("wrong", 1));
  EXPECT_EQ(outcome(R"({"verdict": "unknown"})"), Pair("wrong", 1));
  EXPECT_EQ(outcome(R"({"verdict": "fault", "doubtful": true})"),
            Pair("not_judged", 2));
  EXPECT_EQ(outcome(R"({"verdict": "unknown",
                        "remarks": [{"name": "lost_in_rounding"}]})"),
            Pair("not_judged", 2));
  EXPECT_EQ(outcome(R"({"verdict": "unchecked"})"), Pair("not_judged", 2));
  EXPECT_EQ(outcome(R"({"verdict": "unchecked",
                        "findings": [{"name": "raises", "kind": "unchecked"}]})"),
            Pair("not_judged", 2));
  EXPECT_EQ(outcome(R"({"verdict": "unchecked",
                        "findings": [{"name": "hangs", "kind": "failure"}]})"),
            Pair("wrong", 1));
}

}  // namespace
}  // namespace multihead::diagnosis
