// SPDX-License-Identifier: MIT
//
// The textbook forms against multihead::MultiheadAttention on the exact path,
// which the fixtures written by Python's torch hold to nn.MultiheadAttention,
// and against torch::nn::MultiheadAttention where that is right (no mask).
#include "multihead/textbook.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/types.h>
#include <torch/utils.h>

namespace {

namespace textbook = multihead::textbook;
using multihead::ForwardOptions;
using multihead::MultiheadAttention;
using multihead::MultiheadAttentionOptions;
using textbook::AttentionWeights;

constexpr int kSeeds = 1000;

// Where PyTorch changes bits between its own paths (docs/textbook.md).
bool close(const at::Tensor& ours, const at::Tensor& expected) {
  const double atol = expected.scalar_type() == at::kDouble ? 1e-8 : 1e-6;
  return ours.allclose(expected, /*rtol=*/1e-5, atol);
}

void redraw(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) {
    torch::nn::init::uniform_(parameter, -0.1, 0.1);
  }
}

// The weights of `from` in the four linear layers of a textbook module.
void copy_weights(torch::nn::Module& to, const MultiheadAttention& from) {
  const torch::NoGradGuard no_grad;
  const AttentionWeights w(from);
  const std::vector<at::Tensor> weights{w.query,    w.query_bias, w.key,
                                        w.key_bias, w.value,      w.value_bias,
                                        w.output,   w.output_bias};
  const auto parameters = to.parameters();
  for (size_t i = 0; i < weights.size(); ++i) parameters[i].copy_(weights[i]);
}

MultiheadAttention reference(int64_t width, int64_t heads, bool bias,
                             double dropout = 0.0) {
  return MultiheadAttention(MultiheadAttentionOptions(width, heads)
                                .bias(bias)
                                .dropout(dropout)
                                .batch_first(true));
}

class Textbook : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  multihead::BackendGuard exact_{multihead::Backend::kExact};
};

struct Mask {
  at::Tensor given;
  ForwardOptions reference;
};

std::vector<Mask> masks_of_case_a() {
  const at::Tensor causal = torch::ones({4, 4}, at::kBool).triu(1);
  const at::Tensor causal_3d = causal.expand({6, 4, 4});
  const at::Tensor padding =
      torch::arange(4) >= torch::tensor({3, 4, 2}).unsqueeze(1);
  const at::Tensor per_head =
      padding.unsqueeze(1).expand({3, 4, 4}).repeat_interleave(2, 0);
  return {{{}, {}},
          {causal, ForwardOptions().attn_mask(causal)},
          {causal_3d, ForwardOptions().attn_mask(causal_3d)},
          {padding.unsqueeze(1).unsqueeze(1),
           ForwardOptions().key_padding_mask(padding)},
          {per_head, ForwardOptions().attn_mask(per_head)}};
}

TEST_F(Textbook, CaseA) {
  const auto masks = masks_of_case_a();
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    auto module = reference(8, 2, /*bias=*/false);
    module->to(dtype);
    for (int seed = 0; seed < kSeeds; ++seed) {
      torch::manual_seed(seed);
      redraw(*module);
      const auto x = torch::rand({3, 3, 4, 8}, dtype).unbind();
      for (const Mask& mask : masks) {
        const auto [expected, _] =
            module->forward(x[0], x[1], x[2], mask.reference);
        const at::Tensor ours = textbook::multi_head_attention(
            x[0], x[1], x[2], 2, 8, mask.given, module);
        ASSERT_TRUE(torch::equal(ours, expected)) << "seed " << seed;
      }
    }
  }
}

// torch::nn runs other operations than Python's module.
TEST_F(Textbook, CaseAIsCloseToLibTorchWithoutMask) {
  torch::nn::MultiheadAttention module(
      torch::nn::MultiheadAttentionOptions(8, 2).bias(false));
  for (int seed = 0; seed < kSeeds; ++seed) {
    torch::manual_seed(seed);
    redraw(*module);
    const auto x = torch::rand({3, 3, 4, 8}).unbind();
    const auto swap = [](const at::Tensor& t) { return t.transpose(0, 1); };
    const auto [expected, _] =
        module->forward(swap(x[0]), swap(x[1]), swap(x[2]));
    const auto rows = module->in_proj_weight.chunk(3);
    const AttentionWeights weights(rows[0], rows[1], rows[2],
                                   module->out_proj->weight);
    const at::Tensor ours =
        textbook::multi_head_attention(x[0], x[1], x[2], 2, 8, {}, weights);
    ASSERT_TRUE(close(ours, swap(expected))) << "seed " << seed;
  }
}

TEST_F(Textbook, CaseB) {
  auto module = reference(512, 8, /*bias=*/true);
  textbook::MultiHeadAttention form(512, 8);
  const at::Tensor keep = torch::ones({10, 10}).tril();
  at::Tensor one_blind = keep.clone();
  one_blind[4].zero_();
  const at::Tensor seeing = torch::tensor({0, 1, 2, 3, 5, 6, 7, 8, 9});
  const auto causal = ForwardOptions().attn_mask(keep == 0);
  for (int seed = 0; seed < kSeeds; ++seed) {
    torch::manual_seed(seed);
    if (seed % 10 == 0) {  // a million numbers: longer than the calls
      redraw(*module);
      copy_weights(*form, module);
    }
    const at::Tensor x = torch::randn({2, 10, 512});
    const auto [plain, weights] = module->forward(x, x, x);
    ASSERT_TRUE(torch::equal(form->forward(x, x, x), plain)) << seed;
    const auto [masked, masked_weights] = module->forward(x, x, x, causal);
    ASSERT_TRUE(torch::equal(form->forward(x, x, x, keep), masked)) << seed;
    const at::Tensor ours = form->forward(x, x, x, one_blind);
    ASSERT_TRUE(torch::equal(ours.index_select(1, seeing),
                             masked.index_select(1, seeing)))
        << seed;
    ASSERT_TRUE(torch::equal(ours.select(1, 4),
                             module->out_proj->bias.expand({2, 512})))
        << seed;
  }
}

// Makes the heads of a group equal in the module; the form gets each once.
AttentionWeights share_heads(const MultiheadAttention& module, int64_t heads,
                             int64_t groups) {
  const torch::NoGradGuard no_grad;
  AttentionWeights weights(module);
  for (at::Tensor* rows : {&weights.key, &weights.value}) {
    const at::Tensor once = multihead::pool_heads(*rows, heads, groups);
    rows->copy_(multihead::repeat_heads(once, heads, groups));
    *rows = once;
  }
  weights.query = weights.query.clone();
  return weights;
}

struct Grouped {
  int64_t heads, groups, width;
};

class TextbookGroups : public Textbook,
                       public testing::WithParamInterface<Grouped> {};

TEST_P(TextbookGroups, CaseC) {
  const auto [heads, groups, width] = GetParam();
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    auto module = reference(width, heads, /*bias=*/false);
    module->to(dtype);
    for (int seed = 0; seed < kSeeds; ++seed) {
      torch::manual_seed(seed);
      redraw(*module);
      const AttentionWeights weights = share_heads(module, heads, groups);
      const auto x = torch::rand({3, 3, 4, width}, dtype).unbind();
      const auto [expected, _] = module->forward(x[0], x[1], x[2]);
      const at::Tensor ours = textbook::grouped_query_attention(
          x[0], x[1], x[2], groups, width, {}, heads, weights);
      ASSERT_TRUE(close(ours, expected)) << "seed " << seed;
      if (groups != heads) continue;
      const at::Tensor whole = textbook::grouped_query_attention(
          x[0], x[1], x[2], groups, width, {}, heads, module);
      ASSERT_TRUE(torch::equal(whole, expected)) << "seed " << seed;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, TextbookGroups,
                         testing::Values(Grouped{2, 2, 8}, Grouped{8, 8, 8},
                                         Grouped{8, 2, 64}, Grouped{8, 1, 64},
                                         Grouped{6, 3, 24}));

TEST_F(Textbook, CaseD) {
  auto module = reference(64, 8, /*bias=*/true, /*dropout=*/0.1);
  textbook::MultiHeadSelfAttention form(64);
  for (int seed = 0; seed < kSeeds; ++seed) {
    torch::manual_seed(seed);
    redraw(*module);
    copy_weights(*form, module);
    const at::Tensor x = torch::randn({2, 16, 64});
    form->train(), module->train();
    torch::manual_seed(seed);
    const at::Tensor ours = form->forward(x);
    torch::manual_seed(seed);
    ASSERT_TRUE(torch::equal(ours, std::get<0>(module->forward(x, x, x))))
        << seed;
    form->eval(), module->eval();
    const auto [evaluated, _] = module->forward(x, x, x);
    ASSERT_TRUE(torch::equal(form->forward(x), evaluated)) << seed;
    const torch::NoGradGuard no_grad;  // PyTorch's native path may be taken
    ASSERT_TRUE(close(form->forward(x), std::get<0>(module->forward(x, x, x))))
        << seed;
  }
}

TEST_F(Textbook, GradientsHaveTheBitsOfTheReference) {
  auto module = reference(24, 4, /*bias=*/true);
  textbook::MultiHeadAttention form(24, 4);
  redraw(*module);
  copy_weights(*form, module);
  const at::Tensor q = torch::randn({3, 5, 24}, torch::requires_grad());
  const at::Tensor k = torch::randn({3, 7, 24}, torch::requires_grad());
  const at::Tensor v = torch::randn({3, 7, 24}, torch::requires_grad());
  using Inputs = std::array<at::Tensor, 3>;
  for (const auto& [a, b, c] : {Inputs{q, q, q}, {q, k, k}, {q, k, v}}) {
    const std::vector<at::Tensor> leaves{a, b, c};
    const auto [expected, _] = module->forward(a, b, c);
    const auto wanted = torch::autograd::grad({expected.sin().sum()}, leaves);
    const at::Tensor ours = form->forward(a, b, c);
    const auto got = torch::autograd::grad({ours.sin().sum()}, leaves);
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(torch::equal(got[i], wanted[i]));
  }
}

TEST_F(Textbook, RowsThatSeeNothing) {
  const at::Tensor x = torch::randn({2, 4, 8}, torch::requires_grad());
  at::Tensor blocked = torch::zeros({4, 4}, at::kBool);
  blocked[2].fill_(true);
  const at::Tensor nan =
      textbook::multi_head_attention(x, x, x, 2, 8, blocked).isnan();
  EXPECT_TRUE(nan.select(1, 2).all().item<bool>());
  EXPECT_EQ(nan.sum().item<int64_t>(), 2 * 8);
  textbook::MultiHeadAttention form(8, 2);
  const at::Tensor ours = form->forward(x, x, x, ~blocked);
  EXPECT_TRUE(torch::equal(ours.select(1, 2), form->W_o->bias.expand({2, 8})));
  ours.sum().backward();
  EXPECT_TRUE(x.grad().isfinite().all().item<bool>());
}

TEST_F(Textbook, TheSameSeedDrawsTheSameLayer) {
  const auto x = torch::rand({3, 3, 4, 8}).unbind();
  torch::manual_seed(3);
  const auto [expected, _] =
      reference(8, 2, /*bias=*/false)->forward(x[0], x[1], x[2]);
  torch::manual_seed(3);
  EXPECT_TRUE(torch::equal(
      textbook::multi_head_attention(x[0], x[1], x[2], 2, 8), expected));
  torch::manual_seed(3);
  const multihead::GroupedQueryAttention grouped(
      multihead::GroupedQueryAttentionOptions(8, 4, 2).bias(false));
  const at::Tensor given = textbook::grouped_query_attention(
      x[0], x[1], x[2], 2, 8, {}, 4, AttentionWeights(grouped));
  torch::manual_seed(3);
  const at::Tensor drawn =
      textbook::grouped_query_attention(x[0], x[1], x[2], 2, 8, {}, 4);
  EXPECT_TRUE(torch::equal(drawn, given));
}

TEST_F(Textbook, HeadsAreSplitAndCombined) {
  textbook::MultiHeadAttention form(12, 3);
  const at::Tensor x = torch::randn({2, 5, 12});
  const at::Tensor heads = form->split_heads(x);
  EXPECT_EQ(heads.sizes(), (std::vector<int64_t>{2, 3, 5, 4}));
  EXPECT_TRUE(torch::equal(heads[1][2], x[1].narrow(-1, 8, 4)));
  EXPECT_TRUE(torch::equal(form->combine_heads(heads), x));
}

TEST_F(Textbook, ModulesCanBeCloned) {
  textbook::MultiHeadSelfAttention form(16, 4, 0.5);
  const auto copy =
      std::dynamic_pointer_cast<textbook::MultiHeadSelfAttentionImpl>(
          form->clone());
  copy->eval(), form->eval();
  const at::Tensor x = torch::randn({1, 3, 16});
  EXPECT_TRUE(torch::equal(copy->forward(x), form->forward(x)));
  EXPECT_EQ(copy->dropout, 0.5);
}

}  // namespace
