// SPDX-License-Identifier: MIT
//
// Verdicts beyond the catalogue: what is right, what nothing explains, pairs.
#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "multihead/multihead.h"
#include "tests/cpp/diagnosis/observations.h"

namespace multihead::diagnosis {
namespace {

TEST(Explain, AttentionIsRight) {
  at::manual_seed(1);
  for (const int64_t groups : {kHeads, int64_t{4}, int64_t{1}}) {
    const Verdict verdict =
        explain(results(calls(make_layer(groups)), Recipe{}));
    EXPECT_EQ(verdict.judgement, Judgement::kRounding) << names(verdict);
    EXPECT_TRUE(verdict.faults.empty());
    EXPECT_TRUE(verdict.assumptions.empty());
  }
  EXPECT_EQ(explain(results(calls(make_uneven_layer()), Recipe{})).judgement,
            Judgement::kRounding);
}

// As of a sequence without tokens among packed ones.
TEST(Explain, ATraceMayHaveTensorsWithoutNumbers) {
  at::manual_seed(1);
  const Layer layer = make_layer(kHeads);
  Observation o = observe(layer, "out", inputs(at::kDouble, 1.0));
  o.tensors["key"] = o.tensors["query"];
  o.tensors["value"] = o.tensors["query"];
  o.tensors["out"] = o.tensors["query"];
  o.tensors["out"] = simulate(read_dump(o), Recipe{})->out;
  o.tensors["trace.0"] = at::zeros({1, 0, 0}, at::kDouble);
  o.tensors["trace.1"] = at::zeros({2, 0, 3}, at::kDouble);
  EXPECT_EQ(explain(std::array{o}).judgement, Judgement::kRounding);
}

// What render_report makes of it; multihead.h alone declares both.
TEST(Explain, AVerdictIsText) {
  at::manual_seed(1);
  const Verdict verdict =
      explain(results(calls(make_layer(kHeads)),
                      changed([](Recipe& r) { r.transposed[0] = true; })));
  const std::string text = to_text(verdict);
  EXPECT_TRUE(text.starts_with("✗ This attention is wrong: it has one fault"))
      << text;
  EXPECT_EQ(text, render_report(to_json(verdict), ReportFormat::kText));
  EXPECT_NE(to_text(verdict, /*width=*/120), text);
}

// What out itself shows is the news, before any search: the shape, and NaN.
TEST(Explain, AWrongShapeOrNaNIsTheNews) {
  at::manual_seed(7);
  const Layer layer = make_layer(kHeads);
  Observation o = observe(layer, "out", inputs(at::kDouble, 1.0));
  o.tensors["out"] = o.tensors["query"];
  const Tensor right = simulate(read_dump(o), Recipe{})->out;
  const auto headline = [&](const Tensor& out, const char* name) {
    o.tensors["out"] = out;
    const Verdict verdict = explain(std::array{o});
    EXPECT_EQ(verdict.judgement, Judgement::kUnknown);
    EXPECT_EQ(verdict.findings.size(), 1);
    EXPECT_EQ(verdict.findings.at(0).name, name);
    EXPECT_TRUE(verdict.remarks.empty());
    const std::string text = to_text(verdict, /*width=*/120);
    EXPECT_LT(text.find(verdict.findings.at(0).sentence), text.find("way on"))
        << text;
    return text;
  };
  const std::string shape =
      headline(random({kBatch, kQueries, 24}), "wrong_shape");
  EXPECT_TRUE(shape.starts_with(
      "✗ This attention is wrong: it returns the wrong shape"))
      << shape;
  EXPECT_NE(shape.find("(3, 5, 24), attention on these inputs (3, 5, 48)"),
            std::string::npos)
      << shape;
  Tensor nan = right.clone();
  nan[1][2][3] = std::numeric_limits<double>::quiet_NaN();
  const std::string numbers = headline(nan, "not_finite");
  EXPECT_TRUE(numbers.starts_with(
      "✗ This attention is wrong: it returns numbers that are not finite"))
      << numbers;
  EXPECT_NE(numbers.find("Of 720 numbers of out, 1 is NaN"), std::string::npos)
      << numbers;
}

// An output has as many numbers as the weights where D = Lk: their axes tell.
TEST(Explain, DropoutOfTheOutputIsToldFromThatOfWeights) {
  at::manual_seed(8);
  const int64_t keys = kEmbed / kHeads;
  const Tensor x = random({kBatch, keys, kEmbed});
  const auto run_of = [&](const char* training) {
    return observe(make_layer(kHeads), training,
                   {{"x", x}, {"dropout_keep", at::rand(x.sizes()).gt(0.25)}},
                   {{"training", training}, {"dropout_p", "0.25"}});
  };
  const Verdict verdict = explain(
      results({run_of("true"), run_of("false")},
              changed([](Recipe& r) { r.dropout = Dropout::kLeftOnOutput; })));
  EXPECT_EQ(names(verdict), "dropout_left_on");
  EXPECT_EQ(verdict.first_stage, "output");
}

// However large the numbers are, and of whatever type.
TEST(Explain, NoiseIsNeitherRightNorNamed) {
  at::manual_seed(2);
  const Layer layer = make_layer(kHeads);
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const double spread : {0.1, 1.0, 10.0, 1e3, 1e5}) {
      Observation noise = observe(layer, "noise", inputs(dtype, spread));
      noise.tensors["out"] =
          (random({kBatch, kQueries, kEmbed}) * spread).to(dtype);
      const Verdict verdict = explain(std::array{noise});
      EXPECT_EQ(verdict.judgement, Judgement::kUnknown)
          << dtype << " " << spread << " " << names(verdict);
    }
  }
}

TEST(Explain, PyTorchsOwnBitsAreRight) {
  at::manual_seed(3);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const double spread : {0.1, 1.0, 5.0, 30.0}) {
      Observation o = observe(make_layer(kHeads), "own", inputs(dtype, spread));
      o.tensors["out"] = o.tensors["query"];
      o.tensors["out"] = pytorch_results(read_dump(o), Recipe{}).front();
      const Verdict verdict = explain(std::array{o});
      EXPECT_EQ(verdict.judgement, Judgement::kBits)
          << dtype << " " << spread << " " << names(verdict);
    }
  }
}

// What it is, only the steps on the way show.
TEST(Explain, AnotherScaleIsTold) {
  at::manual_seed(4);
  Observation o = observe(make_layer(kHeads), "0.1", inputs(at::kDouble, 1.0),
                          {{"scale", "0.1"}});
  o.tensors["out"] = o.tensors["query"];
  const std::optional<Stages> stages = simulate(read_dump(o), Recipe{});
  o.tensors["out"] = stages->out;
  o.tensors["trace.0"] = stages->scores;
  EXPECT_EQ(explain(std::array{o}).judgement, Judgement::kRounding);
  o.metadata.erase("scale");
  EXPECT_EQ(names(explain(std::array{o})), "scale_of_another_number");
  // Queries were scaled before, by less: the last scores on the way count.
  o.tensors["trace.1"] = o.tensors["trace.0"];
  o.tensors["trace.0"] = stages->scores / 0.3;
  EXPECT_EQ(names(explain(std::array{o})), "scale_of_another_number");
}

// None of those that are known by name: the trace shows which.
TEST(Explain, AnotherSentinelIsTold) {
  at::manual_seed(6);
  auto given = calls(make_layer(kHeads));
  for (const double number : {-1.19e-7, -0.3, -100.0}) {
    Recipe recipe;
    recipe.sentinel = number;
    std::vector<Observation> observations = results(given, recipe);
    for (Observation& o : observations) {
      const std::optional<Stages> stages = simulate(read_dump(o), recipe);
      o.tensors["trace.0"] = stages->scores;
      o.tensors["trace.1"] = stages->masked_scores;
    }
    const std::string told = number < -50 ? "" : "mask_sentinel_leaks";
    EXPECT_EQ(names(explain(observations)), told) << number;
  }
}

// One fault of what comes out, one of what is returned beside it.
TEST(Explain, PairsMayShowInDifferentTensors) {
  at::manual_seed(5);
  const auto name_of_both = [](const Recipe& recipe) {
    return names(explain(results(calls(make_layer(kHeads)), recipe)));
  };
  Recipe summed = faulty("scale_missing");
  summed.returned = Returned::kSum;
  EXPECT_EQ(name_of_both(summed), "returned_weights_summed+scale_missing");
  Recipe detached = faulty("scale_by_embed_dim_not_root");
  detached.detached = Detached::kKey;
  EXPECT_EQ(name_of_both(detached),
            "gradient_detached+scale_by_embed_dim_not_root");
}

// Where nothing explains a result, what was not stated is still read as it
// comes nearest: the matrices here as (in, out).
TEST(Explain, AnUnknownFaultIsLocatedUnderTheNearestReading) {
  at::manual_seed(6);
  Layer layer = make_layer(kHeads);
  std::erase_if(layer.facts, [](const auto& fact) {
    return fact.first.starts_with("layout:");
  });
  Observation o = observe(layer, "unknown", inputs(at::kDouble, 1.0));
  o.tensors["out"] = o.tensors["query"];
  const Recipe in_out = changed([](Recipe& r) { r.weights_in_out = true; });
  const std::optional<Stages> stages = simulate(read_dump(o), in_out);
  o.tensors["out"] = stages->out.square();
  size_t i = 0;
  for (const Tensor& tensor :
       {stages->projected[0], stages->projected[1], stages->projected[2],
        stages->scores, stages->weights, stages->context, stages->merged}) {
    o.tensors["trace." + std::to_string(i++)] = tensor;
  }
  const Verdict verdict = explain(std::array{o});
  EXPECT_EQ(verdict.judgement, Judgement::kUnknown);
  EXPECT_EQ(verdict.first_stage, "output");
  ASSERT_EQ(verdict.assumptions.size(), 1);
  EXPECT_EQ(verdict.assumptions[0].name, "weights_in_out");
}

}  // namespace
}  // namespace multihead::diagnosis
