// SPDX-License-Identifier: MIT
//
// The shapes and layouts in which weights of attention are kept, and what is
// said of those that do not do.
#include <array>

#include "tests/cpp/diagnosis/alignment_truth.h"

namespace {

using namespace alignment_truth;

TEST(Alignment, ShapesTellTheOrientationOfWhatIsNotSquare) {
  const Truth wide(kPlain, 5);
  for (const bool transposed : {false, true}) {
    const auto stored = [&](const at::Tensor& weight) {
      return transposed ? weight.t() : weight;
    };
    const AlignedWeights found = wide.align({{"q", stored(wide.q)},
                                             {"k", stored(wide.k)},
                                             {"v", stored(wide.v)},
                                             {"o", stored(wide.o)}});
    expect_weights(found, wide);
    EXPECT_EQ(found.query.orientation, transposed ? kInOut : kOutIn);
    EXPECT_EQ(found.output.orientation, transposed ? kInOut : kOutIn);
  }
}

TEST(Alignment, KnownOrientationsOfSquareMatricesCount) {
  const Truth truth;
  const AlignedWeights found = truth.align(
      {{"q", truth.q.t()}, {"k", truth.k}, {"v", truth.v}, {"o", truth.o.t()}},
      {{"q", kInOut}, {"k", kOutIn}, {"o", kInOut}});
  expect_weights(found, truth);
  EXPECT_EQ(found.query.orientation, kInOut);
  EXPECT_EQ(found.key.orientation, kOutIn);
  EXPECT_EQ(found.value.orientation, kUnknown);
  EXPECT_EQ(found.output.orientation, kInOut);
}

TEST(Alignment, KeysAndValuesMayComeFromAnotherWidth) {
  Truth truth;
  truth.k = random({kE, 7}), truth.v = random({kE, 9});
  const AlignedWeights found =
      truth.align({{"q_proj_weight", truth.q},
                   {"k_proj_weight", truth.k},
                   {"v_proj_weight", truth.v.t()},
                   {"in_proj_bias", truth.fused_bias()},
                   {"out_proj.weight", truth.o},
                   {"out_proj.bias", truth.o_bias}});
  expect_weights(found, truth);
  expect_biases(found, truth);
  EXPECT_EQ(found.fused, FusedOrder::kNotFused);
  EXPECT_EQ(found.value.orientation, kInOut);
}

TEST(Alignment, CutsFusedMatricesPartByPart) {
  for (const LayerSizes& sizes : {kPlain, kGrouped}) {
    const Truth truth(sizes);
    for (const std::string name :
         {"in_proj", "qkv", "attn.qkv_proj", "Wqkv", "to_qkv", "h.0.c_attn",
          "w_qkv", "qkv_linear", "attention.query_key_value"}) {
      for (const bool transposed : {false, true}) {
        const at::Tensor fused = truth.fused();
        const AlignedWeights found =
            truth.align({{name + ".weight", transposed ? fused.t() : fused},
                         {name + ".bias", truth.fused_bias()},
                         {"attn.c_proj.weight", truth.o},
                         {"attn.c_proj.bias", truth.o_bias}});
        expect_weights(found, truth, name);
        expect_biases(found, truth, name);
        EXPECT_EQ(found.fused, FusedOrder::kPartByPart);
        EXPECT_EQ(found.matched[0],
                  "query, key and value: " + name + ".weight" +
                      (transposed ? " (in, out)" : " (out, in)") +
                      ", part by part");
      }
    }
  }
}

TEST(Alignment, CutsFusedMatricesHeadByHead) {
  const Truth truth(kGrouped);
  const int64_t per_group = kGrouped.num_heads / kGroups;
  const auto by_head = [&](const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v) {
    std::vector<at::Tensor> parts;
    for (int64_t group = 0; group < kGroups; ++group) {
      const int64_t rows = per_group * kD;
      parts.push_back(q.slice(0, group * rows, (group + 1) * rows));
      parts.push_back(k.slice(0, group * kD, (group + 1) * kD));
      parts.push_back(v.slice(0, group * kD, (group + 1) * kD));
    }
    return at::cat(parts);
  };
  const AlignedWeights found = truth.align(
      {{"query_key_value.weight", by_head(truth.q, truth.k, truth.v)},
       {"query_key_value.bias",
        by_head(truth.q_bias, truth.k_bias, truth.v_bias)},
       {"dense.weight", truth.o},
       {"dense.bias", truth.o_bias}},
      {}, FusedOrder::kHeadByHead);
  expect_weights(found, truth);
  expect_biases(found, truth);
  EXPECT_EQ(found.fused, FusedOrder::kHeadByHead);
  EXPECT_EQ(found.matched[0],
            "query, key and value: query_key_value.weight (out, in), head by "
            "head");
}

TEST(Alignment, CutsKeysAndValuesThatShareAMatrix) {
  // With half as many groups as heads it is square: read as PyTorch stores it.
  for (const LayerSizes& sizes :
       {kPlain, kGrouped, LayerSizes{kE, 4, 2}, LayerSizes{kE, 4, 1}}) {
    const Truth truth(sizes, sizes.embed_dim / sizes.num_heads);
    for (const std::string name : {"to_kv", "kv", "kv_proj", "kv_linear"}) {
      const AlignedWeights found =
          truth.align({{"to_q.weight", truth.q},
                       {"to_q.bias", truth.q_bias},
                       {name + ".weight", at::cat({truth.k, truth.v})},
                       {name + ".bias", at::cat({truth.k_bias, truth.v_bias})},
                       {"to_out.weight", truth.o},
                       {"to_out.bias", truth.o_bias}});
      expect_weights(found, truth, name);
      expect_biases(found, truth, name);
      EXPECT_EQ(found.fused, FusedOrder::kPartByPart);
      EXPECT_EQ(found.key.orientation, kOutIn);
    }
  }
}

TEST(Alignment, StacksListsOfHeadsInTheirOrder) {
  const LayerSizes sizes{36, 12, 12};
  const Truth truth(sizes, 2);
  const std::vector<std::pair<std::string, std::string>> around{
      {"heads.", ".query.weight"}, {"q_projs.", ".weight"}, {"W_q.", ".weight"},
      {"head_", ".W_q"},           {"query_", ""},          {"wq", ""}};
  for (const auto& [before, behind] : around) {
    for (const bool transposed : {false, true}) {
      Weights weights{{"out", truth.o}};
      const auto add = [&](const at::Tensor& whole, const at::Tensor& bias,
                           const std::string& letter, const std::string& word) {
        auto front = before, back = behind;
        for (auto* text : {&front, &back}) {
          if (const size_t at = text->find("query"); at != text->npos) {
            text->replace(at, 5, word);
          } else if (const size_t q = text->find('q'); q != text->npos) {
            text->replace(q, 1, letter);
          }
        }
        for (int64_t head = 0; head < sizes.num_heads; ++head) {
          const at::Tensor rows = whole.slice(0, 2 * head, 2 * head + 2);
          const std::string name = front + std::to_string(head) + back;
          weights[name] = transposed ? rows.t() : rows;
          if (!name.ends_with(".weight")) continue;
          weights[name.substr(0, name.size() - 6) + "bias"] =
              bias.slice(0, 2 * head, 2 * head + 2);
        }
      };
      add(truth.q, truth.q_bias, "q", "query");
      add(truth.k, truth.k_bias, "k", "key");
      add(truth.v, truth.v_bias, "v", "value");
      const AlignedWeights found = truth.align(weights);
      expect_weights(found, truth, before + behind);
      EXPECT_EQ(found.query.name, before + "*" + behind);
      EXPECT_EQ(found.query.orientation, transposed ? kInOut : kOutIn);
      if (behind.ends_with(".weight")) {
        expect_same(found.value.bias, truth.v_bias, before);
      }
      EXPECT_EQ(found.unused, Names{});
    }
  }
}

TEST(Alignment, StacksOutputsPerHead) {
  const Truth truth(kPlain, 5);
  Weights weights{{"q", truth.q}, {"k", truth.k}, {"v", truth.v}};
  for (int64_t head = 0; head < kH; ++head) {
    weights["W_o." + std::to_string(head)] =
        truth.o.slice(1, 5 * head, 5 * head + 5);
  }
  expect_weights(truth.align(weights), truth);
}

TEST(Alignment, OutputsMayBeOneHeadWide) {
  Truth truth;
  truth.o = random({kE, kD});
  expect_weights(truth.align({{"W_q", truth.q},
                              {"W_k", truth.k},
                              {"W_v", truth.v},
                              {"W_o", truth.o.t()}}),
                 truth);
}

TEST(Alignment, ReadsParametersWithAnAxisOfHeads) {
  const int64_t head_dim = 5;
  const Truth truth(kPlain, head_dim);
  const auto per_head = [&](const at::Tensor& weight) {
    return weight.reshape({kH, head_dim, kE});
  };
  const at::Tensor o = truth.o.t().reshape({kH, head_dim, kE});
  for (const std::array<int64_t, 3> axes :
       {std::array<int64_t, 3>{0, 1, 2}, {0, 2, 1}, {2, 0, 1}}) {
    const AlignedWeights found =
        truth.align({{"W_q", per_head(truth.q).permute(axes)},
                     {"W_k", per_head(truth.k).permute(axes)},
                     {"W_v", per_head(truth.v).permute(axes)},
                     {"W_o", o.permute(axes)}});
    expect_weights(found, truth);
    EXPECT_EQ(found.query.orientation, axes[1] == 1 ? kOutIn : kInOut);
    EXPECT_EQ(found.output.orientation, axes[1] == 1 ? kInOut : kOutIn);
  }
}

TEST(Alignment, KernelsOfFlaxAndKerasAreInOut) {
  const Truth truth;
  const auto kernel = [&](const at::Tensor& weight) {
    return weight.t().reshape({kE, kH, kD});
  };
  const auto bias = [&](const at::Tensor& flat) {
    return flat.reshape({kH, kD});
  };
  const AlignedWeights flax = truth.align(
      {{"params/attention/query/kernel", kernel(truth.q)},
       {"params/attention/query/bias", bias(truth.q_bias)},
       {"params/attention/key/kernel", kernel(truth.k)},
       {"params/attention/key/bias", bias(truth.k_bias)},
       {"params/attention/value/kernel", kernel(truth.v)},
       {"params/attention/value/bias", bias(truth.v_bias)},
       {"params/attention/out/kernel", truth.o.t().reshape({kH, kD, kE})},
       {"params/attention/out/bias", truth.o_bias}});
  const AlignedWeights keras =
      truth.align({{"mha/query/kernel:0", truth.q.t()},
                   {"mha/query/bias:0", truth.q_bias},
                   {"mha/key/kernel:0", truth.k.t()},
                   {"mha/key/bias:0", truth.k_bias},
                   {"mha/value/kernel:0", truth.v.t()},
                   {"mha/value/bias:0", truth.v_bias},
                   {"mha/attention_output/kernel:0", truth.o.t()},
                   {"mha/attention_output/bias:0", truth.o_bias}});
  for (const AlignedWeights& found : {flax, keras}) {
    expect_weights(found, truth);
    expect_biases(found, truth);
    EXPECT_EQ(found.query.orientation, kInOut);
    EXPECT_EQ(found.output.orientation, kInOut);
    EXPECT_EQ(found.unused, Names{});
  }
}

TEST(Alignment, ConvolutionsOfWidthOneAreMatrices) {
  const Truth truth;
  const AlignedWeights found =
      truth.align({{"conv_q.weight", truth.q.unsqueeze(-1)},
                   {"conv_q.bias", truth.q_bias},
                   {"conv_k.weight", truth.k.unsqueeze(-1)},
                   {"v_conv.weight", truth.v.view({kE, kE, 1, 1})},
                   {"conv_o.weight", truth.o.unsqueeze(-1)}});
  expect_weights(found, truth);
  expect_same(found.query.bias, truth.q_bias, "query bias");
}

TEST(Alignment, FusedMatricesAreKnownByShapeAlone) {
  const Truth truth;
  const AlignedWeights found = truth.align(
      {{"layer1.weight", truth.fused()}, {"layer2.weight", truth.o}});
  expect_weights(found, truth);
  EXPECT_EQ(found.matched[0],
            "query, key and value: layer1.weight (out, in), part by part, by "
            "its place");
}

struct ErrorCase {
  const char* text;
  Weights weights;
  Orientations orientations = {};
};

void expect_errors(const std::vector<ErrorCase>& cases) {
  for (const ErrorCase& test : cases) {
    try {
      align_weights(test.weights, test.orientations, kPlain);
      ADD_FAILURE() << "no error: " << test.text;
    } catch (const c10::ValueError& error) {
      EXPECT_STREQ(error.what_without_backtrace(), test.text);
    }
  }
}

TEST(Alignment, SaysWhatIsMissingOrDoesNotFit) {
  const at::Tensor w = random({kE, kE}), tall = random({kE + 1, kE});
  expect_errors({
      {"explain: weights must have one key matrix, got none under a name that "
       "says so (q (12, 12), v (12, 12))",
       {{"q", w}, {"v", w}}},
      {"explain: weights must have one query matrix, got none under a name "
       "that "
       "says so (a (12, 12), b (12, 12))",
       {{"a", w}, {"b", w}}},
      {"explain: weights must have one query matrix, got none under a name "
       "that "
       "says so (clave (12, 12), consulta (12, 12), valor (12, 12))",
       {{"consulta", w}, {"clave", w}, {"valor", w}}},
      {"explain: weights must have one query matrix between width 12 and 3 "
       "heads "
       "of one width, got q_proj.weight (13, 12)",
       {{"q_proj.weight", tall}, {"k_proj.weight", w}, {"v_proj.weight", w}}},
      {"explain: weights must have one value matrix between any width and 3 "
       "heads of width 4, got v (13, 13)",
       {{"q", w}, {"k", w}, {"v", random({13, 13})}}},
      {"explain: weights must have one key matrix between any width and 3 "
       "heads "
       "of width 4, got k (12, 7) (in, out)",
       {{"q", w}, {"k", random({12, 7})}, {"v", w}},
       {{"k", kInOut}}},
      {"explain: weights must have one output matrix between width 12 and 3 "
       "heads of width 4, got o (13, 12)",
       {{"q", w}, {"k", w}, {"v", w}, {"o", tall}}},
      {"explain: weights must have one query, key and value matrix between "
       "width "
       "12 and 9 heads of one width, got qkv (13, 12)",
       {{"qkv", tall}}},
      {"explain: weights must have one key bias of 12 numbers, got k.bias "
       "(11,)",
       {{"q", w}, {"k.weight", w}, {"k.bias", random({11})}, {"v", w}}},
  });
}

TEST(Alignment, SaysWhichOfSeveralWouldDo) {
  const at::Tensor w = random({kE, kE}), bias = random({kE});
  expect_errors({
      {"explain: weights must have one query matrix, got q_proj.weight (12, "
       "12) and query.weight (12, 12)",
       {{"q_proj.weight", w}, {"query.weight", w}}},
      {"explain: weights must have one key matrix, got in_proj_weight (36, 12) "
       "and k (12, 12)",
       {{"in_proj_weight", random({36, kE})}, {"k", w}}},
      {"explain: weights must have one query matrix, got layers.0.q (12, 12) "
       "and layers.1.q (12, 12) and layers.2.q (12, 12)",
       {{"layers.0.q", w}, {"layers.1.q", w}, {"layers.2.q", w}}},
      {"explain: weights must have one key bias, got b_k (12,) and k.bias "
       "(12,)",
       {{"q", w}, {"k", w}, {"v", w}, {"b_k", bias}, {"k.bias", bias}}},
      {"explain: weights must have one key bias, got in_proj_bias (36,) "
       "and k.bias (12,)",
       {{"q", w},
        {"k", w},
        {"v", w},
        {"in_proj_bias", random({36})},
        {"k.bias", bias}}},
  });
}

TEST(Alignment, SizesArePositive) {
  for (const LayerSizes& sizes :
       {LayerSizes{0, 1, 1}, LayerSizes{1, 0, 1}, LayerSizes{1, 1, 0}}) {
    EXPECT_THROW(align_weights({}, {}, sizes), c10::ValueError);
  }
}

}  // namespace
