// SPDX-License-Identifier: MIT
//
// Widths that need not be one: of the output, and of the heads of values. And
// parts of one parameter along an axis of their own.
#include <ATen/ops/stack.h>

#include "tests/cpp/diagnosis/alignment_truth.h"

namespace {

using namespace alignment_truth;

Weights weights_of(const Truth& truth) {
  return {{"W_q", truth.q},      {"W_k", truth.k},      {"W_v", truth.v},
          {"W_o", truth.o},      {"b_q", truth.q_bias}, {"b_k", truth.k_bias},
          {"b_v", truth.v_bias}, {"b_o", truth.o_bias}};
}

Weights transposed(Weights weights) {
  for (auto& [name, tensor] : weights) tensor = tensor.t();
  return weights;
}

constexpr int64_t kOut = 20;

TEST(AlignmentWidths, OutputsMayHaveAnotherWidth) {
  // Heads of 5: what the heads have together is not the output's width either.
  for (const int64_t head_dim : {kD, int64_t{5}}) {
    Truth truth({kE, kH, kH, kE, kOut}, head_dim);
    truth.o = random({kOut, kH * head_dim}), truth.o_bias = random({kOut});
    for (const auto& weights :
         {weights_of(truth), transposed(weights_of(truth))}) {
      const AlignedWeights found = truth.align(weights);
      expect_same(found.output.weight, truth.o, "output");
      expect_same(found.output.bias, truth.o_bias, "output bias");
    }
  }
}

TEST(AlignmentWidths, OutputsOfTheInputsWidthMayBeForgotten) {
  // What came out is as wide as all heads, but the layer leads back to E.
  const Truth truth({kE, kH, kH, kE, kH * 5}, 5);
  expect_weights(truth.align(weights_of(truth)), truth);
}

TEST(AlignmentWidths, HeadsOfValuesMayHaveTheirOwnWidth) {
  for (const int64_t value_width : {1, 3, 6}) {
    Truth truth({kE, kH, kH, kE, kE});
    truth.v = random({kH * value_width, kE});
    truth.v_bias = random({kH * value_width});
    truth.o = random({kE, kH * value_width});
    for (const auto& weights :
         {weights_of(truth), transposed(weights_of(truth))}) {
      const AlignedWeights found = truth.align(weights);
      expect_same(found.value.weight, truth.v, "value");
      expect_same(found.value.bias, truth.v_bias, "value bias");
      expect_same(found.output.weight, truth.o, "output");
      expect_same(found.output.bias, truth.o_bias, "output bias");
    }
  }
}

TEST(AlignmentWidths, ValuesOfAnotherWidthAreNotReadTheWrongWayRound) {
  // (H · D, vdim) and (E, H · D of values) are told apart by vdim alone.
  Truth truth({kE, kH, kH, 9, kE});
  truth.v = random({kE, 9});
  for (const auto& weights :
       {weights_of(truth), transposed(weights_of(truth))}) {
    expect_same(truth.align(weights).value.weight, truth.v, "value");
  }
  truth.sizes.vdim = kE;
  truth.v = random({9, kE});
  truth.v_bias = random({9});
  truth.o = random({kE, 9});
  for (const auto& weights :
       {weights_of(truth), transposed(weights_of(truth))}) {
    expect_same(truth.align(weights).value.weight, truth.v, "value, 3 wide");
  }
}

TEST(AlignmentWidths, SaysWhichWidthsAnOutputMayHave) {
  const at::Tensor w = random({kE, kE});
  try {
    align_weights({{"q", w}, {"k", w}, {"v", w}, {"o", random({13, kE})}}, {},
                  {kE, kH, kH, kE, kOut});
    ADD_FAILURE() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_STREQ(error.what_without_backtrace(),
                 "explain: weights must have one output matrix between width "
                 "12 or 20 and 3 heads of width 4, got o (13, 12)");
  }
}

TEST(AlignmentWidths, PartsMayHaveAnAxisOfTheirOwn) {
  const int64_t head_dim = 5;
  const Truth truth({kE, 2, 2}, head_dim);
  const at::Tensor parts = at::stack({truth.q, truth.k, truth.v});
  const at::Tensor heads = parts.view({3, 2, head_dim, kE});
  const at::Tensor biases =
      at::stack({truth.q_bias, truth.k_bias, truth.v_bias});
  for (const at::Tensor& fused :
       {parts, parts.transpose(1, 2), heads, heads.transpose(2, 3),
        heads.permute({0, 3, 1, 2}), heads.permute({3, 0, 1, 2})}) {
    for (const at::Tensor& bias : {biases, biases.view({3, 2, head_dim})}) {
      const AlignedWeights found = truth.align({{"W_qkv", fused},
                                                {"b_qkv", bias},
                                                {"W_o", truth.o},
                                                {"b_o", truth.o_bias}});
      expect_weights(found, truth);
      expect_biases(found, truth);
      EXPECT_EQ(found.fused, FusedOrder::kNotFused);
      EXPECT_EQ(found.key.name, "W_qkv[1]");
      EXPECT_EQ(found.unused, Names{});
    }
  }
}

TEST(AlignmentWidths, PairsMayHaveAnAxisOfTheirOwn) {
  const Truth truth(kGrouped);
  const AlignedWeights found =
      truth.align({{"to_q", truth.q},
                   {"to_kv", at::stack({truth.k.t(), truth.v.t()})},
                   {"to_out", truth.o}});
  expect_weights(found, truth);
  EXPECT_EQ(found.value.orientation, kInOut);
}

TEST(AlignmentWidths, SquarePartsLeaveTheirOrientationOpen) {
  const Truth truth;
  const AlignedWeights found =
      truth.align({{"qkv", at::stack({truth.q, truth.k, truth.v})}});
  expect_same(found.query.weight, truth.q, "query");
  EXPECT_EQ(found.query.orientation, kUnknown);
}

}  // namespace
