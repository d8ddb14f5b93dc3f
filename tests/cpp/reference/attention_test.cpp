// SPDX-License-Identifier: MIT
//
// The reference itself, against values worked out by hand and, for its
// gradients, against differences of its own forward.
#include "reference/attention.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "reference/layer.h"

namespace {

using reference::Attention;
using reference::kInfinity;
using reference::Values;

constexpr double kRounding = 1e-14;

void expect_near(const Values& actual, const Values& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i)
    if (std::isinf(expected[i])) {
      EXPECT_EQ(actual[i], expected[i]) << "element " << i;
    } else {
      EXPECT_NEAR(actual[i], expected[i], kRounding) << "element " << i;
    }
}

/// One query that weighs two keys 1 : 3.
Attention one_to_three() {
  Attention a{.Lk = 2};
  a.query = {1};
  a.key = {0, std::log(3.0)};
  a.value = {4, 8};
  return a;
}

/// Which keys each query sees: equal scores, so visible weights are equal too.
Values visible(Attention a) {
  a.query.assign(a.B * a.H * a.Lq * a.D, 0);
  a.key.assign(a.B * a.G * a.Lk * a.D, 0);
  a.value.assign(a.B * a.G * a.Lk * a.Dv, 0);
  Values pattern = reference::forward(a).weights;
  for (double& w : pattern) w = w > 0;
  return pattern;
}

TEST(Naive, WeighsValuesByTheSoftmaxOfTheScores) {
  const auto result = reference::forward(one_to_three());
  expect_near(result.weights, {0.25, 0.75});
  expect_near(result.out, {7});
  expect_near(result.out_scale, {7});
  expect_near(result.logsumexp, {std::log(4.0)});
  EXPECT_NEAR(result.lambda, std::log(3.0), kRounding);
}

TEST(Naive, ScaleIsAbsoluteWhereValuesCancel) {
  Attention a = one_to_three();
  a.key = {0, 0};
  a.value = {-6, 6};
  const auto result = reference::forward(a);
  expect_near(result.out, {0});
  expect_near(result.out_scale, {6});
}

TEST(Naive, DefaultScaleIsOneOverRootOfWidth) {
  Attention a{.Lk = 2, .D = 4};
  a.query = {1, 1, 1, 1};
  a.key = {0, 0, 0, 0, 1, 1, 1, 1};  // 4 / √4 = 2
  a.value = {0, 1};
  EXPECT_NEAR(reference::forward(a).out[0], 1 / (1 + std::exp(-2.0)),
              kRounding);
  a.scale = 0.5 * std::log(2.0);  // 4·½·ln 2 = ln 4
  EXPECT_NEAR(reference::forward(a).out[0], 0.8, kRounding);
}

TEST(Naive, BiasIsAddedAndMinusInfinityBlocks) {
  Attention a = one_to_three();
  a.bias = {std::log(3.0), 0};
  expect_near(reference::forward(a).weights, {0.5, 0.5});
  a.bias = {0, -kInfinity};
  a.value[1] = std::nan("");  // a blocked key is not read
  expect_near(reference::forward(a).out, {4});
}

TEST(Naive, RowThatSeesNothingIsZero) {
  Attention a = one_to_three();
  a.bias = {-kInfinity, -kInfinity};
  const auto result = reference::forward(a);
  expect_near(result.out, {0});
  expect_near(result.weights, {0, 0});
  expect_near(result.logsumexp, {-kInfinity});
  const auto gradient = reference::backward(a, result, {1});
  expect_near(gradient.query, {0});
  expect_near(gradient.value, {0, 0});
}

TEST(Naive, SinkTakesItsShareOfTheSoftmax) {
  Attention a = one_to_three();
  a.sinks = {std::log(4.0)};
  auto result = reference::forward(a);
  expect_near(result.weights, {0.125, 0.375});
  expect_near(result.logsumexp, {std::log(8.0)});
  a.key_lengths = {0};
  result = reference::forward(a);
  expect_near(result.weights, {0, 0});
  expect_near(result.logsumexp, {std::log(4.0)});
}

TEST(Naive, SoftcapBoundsTheScoreBeforeTheBias) {
  Attention a = one_to_three();
  a.key = {0, 1e9};
  a.softcap = std::log(3.0);
  expect_near(reference::forward(a).weights, {0.25, 0.75});
  a.bias = {std::log(3.0), 0};
  expect_near(reference::forward(a).weights, {0.5, 0.5});
}

TEST(Naive, CausalIsTopLeftOrBottomRight) {
  Attention a{.Lq = 2, .Lk = 5};
  a.is_causal = true;
  EXPECT_EQ(visible(a), (Values{1, 0, 0, 0, 0,  //
                                1, 1, 0, 0, 0}));
  a.bottom_right = true;
  EXPECT_EQ(visible(a), (Values{1, 1, 1, 1, 0,  //
                                1, 1, 1, 1, 1}));
  a.key_lengths = {3};  // the last query stands at the last key that exists
  EXPECT_EQ(visible(a), (Values{1, 1, 0, 0, 0,  //
                                1, 1, 1, 0, 0}));
  a = Attention{.Lq = 3, .Lk = 2};
  a.is_causal = a.bottom_right = true;
  EXPECT_EQ(visible(a), (Values{0, 0,  //
                                1, 0,  //
                                1, 1}));
}

TEST(Naive, WindowIsInclusiveOnBothSides) {
  Attention a{.Lq = 3, .Lk = 4};
  a.window = {1, 0};
  EXPECT_EQ(visible(a), (Values{1, 0, 0, 0,  //
                                1, 1, 0, 0,  //
                                0, 1, 1, 0}));
  a.window = {-1, 1};
  EXPECT_EQ(visible(a), (Values{1, 1, 0, 0,  //
                                1, 1, 1, 0,  //
                                1, 1, 1, 1}));
  a.window = {0, -1};
  a.bottom_right = true;
  EXPECT_EQ(visible(a), (Values{0, 1, 1, 1,  //
                                0, 0, 1, 1,  //
                                0, 0, 0, 1}));
}

TEST(Naive, QueryOffsetsArePerBatchRow) {
  Attention a{.B = 3, .Lq = 2, .Lk = 3};
  a.is_causal = true;
  a.query_offsets = {1, -1, 9};
  EXPECT_EQ(visible(a), (Values{1, 1, 0, 1, 1, 1,  //
                                0, 0, 0, 1, 0, 0,  //
                                1, 1, 1, 1, 1, 1}));
  a.window = {0, -1};
  a.key_lengths = {3, 3, 2};  // lengths do not move the offset
  EXPECT_EQ(visible(a), (Values{0, 1, 0, 0, 0, 1,  //
                                0, 0, 0, 1, 0, 0,  //
                                0, 0, 0, 0, 0, 0}));
}

TEST(Naive, KeyLengthsArePerBatchRow) {
  Attention a{.B = 3, .Lk = 2};
  a.key_lengths = {2, 1, 0};
  EXPECT_EQ(visible(a), (Values{1, 1, 1, 0, 0, 0}));
}

TEST(Naive, KeyMasksArePerBatchRowAndBesideTheBias) {
  Attention a{.B = 2, .Lq = 2, .Lk = 3};
  a.key_mask = {true, false, true, false, false, false};
  EXPECT_EQ(visible(a), (Values{1, 0, 1, 1, 0, 1,  //
                                0, 0, 0, 0, 0, 0}));
  a.bias.assign(12, 0);
  a.bias[0] = -kInfinity;
  EXPECT_EQ(visible(a), (Values{0, 0, 1, 1, 0, 1,  //
                                0, 0, 0, 0, 0, 0}));
}

TEST(Naive, AlibiLowersScoresByDistance) {
  Attention a{.Lk = 2};
  a.query = a.key = {0};
  a.key = {0, 0};
  a.value = {4, 8};
  a.alibi_slopes = {std::log(3.0)};
  expect_near(reference::forward(a).weights, {0.75, 0.25});
  a.bottom_right = true;  // the query stands at key 1
  expect_near(reference::forward(a).weights, {0.25, 0.75});
}

TEST(Naive, HeadsShareKeysInConsecutiveGroups) {
  Attention a{.H = 4, .G = 2};
  a.query = {0, 0, 0, 0};
  a.key = {0, 0};
  a.value = {5, 7};
  expect_near(reference::forward(a).out, {5, 5, 7, 7});
}

TEST(Naive, DropoutScalesWeightsButNotWhatIsReturned) {
  Attention a = one_to_three();
  a.dropout = {0, 2};
  const auto result = reference::forward(a);
  expect_near(result.out, {12});
  expect_near(result.weights, {0.25, 0.75});
}

/// Everything at once, random.
Attention everything() {
  Attention a{.B = 2, .H = 4, .G = 2, .Lq = 3, .Lk = 5, .D = 3, .Dv = 2};
  std::mt19937 engine(7);
  std::normal_distribution<double> normal;
  const auto fill = [&](Values& values, int64_t count) {
    values.resize(count);
    for (double& x : values) x = normal(engine);
  };
  fill(a.query, a.B * a.H * a.Lq * a.D);
  fill(a.key, a.B * a.G * a.Lk * a.D);
  fill(a.value, a.B * a.G * a.Lk * a.Dv);
  fill(a.bias, a.B * a.H * a.Lq * a.Lk);
  fill(a.alibi_slopes, a.B * a.H);
  fill(a.sinks, a.H);
  a.bias[3] = -kInfinity;
  a.dropout.assign(a.bias.size(), 1.25);
  for (size_t i = 0; i < a.dropout.size(); i += 5) a.dropout[i] = 0;
  a.is_causal = a.bottom_right = true;
  a.window = {3, 2};
  a.key_lengths = {5, 4};
  a.scale = -0.7;
  a.softcap = 1.5;
  return a;
}

/// Σ out·dout + Σ logsumexp·dlogsumexp, both with 1, 2, 3, …
double loss(const Attention& a) {
  const auto result = reference::forward(a);
  double sum = 0, factor = 0;
  for (double x : result.out) sum += x * ++factor;
  factor = 0;
  for (double x : result.logsumexp) sum += x * ++factor;
  return sum;
}

void expect_slope(Values Attention::* argument, const Values& gradient) {
  Attention a = everything();
  ASSERT_EQ((a.*argument).size(), gradient.size());
  constexpr double kStep = 1e-5;
  for (size_t i = 0; i < gradient.size(); ++i) {
    const double x = (a.*argument)[i];
    (a.*argument)[i] = x + kStep;
    const double above = loss(a);
    (a.*argument)[i] = x - kStep;
    const double below = loss(a);
    (a.*argument)[i] = x;
    EXPECT_NEAR(gradient[i], (above - below) / (2 * kStep), 1e-6) << i;
  }
}

TEST(Naive, GradientsAreTheSlopesOfForward) {
  const Attention a = everything();
  const auto result = reference::forward(a);
  Values dout(result.out.size());
  std::iota(dout.begin(), dout.end(), 1);
  Values dlogsumexp(result.logsumexp.size());
  std::iota(dlogsumexp.begin(), dlogsumexp.end(), 1);
  const auto gradient = reference::backward(a, result, dout, dlogsumexp);
  expect_slope(&Attention::query, gradient.query);
  expect_slope(&Attention::key, gradient.key);
  expect_slope(&Attention::value, gradient.value);
  expect_slope(&Attention::bias, gradient.bias);
  expect_slope(&Attention::alibi_slopes, gradient.alibi_slopes);
  expect_slope(&Attention::sinks, gradient.sinks);
  for (size_t i = 0; i < gradient.key.size(); ++i)
    EXPECT_LE(std::abs(gradient.key[i]),
              gradient.key_scale[i] * (1 + kRounding));
}

TEST(Naive, PrecisionGivesTheBoundPerElement) {
  const Values f32 = reference::kFloat32.allowed({2}, 12, 8);
  EXPECT_EQ(f32[0], 8 * 16 * 0x1p-24 * 2 + 1e-37);
  const Values bf16 = reference::kBFloat16.allowed({0, 1}, 12, 6);
  EXPECT_EQ(bf16[0], 0x1p-133);
  EXPECT_EQ(bf16[1], 6 * (0x1p-9 + 16 * 0x1p-24) + 0x1p-133);
  EXPECT_EQ(reference::kFloat32.allowed_logsumexp({5}, 12)[0], 64 * 0x1p-24);
  EXPECT_EQ(reference::kFloat64.allowed_logsumexp({-5}, 12)[0], 1e-13 * 18);
}

TEST(NaiveLayer, ProjectsSplitsAttendsAndProjectsBack) {
  reference::Layer layer{.attention = {.H = 2, .G = 2, .Lk = 3},
                         .embed_dim = 2,
                         .kdim = 1,
                         .vdim = 1};
  layer.query = {1, 2};
  layer.key = {1};
  layer.value = {3};
  layer.q = {{0, 0, 0, 0}, {0, 0}};  // every score 0: weights are 1/3
  layer.k = {{1, 1}, {0, 0}};
  layer.v = {{1, 2}, {0, -9}};  // heads 3 and 6 − 9
  layer.bias_k = {1, 1};
  layer.bias_v = {3, 6};
  layer.add_zero_attn = true;
  layer.out = {{1, 0, 1, 1}, {0, 10}};
  const auto result = reference::forward(layer);
  expect_near(result.out.value, {2, 13});
  expect_near(result.out.scale, {2, 19});
  const Values third(6, 1.0 / 3);
  expect_near(result.weights, third);
  expect_near(reference::average_heads(result.weights, layer.attention),
              {1.0 / 3, 1.0 / 3, 1.0 / 3});
}

}  // namespace
