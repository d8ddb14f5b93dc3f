// SPDX-License-Identifier: MIT
//
// The catalogue against itself: attention with each fault, on inputs that tell
// faults apart, must be explained by that fault and no other; attention by
// nothing. What people write is judged in Python (tests/python/attempts).
#include "multihead/explain.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>

#include "multihead/diagnosis/compare.h"
#include "multihead/diagnosis/faults.h"
#include "multihead/diagnosis/pytorch_result.h"
#include "multihead/diagnosis/search.h"
#include "multihead/diagnosis/variants.h"

namespace multihead {
namespace {

using at::Tensor;
using namespace diagnosis;

constexpr int64_t kBatch = 3, kQueries = 5, kKeys = 7, kHeads = 8, kEmbed = 48;

Tensor random(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }

// Masks whose rows differ and let something through.
Tensor random_mask(at::IntArrayRef sizes) {
  Tensor mask = at::rand(sizes).lt(0.4);
  mask.select(-1, 2).fill_(false);
  return mask;
}

struct Layer {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> facts;
};

using Projections =
    std::vector<std::tuple<const char*, int64_t, int64_t>>;  // rows, columns

Layer layer_of(int64_t kv_heads, const Projections& projections) {
  Layer layer;
  layer.facts = {{"num_heads", std::to_string(kHeads)},
                 {"num_kv_heads", std::to_string(kv_heads)}};
  for (const auto& [name, rows, columns] : projections) {
    const std::string weight = std::string(name) + ".weight";
    layer.tensors[weight] = random({rows, columns}) * 0.2;
    layer.tensors[std::string(name) + ".bias"] = random({rows});
    layer.facts["layout:" + weight] = "out_in";
  }
  return layer;
}

// output: columns of the output matrix, (E, E), (E, D), or (D, D) for D rows.
Layer make_layer(int64_t kv_heads, int64_t output_columns = kEmbed,
                 int64_t output_rows = kEmbed) {
  const int64_t width = kEmbed / kHeads;
  return layer_of(kv_heads, {{"q_proj", kEmbed, kEmbed},
                             {"k_proj", kv_heads * width, kEmbed},
                             {"v_proj", kv_heads * width, kEmbed},
                             {"out_proj", output_rows, output_columns}});
}

// Heads of queries and keys are 7 wide, those of values 6.
Layer make_uneven_layer() {
  return layer_of(kHeads, {{"q_proj", kHeads * 7, kEmbed},
                           {"k_proj", kHeads * 7, kEmbed},
                           {"v_proj", kEmbed, kEmbed},
                           {"out_proj", kEmbed, kEmbed}});
}

Observation observe(const Layer& layer, const char* name,
                    std::map<std::string, Tensor> tensors,
                    std::map<std::string, std::string> facts = {}) {
  Observation observation{layer.tensors, layer.facts};
  observation.tensors.merge(tensors);
  observation.metadata.merge(facts);
  observation.metadata["name"] = name;
  return observation;
}

using Tensors = std::map<std::string, Tensor>;
using Facts = std::map<std::string, std::string>;

Tensors with(Tensors tensors, const char* name, const Tensor& tensor) {
  tensors[name] = tensor;
  return tensors;
}

const Facts kBlocked = {{"mask", "blocked"}};

std::vector<Observation> plain_calls(const Layer& layer, const Tensors& cross,
                                     const Tensor& x) {
  return {
      observe(layer, "cross", cross),
      observe(layer, "three",
              {{"query", x},
               {"key", random(x.sizes())},
               {"value", random(x.sizes())}}),
      observe(layer, "self", {{"x", x}}),
      observe(layer, "weights", with(cross, "weights", {})),
      observe(layer, "masked weights",
              with(with(cross, "weights", {}), "mask",
                   random_mask({kQueries, kKeys})),
              kBlocked),
      observe(layer, "gradients",
              with(cross, "dout", random({kBatch, kQueries, kEmbed}))),
      observe(layer, "causal", cross, {{"is_causal", "true"}}),
  };
}

// Masks of every rank; where B = H or B = Lq, they can be taken for each other.
std::vector<Observation> masked_calls(const Layer& layer, const Tensors& cross,
                                      const Tensor& x) {
  const auto masked = [&](const char* name, const Tensors& inputs,
                          at::IntArrayRef sizes) {
    return observe(layer, name, with(inputs, "mask", random_mask(sizes)),
                   kBlocked);
  };
  const auto padded = [&](const char* name, const Tensor& inputs) {
    return observe(layer, name,
                   with({{"x", inputs}}, "key_padding_mask",
                        random_mask({inputs.size(0), inputs.size(1)})),
                   kBlocked);
  };
  return {
      masked("mask of rank 4", cross, {kBatch, 1, kQueries, kKeys}),
      masked("square", {{"x", x}}, {kQueries, kQueries}),
      masked("mask of rank 2", {{"x", x}}, {kBatch, kQueries}),
      masked("per item", cross, {kBatch, kQueries, kKeys}),
      masked("per head", cross, {kBatch * kHeads, kQueries, kKeys}),
      masked("B = H", {{"x", random({kHeads, kQueries, kEmbed})}},
             {kHeads, kQueries, kQueries}),
      padded("padding", x),
      padded("B = Lq", random({kQueries, kQueries, kEmbed})),
  };
}

std::vector<Observation> dropout_calls(const Layer& layer, const Tensor& x) {
  const Tensors kept =
      with({{"x", x}}, "dropout_keep",
           at::rand({kBatch, kHeads, kQueries, kQueries}).gt(0.25));
  const Facts training = {{"training", "true"}, {"dropout_p", "0.25"}};
  return {
      observe(layer, "training", kept, training),
      observe(layer, "training, output",
              with({{"x", x}}, "dropout_keep", at::rand(x.sizes()).gt(0.25)),
              training),
      observe(
          layer, "training, heads",
          with({{"x", x}}, "dropout_keep",
               at::rand({kBatch, kHeads, kQueries, kEmbed / kHeads}).gt(0.25)),
          training),
      observe(layer, "evaluation, output",
              with({{"x", x}}, "dropout_keep", at::rand(x.sizes()).gt(0.25)),
              {{"dropout_p", "0.25"}}),
      observe(layer, "evaluation", kept, {{"dropout_p", "0.25"}}),
  };
}

// Without what came out.
std::vector<Observation> calls(const Layer& layer) {
  const Tensors cross = {{"query", random({kBatch, kQueries, kEmbed})},
                         {"key", random({kBatch, kKeys, kEmbed})},
                         {"value", random({kBatch, kKeys, kEmbed})}};
  const Tensor x = random({kBatch, kQueries, kEmbed});
  std::vector<Observation> all;
  for (auto& part : {plain_calls(layer, cross, x),
                     masked_calls(layer, cross, x), dropout_calls(layer, x)}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

// What code with this recipe returns. A call that it cannot take is left out.
std::vector<Observation> results(std::vector<Observation> observations,
                                 const Recipe& recipe, bool trace = true) {
  std::vector<Observation> kept;
  for (Observation& o : observations) {
    const bool returns_weights = o.tensors.erase("weights") > 0;
    const Tensor dout = o.tensors["dout"];
    o.tensors.erase("dout");
    o.tensors["out"] =
        o.tensors.count("x") ? o.tensors["x"] : o.tensors["query"];
    const Run run = make_run(o);
    const std::optional<Stages> stages = run_recipe(run, recipe);
    if (!stages) continue;
    o.tensors["out"] = stages->out;
    Run weights = run;
    if (returns_weights) {
      weights.returned = at::empty({kBatch, kQueries, kKeys});
      const Tensor returned = returned_weights(weights, recipe, *stages);
      if (returned.defined()) o.tensors["weights"] = returned;
    }
    if (dout.defined() && dout.sizes() == stages->out.sizes()) {
      Run differentiated = run;
      differentiated.dout = dout;
      differentiated.gradients = run.inputs;
      const auto found = gradients(differentiated, recipe);
      o.tensors["dout"] = dout;
      o.tensors["dquery"] = found[0];
      o.tensors["dkey"] = found[1];
      o.tensors["dvalue"] = found[2];
    }
    if (trace) {
      size_t i = 0;
      for (const Tensor& telltale : stages->telltales) {
        o.tensors["trace." + std::to_string(i++)] = telltale;
      }
      o.tensors["trace." + std::to_string(i)] = stages->merged;
    }
    kept.push_back(std::move(o));
  }
  return kept;
}

std::string names(const Verdict& verdict) {
  std::set<std::string> all;
  for (const Finding& fault : verdict.faults) all.insert(fault.name);
  std::string text;
  for (const std::string& name : all) text += (text.empty() ? "" : "+") + name;
  return text;
}

Recipe recipe_of(const Way& way) {
  Recipe recipe;
  way.apply(recipe);
  return recipe;
}

struct Named {
  const Fault* fault;
  size_t way;
};

void PrintTo(const Named& named, std::ostream* out) {
  *out << named.fault->name << " " << named.way;
}

// Those that a recipe alone does not bring about are told by tests of their
// own.
std::vector<Named> all_ways() {
  std::vector<Named> all;
  for (const Fault& fault : all_faults()) {
    if (fault.name == "scale_of_another_number") continue;
    for (size_t way = 0; way < fault.ways.size(); ++way) {
      all.push_back({&fault, way});
    }
  }
  return all;
}

class EveryFault : public testing::TestWithParam<Named> {};

TEST_P(EveryFault, IsNamed) {
  at::manual_seed(0);
  const auto [fault, index] = GetParam();
  const std::string name(fault->name);
  const Recipe recipe = recipe_of(fault->ways[index]);
  const bool grouped = recipe.groups != Groups::kRepeated ||
                       recipe.scale == Scale::kRootOfGroups ||
                       recipe.scale == Scale::kRootOfGroupWidth;
  const int64_t groups = recipe.groups == Groups::kCountForSize ? 4
                         : grouped                              ? 2
                                                                : kHeads;
  const int64_t width = kEmbed / kHeads;
  const bool per_head = recipe.output == Output::kPerHead;
  const bool one_head =
      recipe.merge == Merge::kMean || recipe.merge == Merge::kSum;
  const bool uneven = recipe.scale == Scale::kRootOfAllHeads ||
                      recipe.scale == Scale::kRootOfValueWidth;
  const Layer layer =
      uneven ? make_uneven_layer()
             : make_layer(groups, per_head || one_head ? width : kEmbed,
                          per_head ? width : kEmbed);
  const auto observations = results(calls(layer), recipe);
  ASSERT_FALSE(observations.empty());
  const Verdict verdict = explain(observations);
  EXPECT_EQ(verdict.judgement, Judgement::kFault);
  EXPECT_EQ(names(verdict), name);
  // Where B = H, a mask repeated item after item meets the same heads; that the
  // other calls failed is not among what came out.
  const std::vector<std::vector<std::string>> ties =
      name == "mask_batch_as_heads"
          ? std::vector<std::vector<std::string>>{{"mask_head_order"}}
          : std::vector<std::vector<std::string>>{};
  EXPECT_EQ(verdict.alternatives, ties);
  EXPECT_EQ(verdict.first_stage, name_of(fault->stage));
}

std::string test_name(const testing::TestParamInfo<Named>& info) {
  return std::string(info.param.fault->name) + "_" +
         std::to_string(info.param.way);
}

INSTANTIATE_TEST_SUITE_P(Catalogue, EveryFault, testing::ValuesIn(all_ways()),
                         test_name);

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

Tensors inputs(at::ScalarType dtype, double spread) {
  const auto random_like = [&](int64_t length) {
    return (random({kBatch, length, kEmbed}) * spread).to(dtype);
  };
  return {{"query", random_like(kQueries)},
          {"key", random_like(kKeys)},
          {"value", random_like(kKeys)}};
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
      o.tensors["out"] = pytorch_results(make_run(o), Recipe{}).front();
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
  const std::optional<Stages> stages = run_recipe(make_run(o), Recipe{});
  o.tensors["out"] = stages->out;
  o.tensors["trace.0"] = stages->scores;
  EXPECT_EQ(explain(std::array{o}).judgement, Judgement::kRounding);
  o.metadata.erase("scale");
  EXPECT_EQ(names(explain(std::array{o})), "scale_of_another_number");
}

// One fault of what comes out, one of what is returned beside it.
TEST(Explain, PairsMayShowInDifferentTensors) {
  at::manual_seed(5);
  const auto name_of_both = [](const Recipe& recipe) {
    return names(explain(results(calls(make_layer(kHeads)), recipe)));
  };
  Recipe summed{.scale = Scale::kNone};
  summed.returned = Returned::kSum;
  EXPECT_EQ(name_of_both(summed), "returned_weights_summed+scale_missing");
  Recipe detached{.scale = Scale::kEmbedding};
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
  const Recipe in_out{.weights_in_out = true};
  const std::optional<Stages> stages = run_recipe(make_run(o), in_out);
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
}  // namespace multihead
