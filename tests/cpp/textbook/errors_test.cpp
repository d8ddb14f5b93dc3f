// SPDX-License-Identifier: MIT
//
// What the textbook forms say about bad arguments, and which masks they take.
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>

#include "multihead/textbook.h"

namespace {

namespace textbook = multihead::textbook;
using textbook::AttentionWeights;

constexpr int64_t kN = 2, kH = 3, kL = 5, kE = 12;

const at::Tensor& x() {
  static const at::Tensor value = at::zeros({kN, kL, kE});
  return value;
}

const at::Tensor& wide() {
  static const at::Tensor value = at::zeros({kN, kL, kE + 1});
  return value;
}

AttentionWeights square(int64_t width) {
  const at::Tensor w = at::zeros({width, width});
  return {w, w, w, w};
}

AttentionWeights with_bias(at::Tensor AttentionWeights::* member,
                           int64_t size) {
  AttentionWeights weights = square(kE);
  weights.*member = at::zeros(size);
  return weights;
}

at::Tensor attend(const at::Tensor& mask,
                  const std::optional<AttentionWeights>& weights = {}) {
  return textbook::multi_head_attention(x(), x(), x(), kH, kE, mask, weights);
}

at::Tensor multi_head(const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v, int64_t heads = kH) {
  return textbook::multi_head_attention(q, k, v, heads, kE);
}

at::Tensor grouped(int64_t groups, std::optional<int64_t> heads,
                   const std::optional<AttentionWeights>& weights = {}) {
  return textbook::grouped_query_attention(x(), x(), x(), groups, kE, {}, heads,
                                           weights);
}

at::Tensor module(const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& mask = {}) {
  return textbook::MultiHeadAttention(kE, kH)->forward(q, k, k, mask);
}

void from_module(const multihead::MultiheadAttentionOptions& options) {
  attend({}, AttentionWeights(multihead::MultiheadAttention(options)));
}

using multihead::MultiheadAttentionOptions;

struct Bad {
  std::function<void()> call;
  const char* message;
};

const std::vector<Bad> kBadCalls{
    {[] { multi_head(x(), x(), x(), 5); },
     "multi_head_attention: d_model must be a positive multiple of "
     "num_heads, got 12 (num_heads=5)"},
    {[] { multi_head(x(), x(), x(), 0); }, "num_heads must be positive, got"},
    {[] { multi_head(wide(), x(), x()); }, "q must have the shape (N, L, 12)"},
    {[] { multi_head(x(), wide(), x()); }, "k must have the shape (N, L, 12)"},
    {[] { multi_head(x(), x(), wide()); }, "v must have the shape (N, L, 12)"},
    {[] { multi_head(x()[0], x(), x()); }, "q must have the shape (N, L, 12)"},
    {[] { multi_head(x(), x().narrow(0, 0, 1), x()); },
     "k must have the batch size of q, got [1, 5, 12]"},
    {[] { multi_head(x(), x(), x().narrow(1, 0, 1)); },
     "v must have the shape of k, got [2, 1, 12]"},
    {[] { attend(at::ones({2, 2})); },
     "mask must broadcast to [2, 3, 5, 5], got [2, 2]"},
    {[] { attend(at::ones({4, kL, kL})); }, "mask must broadcast to"},
    {[] { attend(at::ones({1, kN, kH, kL, kL})); }, "mask must broadcast to"},
    {[] { attend({}, square(kE + 1)); },
     "weights must have the query matrix of shape [12, 12], got [13, 13]"},
    {[] { attend({}, AttentionWeights()); },
     "weights must have the query matrix of shape [12, 12], got none"},
    {[] { attend({}, with_bias(&AttentionWeights::key_bias, kE)); },
     "weights must have biases for query, key and value, or for none"},
    {[] { attend({}, with_bias(&AttentionWeights::output_bias, kE + 1)); },
     "weights must have the output bias of shape [12], got [13]"},
    {[] { from_module(MultiheadAttentionOptions(kE, kH).kdim(kE - 1)); },
     "weights must have the key matrix of shape [12, 12], got [12, 11]"},
    {[] { from_module(MultiheadAttentionOptions(kE, kH).add_bias_kv(true)); },
     "module must be without add_bias_kv and add_zero_attn"},
    {[] { from_module(MultiheadAttentionOptions(kE, kH).add_zero_attn(true)); },
     "module must be without add_bias_kv and add_zero_attn"},
    {[] { grouped(2, 3); },
     "grouped_query_attention: num_heads must be a positive multiple of "
     "num_query_groups, got 3 (num_query_groups=2)"},
    {[] { grouped(0, {}); }, "num_query_groups must be positive, got 0"},
    {[] { grouped(5, {}); }, "d_model must be a positive multiple of num_h"},
    {[] { grouped(2, 4, square(kE)); },
     "weights must have the key matrix of shape [6, 12], got [12, 12]"},
    {[] { textbook::scaled_dot_product_attention(x()[0][0], x(), x()); },
     "scaled_dot_product_attention: q must have the shape (…, Lq, d)"},
    {[] { textbook::scaled_dot_product_attention(x(), wide(), x()); },
     "k must have the shape (…, Lk, d) of q"},
    {[] {
       textbook::scaled_dot_product_attention(x(), x(), x().narrow(1, 0, 1));
     },
     "v must have the shape (…, Lk, dv) of k"},
    {[] {
       textbook::scaled_dot_product_attention(x(), x(), x(), at::ones({3, 3}));
     },
     "mask must broadcast to [2, 5, 5], got [3, 3]"},
    {[] { textbook::MultiHeadAttention(kE, 5); },
     "MultiHeadAttention: d_model must be a positive multiple of num_heads"},
    {[] { module(wide(), x()); }, "MultiHeadAttention: Q must have the shape"},
    {[] { module(x(), x().narrow(0, 0, 1)); },
     "MultiHeadAttention: K must have the batch size of Q"},
    {[] { module(x(), x(), at::ones({3, 3})); }, "mask must broadcast to"},
    {[] { textbook::MultiHeadSelfAttention(kE, 5); },
     "MultiHeadSelfAttention: dim must be a positive multiple of num_heads"},
    {[] { textbook::MultiHeadSelfAttention(kE, kH, 1.5); },
     "dropout must be from 0 to 1, got 1.5"},
    {[] { textbook::MultiHeadSelfAttention(kE, kH)->forward(wide()); },
     "MultiHeadSelfAttention: x must have the shape (N, L, 12)"},
};

class TextbookErrors : public testing::TestWithParam<size_t> {};

TEST_P(TextbookErrors, NameTheArgument) {
  const Bad& bad = kBadCalls[GetParam()];
  try {
    bad.call();
    FAIL() << "no error: " << bad.message;
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find(bad.message), std::string::npos)
        << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(All, TextbookErrors,
                         testing::Range<size_t>(0, kBadCalls.size()));

TEST(TextbookMasks, EveryNumberTypeAndEveryShape) {
  const at::Tensor q = at::rand({kN, kL, kE});
  const AttentionWeights w{at::rand({kE, kE}), at::rand({kE, kE}),
                           at::rand({kE, kE}), at::rand({kE, kE})};
  const auto attend_with = [&](const at::Tensor& mask) {
    return textbook::multi_head_attention(q, q, q, kH, kE, mask, w);
  };
  at::Tensor mask = at::rand({kN, kH, kL, kL}) < 0.4;
  mask.select(-1, 0).fill_(false);
  const at::Tensor expected = attend_with(mask);
  for (const auto dtype : {at::kByte, at::kLong, at::kBFloat16, at::kDouble}) {
    EXPECT_TRUE(at::equal(attend_with(mask.to(dtype)), expected)) << dtype;
  }
  EXPECT_TRUE(at::equal(attend_with(mask.flatten(0, 1)), expected));
  const at::Tensor per_item = mask.select(1, 0);
  EXPECT_TRUE(
      at::equal(attend_with(per_item), attend_with(per_item.unsqueeze(1))));
}

}  // namespace
