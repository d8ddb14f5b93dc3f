// SPDX-License-Identifier: MIT
//
// Ulysses, and ContextParallelGuard, from C++: ranks as threads.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "multihead/distributed.h"
#include "multihead/functional.h"
#include "multihead/modules.h"
#include "tests/cpp/distributed/local_group.h"

namespace distributed_test {
namespace {

using at::Tensor;
using multihead::AttentionOptions;
using multihead::ContextMethod;
using multihead::ContextParallelGuard;
using multihead::TokenOrder;

constexpr int64_t kLength = 21;

struct Tensors {
  Tensor query, key, value;

  Tensors rows(int64_t dim, const Tensor& at) const {
    const auto leaf = [&](const Tensor& x) {
      return x.index_select(dim, at).requires_grad_();
    };
    return {leaf(query), leaf(key), leaf(value)};
  }
};

Tensors tensors(int64_t heads, int64_t groups, at::ScalarType dtype) {
  at::manual_seed(1);
  const auto random = [&](int64_t n) {
    return at::randn({2, n, kLength, 8}, at::kDouble).to(dtype);
  };
  return {random(heads), random(groups), random(groups)};
}

using Results = std::array<Tensor, 4>;

// out, and the gradients of its sines' sum.
Results differentiate(const Tensors& x, const Tensor& out) {
  out.sin().sum().backward();
  return {out.detach(), x.query.grad(), x.key.grad(), x.value.grad()};
}

class Context : public ::testing::TestWithParam<std::tuple<int, TokenOrder>> {
 protected:
  // `call` on each rank's rows, beside `whole` on all of them.
  void expect_same(
      const Tensors& x, bool to_the_bit,
      const std::function<Tensor(const Rank&, const Tensors&)>& call,
      const std::function<Tensor(const Tensors&)>& whole) const {
    const auto [world, order] = GetParam();
    const Tensors all = x.rows(2, at::arange(kLength));
    at::manual_seed(3);
    const Results golden = differentiate(all, whole(all));
    std::vector<Results> ranks(world);
    at::manual_seed(3);
    on_ranks(world, [&, order = order](const Rank& me) {
      const Tensors mine = x.rows(2, positions(me, order));
      ranks[me.rank] = differentiate(mine, call(me, mine));
    });
    for (int r = 0; r < world; ++r) {
      const Tensor rows = positions({r, world, ""}, order);
      for (size_t n = 0; n < golden.size(); ++n) {
        const Tensor expected = golden[n].index_select(2, rows);
        EXPECT_TRUE(to_the_bit
                        ? at::equal(ranks[r][n], expected)
                        : at::allclose(ranks[r][n], expected, 1e-12, 1e-13))
            << "result " << n << " of rank " << r;
      }
    }
  }

  static Tensor positions(const Rank& rank, TokenOrder order) {
    return multihead::token_positions(kLength, rank.rank, rank.world, order);
  }
};

TEST_P(Context, UlyssesHasTheBitsOfOneProcess) {
  const AttentionOptions options{
      .dropout_p = 0.3, .is_causal = true, .enable_gqa = true};
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    expect_same(
        tensors(24, 12, dtype), /*to_the_bit=*/true,
        [&](const Rank& me, const Tensors& x) {
          return multihead::ulysses_attention(x.query, x.key, x.value, me.group,
                                              options, std::get<1>(GetParam()));
        },
        [&](const Tensors& x) {
          return multihead::scaled_dot_product_attention(x.query, x.key,
                                                         x.value, options);
        });
  }
}

TEST_P(Context, GuardRedirectsPyTorchsFunction) {
  const auto attend = [](const Tensors& x) {
    return at::scaled_dot_product_attention(x.query, x.key, x.value, {}, 0.0,
                                            /*is_causal=*/true);
  };
  for (const auto method : {ContextMethod::kRing, ContextMethod::kUlysses}) {
    expect_same(
        tensors(12, 12, at::kDouble), /*to_the_bit=*/false,
        [&](const Rank& me, const Tensors& x) {
          const ContextParallelGuard guard(me.group, std::get<1>(GetParam()),
                                           method);
          return attend(x);
        },
        attend);
  }
}

TEST_P(Context, GuardRedirectsModules) {
  const auto [world, order] = GetParam();
  at::manual_seed(2);
  multihead::MultiheadAttention module(
      multihead::MultiheadAttentionOptions(16, 4).batch_first(true));
  module->to(at::kDouble);
  const Tensor x = at::randn({2, kLength, 16}, at::kDouble);
  const Tensor blocked = at::arange(2 * kLength).view({2, kLength}) % 5 == 4;
  const auto attend = [&](const Tensor& x, const Tensor& blocked) {
    return std::get<0>(module->forward(x, x, x,
                                       multihead::ForwardOptions()
                                           .key_padding_mask(blocked)
                                           .is_causal(true)
                                           .need_weights(false)));
  };
  const Tensor golden = attend(x, blocked);
  on_ranks(world, [&, order = order](const Rank& me) {
    const Tensor rows = positions(me, order);
    const ContextParallelGuard guard(me.group, order);
    const Tensor out =
        attend(x.index_select(1, rows), blocked.index_select(1, rows));
    EXPECT_TRUE(at::allclose(out, golden.index_select(1, rows), 1e-12, 1e-13));
  });
}

INSTANTIATE_TEST_SUITE_P(
    , Context,
    ::testing::Combine(::testing::Values(1, 2, 3, 4),
                       ::testing::Values(TokenOrder::kContiguous,
                                         TokenOrder::kHeadTail)));

TEST(ContextGuard, EndsWithItsScope) {
  const Tensors x = tensors(4, 4, at::kFloat);
  const auto attend = [&] {
    return multihead::scaled_dot_product_attention(x.query, x.key, x.value);
  };
  const Tensor alone = attend();
  on_ranks(2, [&](const Rank& me) {
    {
      const ContextParallelGuard outer(me.group);
      EXPECT_TRUE(multihead::is_context_parallel());
      EXPECT_FALSE(at::equal(attend(), alone));
    }
    EXPECT_FALSE(multihead::is_context_parallel());
    EXPECT_TRUE(at::equal(attend(), alone));
  });
  EXPECT_THROW(ContextParallelGuard("no group"), c10::Error);
  EXPECT_FALSE(multihead::is_context_parallel());
  EXPECT_TRUE(at::equal(attend(), alone));
}

TEST(ContextGuard, RefusesWhatItCannotDo) {
  const Tensors x = tensors(4, 4, at::kFloat);
  const auto said = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return {};
  };
  on_ranks(2, [&](const Rank& me) {
    const ContextParallelGuard guard(me.group, TokenOrder::kContiguous,
                                     ContextMethod::kUlysses);
    const auto text = said([&] {
      multihead::scaled_dot_product_attention(
          x.query, x.key, x.value,
          {.attn_mask = at::ones({kLength, 2 * kLength}, at::kBool)});
    });
    EXPECT_NE(text.find("attn_mask must be None"), std::string::npos) << text;
    const multihead::BackendGuard exact(multihead::Backend::kExact);
    const auto other = said([&] {
      multihead::scaled_dot_product_attention(x.query, x.key, x.value);
    });
    EXPECT_NE(other.find("context_parallel cannot run"), std::string::npos)
        << other;
  });
  const auto name = said([] { multihead::context_method_from_name("zigzag"); });
  EXPECT_NE(name.find("method must be \"auto\", \"ring\" or \"ulysses\""),
            std::string::npos)
      << name;
}

}  // namespace
}  // namespace distributed_test
