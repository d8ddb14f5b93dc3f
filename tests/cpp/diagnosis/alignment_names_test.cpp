// SPDX-License-Identifier: MIT
//
// The names under which people and frameworks keep the weights of attention.
#include <ATen/ops/zeros.h>

#include <array>
#include <utility>

#include "tests/cpp/diagnosis/alignment_truth.h"

namespace {

using namespace alignment_truth;

struct NamesCase {
  const char *q, *k, *v, *o, *q_bias, *k_bias, *v_bias, *o_bias;
};

constexpr NamesCase kSeparate[] = {
    {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight",
     "q_proj_bias", "k_proj_bias", "v_proj_bias", "out_proj.bias"},
    {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight",
     "q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"},
    {"model.layers.0.self_attn.q_proj.weight",
     "model.layers.0.self_attn.k_proj.weight",
     "model.layers.0.self_attn.v_proj.weight",
     "model.layers.0.self_attn.o_proj.weight",
     "model.layers.0.self_attn.q_proj.bias",
     "model.layers.0.self_attn.k_proj.bias",
     "model.layers.0.self_attn.v_proj.bias",
     "model.layers.0.self_attn.o_proj.bias"},
    {"W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o"},
    {"W_q.weight", "W_k.weight", "W_v.weight", "W_o.weight", "W_q.bias",
     "W_k.bias", "W_v.bias", "W_o.bias"},
    {"WQ", "WK", "WV", "WO", "bQ", "bK", "bV", "bO"},
    {"Wq", "Wk", "Wv", "Wo", "Wq_bias", "Wk_bias", "Wv_bias", "Wo_bias"},
    {"module.W_query.weight", "module.W_key.weight", "module.W_value.weight",
     "module.out_proj.weight", "module.W_query.bias", "module.W_key.bias",
     "module.W_value.bias", "module.out_proj.bias"},
    {"w_qs.weight", "w_ks.weight", "w_vs.weight", "fc.weight", "w_qs.bias",
     "w_ks.bias", "w_vs.bias", "fc.bias"},
    {"q_linear.weight", "k_linear.weight", "v_linear.weight", "out.weight",
     "q_linear.bias", "k_linear.bias", "v_linear.bias", "out.bias"},
    {"linear_q.weight", "linear_k.weight", "linear_v.weight",
     "linear_out.weight", "linear_q.bias", "linear_k.bias", "linear_v.bias",
     "linear_out.bias"},
    {"query_linear.weight", "key_linear.weight", "value_linear.weight",
     "final_linear.weight", "query_linear.bias", "key_linear.bias",
     "value_linear.bias", "final_linear.bias"},
    {"fc_q.weight", "fc_k.weight", "fc_v.weight", "fc_o.weight", "fc_q.bias",
     "fc_k.bias", "fc_v.bias", "fc_o.bias"},
    {"lin_q", "lin_k", "lin_v", "lin_o", "lin_q_bias", "lin_k_bias",
     "lin_v_bias", "lin_o_bias"},
    {"proj_q.w", "proj_k.w", "proj_v.w", "proj_o.w", "proj_q.b", "proj_k.b",
     "proj_v.b", "proj_o.b"},
    {"attn1.to_q.weight", "attn1.to_k.weight", "attn1.to_v.weight",
     "attn1.to_out.0.weight", "attn1.to_q.bias", "attn1.to_k.bias",
     "attn1.to_v.bias", "attn1.to_out.0.bias"},
    {"encoder.layer.0.attention.self.query.weight",
     "encoder.layer.0.attention.self.key.weight",
     "encoder.layer.0.attention.self.value.weight",
     "encoder.layer.0.attention.output.dense.weight",
     "encoder.layer.0.attention.self.query.bias",
     "encoder.layer.0.attention.self.key.bias",
     "encoder.layer.0.attention.self.value.bias",
     "encoder.layer.0.attention.output.dense.bias"},
    {"SelfAttention.q.weight", "SelfAttention.k.weight",
     "SelfAttention.v.weight", "SelfAttention.o.weight", "SelfAttention.q.bias",
     "SelfAttention.k.bias", "SelfAttention.v.bias", "SelfAttention.o.bias"},
    {"queries.weight", "keys.weight", "values.weight", "fc_out.weight",
     "queries.bias", "keys.bias", "values.bias", "fc_out.bias"},
    {"toqueries.weight", "tokeys.weight", "tovalues.weight",
     "unifyheads.weight", "toqueries.bias", "tokeys.bias", "tovalues.bias",
     "unifyheads.bias"},
    {"q", "k", "v", "o", "q_b", "k_b", "v_b", "o_b"},
    {"w_q", "w_k", "w_v", "w_concat", "bias_q", "bias_k", "bias_v",
     "bias_concat"},
};

TEST(AlignmentNames, KnowsTheNamesOfSeparateMatrices) {
  const Truth truth;
  for (const auto& [q, k, v, o, qb, kb, vb, ob] : kSeparate) {
    const Weights weights{{q, truth.q},       {k, truth.k},
                          {v, truth.v},       {o, truth.o},
                          {qb, truth.q_bias}, {kb, truth.k_bias},
                          {vb, truth.v_bias}, {ob, truth.o_bias}};
    const AlignedWeights found = truth.align(weights);
    expect_weights(found, truth, q);
    expect_biases(found, truth, q);
    EXPECT_EQ(found.query.name, q);
    EXPECT_EQ(found.output.name, o);
    EXPECT_EQ(found.query.orientation, kUnknown);
    EXPECT_EQ(found.fused, FusedOrder::kNotFused);
    EXPECT_EQ(found.unused, Names{}) << q;
  }
}

TEST(AlignmentNames, SaysWhatWasMatched) {
  const Truth truth(kGrouped);
  const AlignedWeights found =
      truth.align({{"attn.wq", truth.q},
                   {"attn.wk", truth.k.t()},
                   {"attn.wv", truth.v},
                   {"attn.wo.weight", truth.o},
                   {"attn.wo.bias", truth.o_bias},
                   {"norm.weight", random({24})},
                   {"norm.bias", random({24})},
                   {"mlp.fc1.weight", random({96, 24})}},
                  {{"attn.wo.weight", kOutIn}});
  expect_weights(found, truth);
  EXPECT_EQ(
      found.matched,
      (Names{"query: attn.wq (out, in) or (in, out)", "key: attn.wk (in, out)",
             "value: attn.wv (out, in)", "output: attn.wo.weight (out, in)",
             "output bias: attn.wo.bias"}));
  EXPECT_EQ(found.unused,
            (Names{"mlp.fc1.weight", "norm.bias", "norm.weight"}));
}

TEST(AlignmentNames, NamesThatSayNothingCountByPlace) {
  const Truth truth;
  const std::vector<std::array<std::string, 4>> names{
      {"w1", "w2", "w3", "w4"},
      {"a", "b", "c", "d"},
      {"linear1.weight", "linear2.weight", "linear3.weight", "linear4.weight"},
      {"linears.0.weight", "linears.1.weight", "linears.2.weight",
       "linears.3.weight"},
      {"linear.0.weight", "linear.1.weight", "linear.2.weight",
       "linear.3.weight"},
      {"щ1", "щ2", "щ3", "щ4"}};
  for (const auto& [q, k, v, o] : names) {
    Weights weights{{q, truth.q}, {k, truth.k}, {v, truth.v}, {o, truth.o}};
    weights["embedding"] = random({100, kE});
    AlignedWeights found = truth.align(weights);
    expect_weights(found, truth, q);
    EXPECT_EQ(found.matched[3],
              "output: " + o + " (out, in) or (in, out), by its place");
    EXPECT_EQ(found.unused, Names{"embedding"});

    weights.erase(o);
    found = truth.align(weights);
    expect_same(found.value.weight, truth.v, q);
    EXPECT_FALSE(found.output.weight.defined());

    weights["Wo"] = truth.o;
    expect_weights(truth.align(weights), truth, q + " with Wo");
  }
}

TEST(AlignmentNames, BiasesFollowMatricesWithoutNames) {
  const Truth truth;
  for (const auto& [weight, bias] :
       {std::pair<std::string, std::string>{"w", "b"},
        {"weight", "bias"},
        {"linears.", "linears."}}) {
    const bool is_linear = weight == "linears.";
    Weights weights;
    const at::Tensor matrices[] = {truth.q, truth.k, truth.v, truth.o};
    const at::Tensor biases[] = {truth.q_bias, truth.k_bias, truth.v_bias,
                                 truth.o_bias};
    for (int i = 0; i < 4; ++i) {
      const std::string number = std::to_string(i);
      weights[weight + number + (is_linear ? ".weight" : "")] = matrices[i];
      weights[bias + number + (is_linear ? ".bias" : "")] = biases[i];
    }
    const AlignedWeights found = truth.align(weights);
    expect_weights(found, truth, weight);
    expect_biases(found, truth, weight);
  }
}

TEST(AlignmentNames, OtherLayersOfABlockAreNotAttentions) {
  const Truth truth;
  const AlignedWeights found =
      truth.align({{"h.0.attn.bias", at::zeros({1, 1, 8, 8})},
                   {"h.0.attn.masked_bias", random({1})},
                   {"h.0.attn.c_attn.weight", truth.fused().t()},
                   {"h.0.attn.c_attn.bias", truth.fused_bias()},
                   {"h.0.attn.c_proj.weight", truth.o},
                   {"h.0.ln_1.weight", random({kE})},
                   {"h.0.ln_1.bias", random({kE})},
                   {"h.0.mlp.c_fc.weight", random({kE, 4 * kE})},
                   {"h.0.mlp.c_fc.bias", random({4 * kE})},
                   {"h.0.mlp.c_proj.weight", random({4 * kE, kE})},
                   {"h.0.mlp.c_proj.bias", random({kE})},
                   {"h.0.rotary_emb.inv_freq", random({2})},
                   {"tril", at::zeros({8, 8})},
                   {"mask", at::zeros({8, 8}, at::kBool)}});
  expect_weights(found, truth);
  expect_same(found.value.bias, truth.v_bias, "value bias");
  EXPECT_FALSE(found.output.bias.defined());  // mlp's is not attention's
  EXPECT_EQ(found.unused,
            (Names{"h.0.ln_1.bias", "h.0.ln_1.weight", "h.0.mlp.c_fc.bias",
                   "h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.bias",
                   "h.0.mlp.c_proj.weight"}));
}

TEST(AlignmentNames, PlainNamesGiveWayToThoseOfAttention) {
  const Truth truth;
  const AlignedWeights found =
      truth.align({{"q_proj.weight", truth.q},
                   {"k_proj.weight", truth.k},
                   {"v_proj.weight", truth.v},
                   {"o_proj.weight", truth.o},
                   {"q_norm.weight", random({kD})},
                   {"bias_k", random({1, 1, kE})},
                   {"pooler.dense.weight", random({kE, kE})},
                   {"pooler.dense.bias", random({kE})}});
  expect_weights(found, truth);
  EXPECT_FALSE(found.output.bias.defined());
  EXPECT_EQ(found.unused, (Names{"bias_k", "pooler.dense.bias",
                                 "pooler.dense.weight", "q_norm.weight"}));
}

TEST(AlignmentNames, PartsOfAFusedMatrixMayLieInAnotherOrder) {
  Truth truth;
  const std::map<std::string, at::Tensor> weights = {
      {"kqv.weight", at::cat({truth.k, truth.q, truth.v})},
      {"kqv.bias", at::cat({truth.k_bias, truth.q_bias, truth.v_bias})},
      {"out.weight", truth.o},
      {"out.bias", truth.o_bias}};
  truth.sizes.fused_parts = "kqv";
  const AlignedWeights found = truth.align(weights);
  expect_weights(found, truth);
  expect_biases(found, truth);
  Truth grouped(kGrouped);
  grouped.sizes.fused_parts = "kqv";
  const AlignedWeights of_groups =
      grouped.align({{"kqv.weight", at::cat({grouped.k, grouped.q, grouped.v})},
                     {"out.weight", grouped.o}});
  expect_weights(of_groups, grouped);
  truth.sizes.fused_parts = "kq";
  try {
    truth.align(weights);
    ADD_FAILURE() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_STREQ(error.what_without_backtrace(),
                 "explain: fused_parts must be q, k and v in some order, got "
                 "kq");
  }
}

TEST(AlignmentNames, WithoutMatricesThereIsNothingToAlign) {
  const AlignedWeights found = align_weights(
      {{"norm.weight", random({kE})}, {"tril", random({3, 3})}}, {}, kPlain);
  EXPECT_FALSE(found.query.weight.defined());
  EXPECT_EQ(found.matched, Names{});
  EXPECT_EQ(found.unused, Names{"norm.weight"});
}

}  // namespace
