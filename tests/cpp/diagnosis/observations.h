// SPDX-License-Identifier: MIT
//
// Observations of attention by any recipe, for tests of what is said of them.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "diagnosis/search/search.h"
#include "multihead/diagnosis.h"

namespace multihead::diagnosis {

using at::Tensor;

constexpr int64_t kBatch = 3, kQueries = 5, kKeys = 7, kHeads = 8, kEmbed = 48;

// Attention with one change.
inline Recipe changed(void (*change)(Recipe&)) {
  Recipe recipe;
  change(recipe);
  return recipe;
}

// Attention with a fault of the catalogue, in the first way.
inline Recipe faulty(std::string_view name) {
  return changed(
      std::ranges::find(all_faults(), name, &Fault::name)->ways[0].apply);
}

inline Tensor random(at::IntArrayRef sizes) {
  return at::randn(sizes, at::kDouble);
}

// Masks whose rows differ and let something through.
inline Tensor random_mask(at::IntArrayRef sizes) {
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

inline Layer layer_of(int64_t kv_heads, const Projections& projections) {
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
inline Layer make_layer(int64_t kv_heads, int64_t output_columns = kEmbed,
                        int64_t output_rows = kEmbed) {
  const int64_t width = kEmbed / kHeads;
  return layer_of(kv_heads, {{"q_proj", kEmbed, kEmbed},
                             {"k_proj", kv_heads * width, kEmbed},
                             {"v_proj", kv_heads * width, kEmbed},
                             {"out_proj", output_rows, output_columns}});
}

// One matrix for queries, keys and values.
inline Layer make_fused_layer() {
  return layer_of(kHeads,
                  {{"qkv", 3 * kEmbed, kEmbed}, {"out_proj", kEmbed, kEmbed}});
}

// Heads of queries and keys are 7 wide, those of values 6.
inline Layer make_uneven_layer() {
  return layer_of(kHeads, {{"q_proj", kHeads * 7, kEmbed},
                           {"k_proj", kHeads * 7, kEmbed},
                           {"v_proj", kEmbed, kEmbed},
                           {"out_proj", kEmbed, kEmbed}});
}

inline Observation observe(const Layer& layer, const char* name,
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

inline Tensors with(Tensors tensors, const char* name, const Tensor& tensor) {
  tensors[name] = tensor;
  return tensors;
}

inline const Facts kBlocked = {{"mask", "blocked"}};

inline std::vector<Observation> plain_calls(const Layer& layer,
                                            const Tensors& cross,
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
      observe(layer, "masked gradients",
              with(with(cross, "dout", random({kBatch, kQueries, kEmbed})),
                   "mask", random_mask({kQueries, kKeys})),
              kBlocked),
      observe(layer, "causal", cross, {{"is_causal", "true"}}),
      observe(layer, "expected", cross, {{"is_causal", "expected"}}),
      observe(layer, "window", cross, {{"window", "2,1"}}),
  };
}

// Masks of every rank; where B = H or B = Lq, they can be taken for each other.
inline std::vector<Observation> masked_calls(const Layer& layer,
                                             const Tensors& cross,
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
  Tensor first_seen = random_mask({kQueries, kKeys});
  first_seen.select(-1, 0).fill_(false);
  Facts causal = kBlocked;
  causal["is_causal"] = "true";
  return {
      observe(layer, "causal, masked", with(cross, "mask", first_seen), causal),
      masked("mask of rank 4", cross, {kBatch, 1, kQueries, kKeys}),
      masked("square", {{"x", x}}, {kQueries, kQueries}),
      masked("mask of rank 2", {{"x", x}}, {kBatch, kQueries}),
      masked("per item", cross, {kBatch, kQueries, kKeys}),
      masked("per head", cross, {kBatch * kHeads, kQueries, kKeys}),
      masked("B = H", {{"x", random({kHeads, kQueries, kEmbed})}},
             {kHeads, kQueries, kQueries}),
      padded("padding", x),
      padded("B = Lq", random({kQueries, kQueries, kEmbed})),
      padded("padding, B = H", random({kHeads, kQueries, kEmbed})),
  };
}

inline Observation call_with_both_masks(const Layer& layer) {
  Tensor mask = random_mask({kQueries, kQueries});
  Tensor padding = random_mask({kBatch, kQueries});
  for (Tensor* one : {&mask, &padding}) one->select(-1, 0).fill_(false);
  const Tensors masked =
      with({{"x", random({kBatch, kQueries, kEmbed})}}, "mask", mask);
  return observe(layer, "padding and mask",
                 with(masked, "key_padding_mask", padding), kBlocked);
}

inline std::vector<Observation> dropout_calls(const Layer& layer,
                                              const Tensor& x) {
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
      observe(layer, "evaluation, both",
              with(kept, "dropout_keep.1", at::rand(x.sizes()).gt(0.25)),
              {{"dropout_p", "0.25"}}),
  };
}

// Without what came out.
inline std::vector<Observation> calls(const Layer& layer) {
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

// Attention by itself.
inline std::vector<Observation> calls_of_heads() {
  const int64_t width = kEmbed / kHeads;
  const Tensor query = random({kBatch, kHeads, kQueries, width});
  const auto call = [&](const char* name, int64_t keys) {
    return observe({}, name,
                   {{"query", query},
                    {"key", random({kBatch, kHeads, keys, width})},
                    {"value", random({kBatch, kHeads, keys, width})}});
  };
  return {call("cross", kKeys), call("three", kQueries)};
}

// What code with this recipe returns. A call that it cannot take is left out.
inline std::vector<Observation> results(std::vector<Observation> observations,
                                        const Recipe& recipe,
                                        bool trace = true) {
  std::vector<Observation> kept;
  for (Observation& o : observations) {
    const bool returns_weights = o.tensors.erase("weights") > 0;
    const Tensor dout = o.tensors["dout"];
    o.tensors.erase("dout");
    o.tensors["out"] =
        o.tensors.count("x") ? o.tensors["x"] : o.tensors["query"];
    const ObservedCall run = read_dump(o);
    const std::optional<Stages> stages = simulate(run, recipe);
    if (!stages) continue;
    o.tensors["out"] = stages->out;
    ObservedCall weights = run;
    if (returns_weights) {
      weights.returned = at::empty({kBatch, kQueries, kKeys});
      const Tensor returned = returned_weights(weights, recipe, *stages);
      if (returned.defined()) o.tensors["weights"] = returned;
    }
    if (dout.defined() && dout.sizes() == stages->out.sizes()) {
      ObservedCall differentiated = run;
      differentiated.dout = dout;
      differentiated.gradients = run.inputs;
      const auto found = gradients(differentiated, recipe);
      o.tensors["dout"] = dout;
      o.tensors["dquery"] = found[0];
      o.tensors["dkey"] = found[1];
      o.tensors["dvalue"] = found[2];
      const bool cuts_both = recipe.detached == Detached::kKeyAndValue;
      for (int i = 0; i < 4; ++i) {
        if (!recipe.frozen[i] && !(cuts_both && (i == 1 || i == 2))) continue;
        o.metadata["gradient:" + run.weights.matrices()[i]->name] = "none";
      }
    }
    if (trace) {
      size_t i = 0;
      for (const Tensor& telltale : stages->distinguishing) {
        o.tensors["trace." + std::to_string(i++)] = telltale;
      }
      o.tensors["trace." + std::to_string(i)] = stages->merged;
    }
    kept.push_back(std::move(o));
  }
  return kept;
}

inline std::string names(const Verdict& verdict) {
  std::set<std::string> all;
  for (const Finding& fault : verdict.faults) all.insert(fault.name);
  std::string text;
  for (const std::string& name : all) text += (text.empty() ? "" : "+") + name;
  return text;
}

inline Tensors inputs(at::ScalarType dtype, double spread) {
  const auto random_like = [&](int64_t length) {
    return (random({kBatch, length, kEmbed}) * spread).to(dtype);
  };
  return {{"query", random_like(kQueries)},
          {"key", random_like(kKeys)},
          {"value", random_like(kKeys)}};
}

inline bool assumes(const Verdict& verdict, std::string_view name) {
  return std::ranges::find(verdict.assumptions, name, &Finding::name) !=
         verdict.assumptions.end();
}

}  // namespace multihead::diagnosis
