// SPDX-License-Identifier: MIT
//
// KVCache and forward with a cache, as C++ programs call them. What a cache
// holds after any sequence of calls is tested from Python, on the same class.
#include "multihead/cache.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <sstream>
#include <type_traits>
#include <utility>
#include <vector>

#include "multihead/modules.h"
#include "multihead/mxint8.h"
#include "multihead/stats.h"

namespace multihead {
namespace {

using at::Tensor;

static_assert(!std::is_copy_constructible_v<KVCache>);
static_assert(std::is_nothrow_move_constructible_v<KVCache>);

TEST(KVCache, GrowsTakesBackAndIsCloned) {
  const Tensor key = at::randn({2, 3, 5, 4}), value = at::randn({2, 3, 5, 6});
  KVCache cache(KVCacheOptions(2, 3, 4).value_dim(6));
  cache.append(key, value);
  cache.append(key, value, at::tensor({0, 2}));
  EXPECT_EQ(cache.length(), 7);
  EXPECT_EQ(cache.capacity(), 10);
  EXPECT_TRUE(at::equal(cache.key().narrow(2, 0, 5), key));
  EXPECT_TRUE(
      at::equal(cache.value()[1].narrow(1, 5, 2), value[1].narrow(1, 0, 2)));

  const KVCache copy = cache.clone();
  cache.truncate(at::tensor({1, 3}));
  cache.reorder(at::tensor({1, 0, 1}));
  EXPECT_TRUE(at::equal(cache.lengths(), at::tensor({3, 1, 3}, at::kLong)));
  EXPECT_EQ(copy.length(), 7);
  std::ostringstream text;
  text << cache;
  EXPECT_EQ(text.str(),
            "KVCache(batch_size=3, num_kv_heads=3, head_dim=4, value_dim=6, "
            "dtype=float32, lengths=1–3, capacity=10, bytes=3600)");
}

TEST(KVCache, HoldsOneByteANumber) {
  const Tensor key = at::randn({2, 3, 5, 40}), value = at::randn({2, 3, 5, 64});
  KVCache cache(KVCacheOptions(2, 3, 40).value_dim(64).dtype(at::kChar));
  cache.append(key, value);
  EXPECT_TRUE(at::equal(cache.key(), to_mxint8(key)));
  EXPECT_EQ(cache.bytes(), int64_t{2} * 3 * 5 * (42 + 66));
  const Tensor query = at::randn({2, 6, 1, 40});
  const AttentionOptions options{.enable_gqa = true};
  EXPECT_TRUE(at::equal(
      scaled_dot_product_attention(query, cache.key(), cache.value(), options),
      scaled_dot_product_attention(query, from_mxint8(cache.key()),
                                   from_mxint8(cache.value()), options)));
}

TEST(KVCache, RefusesWhatDoesNotFit) {
  KVCache cache(KVCacheOptions(1, 2, 4).max_length(6));
  const Tensor rows = at::randn({1, 2, 5, 4});
  cache.append(rows, rows);
  EXPECT_THROW(cache.append(rows, rows), c10::ValueError);
  EXPECT_THROW(cache.append(rows, Tensor()), c10::Error);
  EXPECT_THROW(KVCache(rows, rows, at::tensor({1, 2})), c10::ValueError);
  EXPECT_EQ(cache.length(), 5);
  EXPECT_TRUE(at::equal(cache.key(), rows));
}

TEST(Forward, WithACacheIsThatWithout) {
  const at::NoGradGuard no_grad;
  GroupedQueryAttention layer(
      GroupedQueryAttentionOptions(32, 4, 2).batch_first(true));
  MultiheadAttention sequence_first(32, 4);
  layer->eval();
  sequence_first->eval();
  const Tensor x = at::randn({2, 12, 32});
  const auto compare = [](auto& module, const Tensor& all, int64_t heads,
                          int64_t dim) {
    const auto causal = ForwardOptions().is_causal(true);
    const Tensor expected = std::get<0>(module(all, all, all, causal));
    KVCache cache(KVCacheOptions(2, heads, 8));
    std::vector<Tensor> outs;
    reset_stats();
    for (const Tensor& part : all.split_with_sizes({7, 1, 4}, dim)) {
      outs.push_back(std::get<0>(
          module(part, part, part, ForwardOptions().cache(&cache))));
    }
    EXPECT_TRUE(at::allclose(at::cat(outs, dim), expected, 1e-5, 1e-6));
    EXPECT_EQ(cache.length(), 12);
    ASSERT_EQ(stats().size(), 1);
    EXPECT_EQ(stats()[0].way, "fused");
    EXPECT_EQ(stats()[0].calls, 3);
  };
  compare(layer, x, 2, 1);
  compare(sequence_first, x.transpose(0, 1), 4, 0);
}

TEST(Forward, AttendsToWhatACacheWasGivenOnce) {
  const at::NoGradGuard no_grad;
  GroupedQueryAttention grouped(
      GroupedQueryAttentionOptions(32, 4, 2).batch_first(true));
  MultiheadAttention multi(MultiheadAttentionOptions(32, 4).batch_first(true));
  const Tensor memory = at::randn({2, 9, 32}), x = at::randn({2, 3, 32});
  const Tensor lengths = at::tensor({9, 4});
  const Tensor padding = at::arange(9).ge(lengths.unsqueeze(1));
  const auto compare = [&](auto& module, int64_t heads) {
    module->eval();
    KVCache cache(KVCacheOptions(2, heads, 8));
    const auto cached = ForwardOptions().cache(&cache);
    EXPECT_THROW(module(x, Tensor(), Tensor(), cached), c10::ValueError);
    module->append_to_cache(cache, memory, memory, padding);
    EXPECT_TRUE(at::equal(cache.lengths(), lengths));
    const auto [out, weights] = module(x, Tensor(), Tensor(), cached);
    const auto [expected, their_weights] =
        module(x, memory, memory, ForwardOptions().key_padding_mask(padding));
    EXPECT_TRUE(at::equal(out, expected));
    EXPECT_TRUE(at::equal(weights, their_weights));
    EXPECT_TRUE(at::equal(cache.lengths(), lengths));
    EXPECT_THROW(module(Tensor(), memory, memory, cached), c10::TypeError);
    EXPECT_THROW(module->append_to_cache(cache, memory, Tensor()),
                 c10::TypeError);
  };
  compare(grouped, 2);
  compare(multi, 4);
}

}  // namespace
}  // namespace multihead
