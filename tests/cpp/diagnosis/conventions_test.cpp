// SPDX-License-Identifier: MIT
//
// What stands beside attention is no fault, and a fault beside it has its name:
// each convention, and each with a fault, whose trace is what such code
// computes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "tests/cpp/diagnosis/observations.h"

namespace multihead::diagnosis {
namespace {

// Parameters of all that may stand beside attention.
Layer layer_beside(std::string_view name, const Recipe& recipe = {}) {
  Layer layer =
      name.starts_with("fused_") ? make_fused_layer() : make_layer(kHeads);
  const int64_t width = kEmbed / kHeads;
  if (name == "norm_of_heads" || name == "scale_in_gains") {
    const int64_t normed = recipe.norm_is_wide ? kEmbed : width;
    layer.tensors["q_norm.weight"] = at::rand({normed}, at::kDouble) + 0.5;
    layer.tensors["k_norm.weight"] = at::rand({normed}, at::kDouble) + 0.5;
  } else if (name.find("norm") != name.npos || name == "residual") {
    // Around 0, where they are counted from 1.
    const bool from_one = recipe.input_norm == NormKind::kLayerFromOne ||
                          recipe.input_norm == NormKind::kRmsFromOne;
    const bool of_heads = recipe.context_norm != NormKind::kNone;
    layer.tensors["norm.weight"] =
        at::rand({of_heads ? width : kEmbed}, at::kDouble) +
        (from_one ? -0.5 : 0.5);
  }
  if (name == "unscaled") {
    layer.tensors["table"] = random({9, kHeads});
    layer.facts["speaks_of_t5"] = "true";
  }
  if (name.ends_with("_mixed")) {
    layer.tensors["talk.weight"] = random({kHeads, kHeads});
    layer.tensors["talk.bias"] = random({kHeads});
    layer.tensors["then.weight"] = random({kHeads, kHeads, 1, 1});
  }
  if (name == "learned_scale" || name == "unscaled_beside_number" ||
      (name.find("gain") != name.npos && name != "scale_in_gains")) {
    layer.tensors["gamma"] = at::full({1}, 0.7, at::kDouble);
  }
  return layer;
}

// One call as code with this recipe would leave it.
Observation observed(const Layer& layer, const Recipe& recipe) {
  Observation o = observe(layer, "beside", inputs(at::kDouble, 1.0));
  if (recipe.residual == Residual::kValues) {  // as many as queries
    o.tensors.erase("key");
    o.tensors.erase("value");
  }
  o.tensors["out"] = o.tensors["query"];
  const ObservedCall call = read_dump(o);
  const std::optional<Stages> stages = simulate(call, recipe);
  TORCH_CHECK(stages.has_value());
  o.tensors["out"] = stages->out;
  Recipe before = recipe;  // what an end is made of
  before.output_norm = NormKind::kNone;
  Recipe alone = before;
  alone.residual = Residual::kNone;
  Recipe ungained = alone;
  ungained.output_gain = false;
  Recipe plain = recipe;  // what a norm of the context is made of
  plain.context_norm = plain.merged_norm = NormKind::kNone;
  std::vector<Tensor> trace;
  for (const Tensor& x : stages->inputs) trace.push_back(x);
  for (const Tensor& x : stages->heads) trace.push_back(x);
  trace.push_back(stages->heads[0].matmul(stages->heads[1].mT()));
  trace.insert(trace.end(),
               {stages->scores, stages->weights, simulate(call, plain)->context,
                stages->context, simulate(call, plain)->merged, stages->merged,
                simulate(call, alone)->out, simulate(call, ungained)->out,
                simulate(call, before)->out});
  if (recipe.residual == Residual::kSetBlock) {
    trace.push_back(stages->merged + stages->projected[0]);
  }
  if (recipe.residual == Residual::kAfterNorm) {
    trace.push_back(stages->out - call.inputs[0]);
  }
  for (size_t i = 0; i < trace.size(); ++i) {
    o.tensors["trace." + std::to_string(i)] = trace[i].contiguous();
  }
  return o;
}

std::vector<const Convention*> structure() {
  std::vector<const Convention*> all;
  for (const Convention& convention : all_conventions()) {
    // A bias of positions is what the trace says, and so are angles, caps and
    // what a ReLU meets; sinks are numbers, and the residual of an input behind
    // its norm needs that norm.
    Recipe recipe;
    convention.apply(recipe);
    if (convention.is_structure() &&
        recipe.position_bias == PositionBias::kNone &&
        recipe.rotary != Rotary::kShown && !recipe.turned[2] &&
        !recipe.softcapped && recipe.sink == Sink::kNone &&
        recipe.residual != Residual::kThenRelu &&
        recipe.residual != Residual::kNormedInput &&
        recipe.input_norm != NormKind::kGroup &&
        recipe.output_norm != NormKind::kGroup) {
      all.push_back(&convention);
    }
  }
  return all;
}

TEST(Conventions, AreNoFaults) {
  for (const Convention* convention : structure()) {
    at::manual_seed(20);
    const Recipe recipe = with(Conventions{convention});
    const Observation o =
        observed(layer_beside(convention->name, recipe), recipe);
    const Verdict verdict = explain(std::array{o});
    EXPECT_EQ(verdict.judgement, Judgement::kRounding)
        << convention->name << " " << convention->sentence << " "
        << names(verdict);
    EXPECT_TRUE(assumes(verdict, convention->name))
        << convention->name << " " << convention->sentence;
  }
}

TEST(Conventions, AMissingScaleBesideATableIsOneOfT5OrACondition) {
  const auto structures = structure();
  const auto unscaled =
      std::ranges::find(structures, "unscaled", &Convention::name);
  ASSERT_NE(unscaled, structures.end());
  at::manual_seed(20);
  const Recipe recipe = with(Conventions{*unscaled});
  Layer layer = layer_beside("unscaled", recipe);
  layer.facts.erase("speaks_of_t5");
  const Verdict verdict = explain(std::array{observed(layer, recipe)});
  EXPECT_FALSE(assumes(verdict, "unscaled"));
  EXPECT_TRUE(assumes(verdict, "unscaled_beside_number"));
}

TEST(Conventions, AFaultBesideThemIsNamed) {
  for (const Convention* convention : structure()) {
    const std::string_view name = convention->name;
    // Of what the scores are scaled by, a wrong scale is another.
    if (name == "learned_scale" || name.starts_with("unscaled") ||
        name == "norm_of_heads") {
      continue;
    }
    at::manual_seed(21);
    Recipe recipe = with(Conventions{convention});
    recipe.scale = faulty("scale_by_embed_dim").scale;
    const Observation o = observed(layer_beside(name, recipe), recipe);
    EXPECT_EQ(names(explain(std::array{o})), "scale_by_embed_dim")
        << name << " " << convention->sentence;
  }
}

// Parameters that are left over explain no random numbers.
TEST(Conventions, ExplainNoNoise) {
  for (const std::string_view name : {"norm_last", "learned_scale"}) {
    for (const bool traced : {true, false}) {
      at::manual_seed(22);
      Observation o = observed(layer_beside(name), Recipe{});
      o.tensors["out"] = random(o.tensors["out"].sizes());
      if (!traced) {
        std::erase_if(o.tensors, [](const auto& entry) {
          return entry.first.starts_with("trace.");
        });
      }
      const Verdict verdict = explain(std::array{o});
      EXPECT_EQ(verdict.judgement, Judgement::kUnknown)
          << name << " " << names(verdict);
    }
  }
}

TEST(Conventions, TwoDropoutsHaveTwoRates) {
  at::manual_seed(23);
  const Tensor x = random({kBatch, kQueries, kEmbed});
  Observation o = observe(
      make_layer(kHeads), "training",
      {{"x", x},
       {"dropout_keep.0",
        at::rand({kBatch, kHeads, kQueries, kQueries}).gt(0.1)},
       {"dropout_keep.1", at::rand(x.sizes()).gt(0.5)}},
      {{"training", "true"}, {"dropout_p.0", "0.1"}, {"dropout_p.1", "0.5"}});
  Recipe recipe;
  recipe.output_dropout = OutputDropout::kToo;
  const Verdict right = explain(results({o}, recipe));
  EXPECT_EQ(right.judgement, Judgement::kRounding) << names(right);
  EXPECT_TRUE(assumes(right, "drops_output_too"));
  // The fault and the convention in one.
  recipe.dropout = Dropout::kNotRescaled;
  EXPECT_EQ(names(explain(results({o}, recipe))), "dropout_not_rescaled");
}

// Of twelve heads, one after the other: the third comes before the eleventh.
TEST(Conventions, DrawsOfHeadsComeInTheirOrder) {
  at::manual_seed(25);
  constexpr int64_t kMany = 12;
  Layer layer = make_layer(kHeads);
  layer.facts["num_heads"] = layer.facts["num_kv_heads"] =
      std::to_string(kMany);
  const Tensor x = random({kBatch, kQueries, kEmbed});
  const Tensor kept = at::rand({kBatch, kMany, kQueries, kQueries}).gt(0.25);
  const Facts facts = {{"training", "true"}, {"dropout_p", "0.25"}};
  const std::vector<Observation> whole = results(
      {observe(layer, "training", {{"x", x}, {"dropout_keep", kept}}, facts)},
      Recipe{});
  Observation o = whole[0];
  o.tensors.erase("dropout_keep");
  for (int64_t h = 0; h < kMany; ++h) {
    o.tensors["dropout_keep." + std::to_string(h)] =
        kept.select(1, h).contiguous();
  }
  EXPECT_EQ(explain(std::array{o}).judgement, Judgement::kRounding);
}

// Heads that were left (B, L, H, d) draw for their own scores.
TEST(Conventions, HeadsThatAttendToHeadsDropTheirOwnWeights) {
  at::manual_seed(26);
  const Tensor x = random({kBatch, kQueries, kEmbed});
  Observation o = observe(
      make_layer(kHeads), "training",
      {{"x", x},
       {"dropout_keep", at::rand({kBatch, kQueries, kHeads, kHeads}).gt(0.25)}},
      {{"training", "true"}, {"dropout_p", "0.25"}});
  const Fault& fault =
      *std::ranges::find(all_faults(), "heads_not_transposed", &Fault::name);
  const Verdict verdict = explain(results({o}, changed(fault.ways[2].apply)));
  EXPECT_EQ(names(verdict), "heads_not_transposed");
}

// ---- Biases that depend on the query -------------------------------------

// Heads, and what the code computes on its way: q·k, the bias, their sum and
// the weights.
Observation with_bias(double scale, bool scaled_together) {
  at::manual_seed(27);
  const Tensor q = random({kBatch, kHeads, kQueries, kEmbed / kHeads}),
               k = random({kBatch, kHeads, kKeys, kEmbed / kHeads}),
               v = random(k.sizes()),
               bias = random({kBatch, kHeads, kQueries, kKeys});
  const Tensor products = q.matmul(k.transpose(-2, -1));
  const Tensor scores =
      scaled_together ? (products + bias) * scale : products * scale + bias;
  const Tensor weights = scores.softmax(-1);
  return observe({}, "heads",
                 {{"query", q},
                  {"key", k},
                  {"value", v},
                  {"out", weights.matmul(v)},
                  {"trace.0", products},
                  {"trace.1", bias},
                  {"trace.2", scores},
                  {"trace.3", weights}},
                 {{"core_beside", "`table`"}});
}

TEST(Conventions, ABiasOfQueriesIsToldFromTheScores) {
  const double right = 1 / std::sqrt(kEmbed / kHeads);
  const double wrong = 1 / std::sqrt(kEmbed);
  for (const bool together : {true, false}) {
    const Verdict verdict = explain(std::array{with_bias(right, together)});
    EXPECT_EQ(verdict.judgement, Judgement::kRounding) << names(verdict);
    EXPECT_TRUE(assumes(verdict, "position_bias")) << together;
    EXPECT_FALSE(assumes(verdict, "unscaled")) << together;
    EXPECT_FALSE(assumes(verdict, "unscaled_beside_number")) << together;
    EXPECT_EQ(names(explain(std::array{with_bias(wrong, together)})),
              "scale_by_embed_dim")
        << together;
  }
}

TEST(Conventions, ARoundedOutputIsRight) {
  at::manual_seed(24);
  Observation o = observed(make_layer(kHeads), Recipe{});
  Tensor& out = o.tensors["out"];
  out = at::round(out, 4);
  const Verdict right = explain(std::array{o});
  EXPECT_EQ(right.judgement, Judgement::kRounding) << names(right);
  EXPECT_TRUE(assumes(right, "rounded"));
  out[0][0][0] += 0.001;
  EXPECT_EQ(explain(std::array{o}).judgement, Judgement::kUnknown);
}

}  // namespace
}  // namespace multihead::diagnosis
