// SPDX-License-Identifier: MIT
//
// The plain forms of examples/learn/attention.h: near the exact forms, as those
// of Python are. They are other operations in another order, so bits differ.
#include <gtest/gtest.h>

#include "examples/learn/attention.h"
#include "multihead/textbook.h"

namespace {

namespace textbook = multihead::textbook;

constexpr int kSeeds = 100;

// What docs/textbook.md promises where PyTorch itself changes bits.
bool close(const at::Tensor& ours, const at::Tensor& expected) {
  const double atol = expected.scalar_type() == at::kDouble ? 1e-8 : 1e-6;
  return ours.allclose(expected, /*rtol=*/1e-5, atol, /*equal_nan=*/true);
}

struct Shape {
  int64_t batch, heads, queries, keys, d;
  int64_t width() const { return heads * d; }
};

class Plain : public testing::TestWithParam<std::tuple<Shape, at::ScalarType>> {
 protected:
  void SetUp() override { at::set_num_threads(1); }

  Shape shape() const { return std::get<0>(GetParam()); }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }

  at::Tensor tokens(int64_t length) const {
    return torch::randn({shape().batch, length, shape().width()}, dtype());
  }

  at::Tensor matrix(int64_t rows) const {
    return torch::rand({rows, shape().width()}, dtype()) / 5 - 0.1;
  }

  // True = blocked; some block every key of a query.
  std::vector<at::Tensor> masks() const {
    const auto [batch, heads, queries, keys, _] = shape();
    const auto some = [](at::IntArrayRef sizes) {
      return torch::rand(sizes) < 0.4;
    };
    return {at::Tensor(),
            torch::ones({queries, keys}, at::kBool).triu(1),
            some({batch, queries, keys}),
            some({batch, 1, 1, keys}),
            some({batch, heads, queries, keys}),
            some({queries, keys}).to(at::kFloat),
            some({queries, keys}).to(at::kLong)};
  }
};

TEST_P(Plain, ScaledDotProductAttention) {
  const auto [batch, heads, queries, keys, d] = shape();
  for (int seed = 0; seed < kSeeds; ++seed) {
    torch::manual_seed(seed);
    const at::Tensor q = torch::randn({batch, heads, queries, d}, dtype());
    const at::Tensor k = torch::randn({batch, heads, keys, d}, dtype());
    const at::Tensor v = torch::randn({batch, heads, keys, d}, dtype());
    for (const at::Tensor& given : masks()) {
      const at::Tensor mask = learn::per_head(given);
      const auto [output, weights] =
          learn::scaled_dot_product_attention(q, k, v, mask);
      const auto [exact, exact_weights] =
          textbook::scaled_dot_product_attention(q, k, v, mask);
      ASSERT_TRUE(close(output, exact)) << "seed " << seed;
      ASSERT_TRUE(close(weights, exact_weights)) << "seed " << seed;
    }
  }
}

TEST_P(Plain, Functions) {
  const Shape s = shape();
  for (int seed = 0; seed < kSeeds; ++seed) {
    torch::manual_seed(seed);
    const at::Tensor q = tokens(s.queries), k = tokens(s.keys);
    const at::Tensor v = tokens(s.keys);
    for (const int64_t groups : {int64_t{1}, s.heads / 2, s.heads}) {
      const learn::Weights w{matrix(s.width()), matrix(groups * s.d),
                             matrix(groups * s.d), matrix(s.width())};
      const textbook::AttentionWeights same(w.query, w.key, w.value, w.output);
      for (const at::Tensor& mask : masks()) {
        const at::Tensor exact = textbook::grouped_query_attention(
            q, k, v, groups, s.width(), mask, s.heads, same);
        const at::Tensor ours =
            learn::grouped_query_attention(q, k, v, {s.heads, groups}, mask, w);
        ASSERT_TRUE(close(ours, exact)) << "seed " << seed;
        if (groups < s.heads) continue;
        ASSERT_TRUE(close(
            learn::multi_head_attention(q, k, v, s.heads, mask, w), exact));
      }
    }
  }
}

// Parameters of the same order in both.
void copy_parameters(const torch::nn::Module& to,
                     const torch::nn::Module& from) {
  const torch::NoGradGuard no_grad;
  const auto theirs = from.parameters();
  for (size_t i = 0; i < theirs.size(); ++i) {
    to.parameters()[i].copy_(theirs[i]);
  }
}

TEST_P(Plain, Module) {
  const Shape s = shape();
  for (int seed = 0; seed < kSeeds; ++seed) {
    torch::manual_seed(seed);
    learn::MultiHeadAttention ours(s.width(), s.heads);
    textbook::MultiHeadAttention exact(s.width(), s.heads);
    ours->to(dtype()), exact->to(dtype());
    copy_parameters(*ours, *exact);
    const at::Tensor q = tokens(s.queries), k = tokens(s.keys);
    const at::Tensor v = tokens(s.keys);
    for (const at::Tensor& blocked : masks()) {
      const at::Tensor keep = blocked.defined() ? blocked == 0 : blocked;
      const at::Tensor result = ours->forward(q, k, v, keep);
      ASSERT_TRUE(result.isfinite().all().item<bool>());
      ASSERT_TRUE(close(result, exact->forward(q, k, v, keep)));
    }
  }
}

TEST_P(Plain, SelfAttention) {
  const Shape s = shape();
  for (int seed = 0; seed < kSeeds; ++seed) {
    torch::manual_seed(seed);
    learn::MultiHeadSelfAttention ours(s.width(), s.heads, 0.1);
    textbook::MultiHeadSelfAttention exact(s.width(), s.heads, 0.1);
    ours->to(dtype()), exact->to(dtype());
    copy_parameters(*ours, *exact);
    const at::Tensor x = tokens(s.keys);
    for (const bool training : {true, false}) {
      ours->train(training), exact->train(training);
      torch::manual_seed(seed);
      const at::Tensor result = ours->forward(x);
      torch::manual_seed(seed);
      ASSERT_TRUE(close(result, exact->forward(x))) << "seed " << seed;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Plain,
    testing::Combine(testing::Values(Shape{3, 2, 4, 4, 4}, Shape{2, 4, 5, 7, 3},
                                     Shape{2, 2, 3, 6, 8},
                                     Shape{1, 8, 1, 9, 2}),
                     testing::Values(at::kFloat, at::kDouble)));

}  // namespace
