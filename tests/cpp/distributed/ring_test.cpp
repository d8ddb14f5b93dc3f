// SPDX-License-Identifier: MIT
//
// Ring attention from C++, over a c10d::ProcessGroup: the results of all ranks
// together are what the float64 loops say, within the error budget.
#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "multihead/distributed.h"
#include "multihead/functional.h"
#include "reference/attention.h"
#include "tests/cpp/distributed/local_group.h"
#include "tests/cpp/kernels/philox.h"

namespace distributed_test {
namespace {

using at::Tensor;
using multihead::AttentionOptions;
using multihead::TokenOrder;
using multihead::VarlenOptions;
using reference::Values;

constexpr int64_t kB = 2, kH = 4, kG = 2, kD = 8, kDv = 5, kSeed = 3;

Values values(const Tensor& x) {
  const Tensor dense = x.detach().to(at::kDouble).contiguous();
  const auto* p = dense.const_data_ptr<double>();
  return {p, p + dense.numel()};
}

reference::Precision precision_of(at::ScalarType dtype) {
  return dtype == at::kDouble     ? reference::kFloat64
         : dtype == at::kBFloat16 ? reference::kBFloat16
                                  : reference::kFloat32;
}

// --- Which tokens are whose
// ---------------------------------------------------

// Rows of the whole sequence, rank by rank. Contiguous ones are as uneven as
// can be: the second rank has none.
std::vector<Tensor> rows_of_ranks(TokenOrder order, int64_t length, int world) {
  const Tensor all = at::arange(length);
  std::vector<Tensor> ranks;
  if (order == TokenOrder::kHeadTail) {
    const auto pieces = all.tensor_split(2 * world);
    for (int r = 0; r < world; ++r) {
      ranks.push_back(at::cat({pieces[r], pieces[2 * world - 1 - r]}));
    }
    return ranks;
  }
  int64_t begin = 0;
  for (int r = 0; r < world; ++r) {
    const bool is_last = r + 1 == world;
    const int64_t count = is_last  ? length - begin
                          : r == 1 ? 0
                                   : (length - begin) / 2;
    ranks.push_back(all.narrow(0, begin, count));
    begin += count;
  }
  return ranks;
}

// --- A call
// -------------------------------------------------------------------

struct Tensors {
  Tensor query, key, value, dout, dlse;

  Tensors rows(int64_t dim, const Tensor& queries, const Tensor& keys) const {
    const auto leaf = [&](const Tensor& x, const Tensor& at) {
      return x.index_select(dim, at).requires_grad_();
    };
    return {leaf(query, queries), leaf(key, keys), leaf(value, keys),
            dout.index_select(dim, queries),
            dlse.index_select(dlse.dim() - 1, queries)};
  }
};

// out, logsumexp and the gradients of query, key and value.
using Results = std::array<Tensor, 5>;

// Those of `x` after a loss that both out and logsumexp are part of.
Results differentiate(const Tensors& x, const std::tuple<Tensor, Tensor>& y) {
  const auto& [out, lse] = y;
  // Rows that see nothing have logsumexp −inf, and no gradient.
  const Tensor finite = lse.masked_fill(lse.isinf(), 0.0);
  ((out * x.dout).sum() + (finite * x.dlse).sum()).backward();
  return {out.detach(), lse.detach(), x.query.grad(), x.key.grad(),
          x.value.grad()};
}

// Each rank's rows where they belong in the whole.
Results gathered(const std::vector<Results>& ranks, int64_t dim,
                 const std::vector<Tensor>& queries,
                 const std::vector<Tensor>& keys) {
  Results all;
  for (size_t n = 0; n < all.size(); ++n) {
    const auto& rows = n < 3 ? queries : keys;
    const int64_t at = n == 1 ? ranks[0][n].dim() - 1 : dim;
    std::vector<Tensor> parts;
    for (const Results& rank : ranks) parts.push_back(rank[n]);
    const Tensor order = at::cat(rows), together = at::cat(parts, at);
    all[n] = at::empty_like(together).index_copy_(at, order, together);
  }
  return all;
}

// --- What the loops say
// -------------------------------------------------------

// By the numbers that the first rank draws.
Values dropout(double probability, const reference::Attention& a,
               int64_t first_batch) {
  at::manual_seed(kSeed);
  const Tensor state =
      at::randint(std::numeric_limits<int64_t>::max(), {2}, at::kLong);
  const auto* words = state.const_data_ptr<int64_t>();
  const multihead::kernels::Dropout drawn{
      .probability = probability,
      .seed = static_cast<uint64_t>(words[0]),
      .offset = static_cast<uint64_t>(words[1]),
      .first_batch = first_batch};
  Values factors;
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t i = 0; i < a.Lq; ++i)
        for (int64_t j = 0; j < a.Lk; ++j)
          factors.push_back(
              kernel_test::dropout_factor(drawn, a.H, {b, h, i, j}));
  return factors;
}

reference::Attention arguments(const Tensors& x,
                               const AttentionOptions& options,
                               int64_t document = 0) {
  reference::Attention a;
  a.B = x.query.size(0), a.H = kH, a.G = kG, a.D = kD, a.Dv = kDv;
  a.Lq = x.query.size(2), a.Lk = x.key.size(2);
  a.query = values(x.query), a.key = values(x.key), a.value = values(x.value);
  a.is_causal = options.is_causal, a.window = options.window;
  a.bottom_right =
      options.causal_alignment == multihead::CausalAlignment::kBottomRight;
  if (options.sinks.defined()) a.sinks = values(options.sinks);
  if (options.key_lengths.defined()) {
    for (double n : values(options.key_lengths)) a.key_lengths.push_back(n);
  }
  if (options.dropout_p > 0)
    a.dropout = dropout(options.dropout_p, a, document);
  return a;
}

void expect_within(const char* what, const Tensor& actual, const Values& golden,
                   const Values& allowed) {
  const Values got = values(actual);
  ASSERT_EQ(got.size(), golden.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == golden[i]) continue;  // −inf, where a row sees nothing
    ASSERT_LE(std::abs(got[i] - golden[i]), allowed[i])
        << what << ", element " << i << " is " << got[i] << " instead of "
        << golden[i];
  }
}

void judge(const Results& results, const reference::Attention& a,
           const Tensors& x) {
  const reference::Precision p = precision_of(x.query.scalar_type());
  const auto golden = reference::forward(a);
  const auto g = reference::backward(a, golden, values(x.dout), values(x.dlse));
  const auto allowed = [&](const Values& scale, double factor) {
    return p.allowed(scale, golden.lambda, factor);
  };
  const auto& [out, lse, dq, dk, dv] = results;
  expect_within("out", out, golden.out, allowed(golden.out_scale, p.forward));
  expect_within("logsumexp", lse, golden.logsumexp,
                p.allowed_logsumexp(golden.logsumexp, golden.lambda));
  expect_within("dquery", dq, g.query, allowed(g.query_scale, p.backward));
  expect_within("dkey", dk, g.key, allowed(g.key_scale, p.backward));
  expect_within("dvalue", dv, g.value,
                allowed(g.value_scale, p.backward_value));
}

// --- Sequences of one batch
// ----------------------------------------------------

struct Case {
  const char* name;
  int64_t queries, keys;
  AttentionOptions options;
};

std::vector<Case> cases() {
  const Tensor sinks = at::linspace(-2, 2, kH, at::kDouble);
  return {
      {"plain", 21, 23, {}},
      {"causal", 21, 21, {.is_causal = true}},
      {"bottom right",
       21,
       23,
       {.is_causal = true,
        .causal_alignment = multihead::CausalAlignment::kBottomRight}},
      {"window and sinks",
       21,
       21,
       {.is_causal = true, .window = {{5, 0}}, .sinks = sinks}},
      {"lengths", 21, 23, {.key_lengths = at::tensor({0, 19})}},
      {"dropout", 21, 23, {.dropout_p = 0.3}},
      {"causal dropout", 21, 21, {.dropout_p = 0.5, .is_causal = true}},
  };
}

// Of values that the dtype can hold; results of ring attention on `world` ranks
// are judged. Returns what each rank has sent.
std::vector<int64_t> run(Case c, at::ScalarType dtype, TokenOrder order,
                         int world) {
  at::manual_seed(1);
  const auto random = [&](at::IntArrayRef sizes) {
    return at::randn(sizes, at::kDouble).to(dtype);
  };
  const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const Tensors x{random({kB, kH, c.queries, kD}), random({kB, kG, c.keys, kD}),
                  random({kB, kG, c.keys, kDv}),
                  random({kB, kH, c.queries, kDv}),
                  random({kB, kH, c.queries}).to(wide)};
  c.options.enable_gqa = true;
  if (c.options.sinks.defined()) c.options.sinks = c.options.sinks.to(dtype);
  const auto queries = rows_of_ranks(order, c.queries, world),
             keys = rows_of_ranks(order, c.keys, world);
  std::vector<Results> ranks(world);
  at::manual_seed(kSeed);
  const auto sent = on_ranks(world, [&](const Rank& me) {
    const Tensors mine = x.rows(2, queries[me.rank], keys[me.rank]);
    ranks[me.rank] = differentiate(mine, multihead::ring_attention_with_lse(
                                             mine.query, mine.key, mine.value,
                                             me.group, c.options, order));
  });
  judge(gathered(ranks, 2, queries, keys), arguments(x, c.options), x);
  return sent;
}

class Ring : public ::testing::TestWithParam<
                 std::tuple<int, TokenOrder, at::ScalarType>> {};

TEST_P(Ring, IsAttentionToTheWholeSequence) {
  const auto [world, order, dtype] = GetParam();
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    run(c, dtype, order, world);
  }
}

INSTANTIATE_TEST_SUITE_P(
    , Ring,
    ::testing::Combine(
        ::testing::Values(1, 2, 3, 4),
        ::testing::Values(TokenOrder::kContiguous, TokenOrder::kHeadTail),
        ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16)));

// As docs/distributed.md counts it: with uneven lengths, a rank sends on what
// others hold.
TEST(RingBytes, AreThoseOfTheFormula) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const int64_t size = c10::elementSize(dtype);
    for (const int world : {1, 2, 3, 4}) {
      const auto keys = rows_of_ranks(TokenOrder::kContiguous, 23, world);
      const auto sent =
          run({"", 21, 23, {}}, dtype, TokenOrder::kContiguous, world);
      for (int r = 0; r < world; ++r) {
        // Every step sends on the keys of a rank, twice W − 1 times, and their
        // gradients in float32, W times.
        int64_t expected = 0;
        for (int step = 0; step < world; ++step) {
          const int64_t elements =
              kB * kG * (kD + kDv) * keys[(r - step + world) % world].numel();
          if (step + 1 < world) expected += 2 * elements * size;
          if (world > 1) expected += elements * 4;
        }
        EXPECT_EQ(sent[r], expected) << "rank " << r << " of " << world;
      }
    }
  }
}

// --- Documents
// ------------------------------------------------------------------

void run_documents(const std::vector<int64_t>& lengths, VarlenOptions options,
                   TokenOrder order, int world) {
  at::manual_seed(1);
  Tensor starts = at::zeros({int64_t(lengths.size()) + 1}, at::kLong);
  starts.narrow(0, 1, lengths.size()).copy_(at::tensor(lengths).cumsum(0));
  const int64_t tokens = starts[-1].item<int64_t>();
  const auto random = [](at::IntArrayRef sizes) {
    return at::randn(sizes, at::kDouble);
  };
  const Tensors x{random({tokens, kH, kD}), random({tokens, kG, kD}),
                  random({tokens, kG, kDv}), random({tokens, kH, kDv}),
                  random({kH, tokens})};
  const auto rows = rows_of_ranks(order, tokens, world);
  std::vector<Results> ranks(world);
  at::manual_seed(kSeed);
  on_ranks(world, [&](const Rank& me) {
    const Tensors mine = x.rows(0, rows[me.rank], rows[me.rank]);
    ranks[me.rank] =
        differentiate(mine, multihead::ring_varlen_attention_with_lse(
                                mine.query, mine.key, mine.value, starts,
                                starts, me.group, options, order));
  });
  const Results all = gathered(ranks, 0, rows, rows);
  for (size_t n = 0; n < lengths.size(); ++n) {
    SCOPED_TRACE("document " + std::to_string(n));
    const int64_t begin = starts[n].item<int64_t>();
    const auto of = [&](const Tensor& x) {  // (1, heads, L, width)
      return x.narrow(0, begin, lengths[n]).transpose(0, 1).unsqueeze(0);
    };
    const auto row = [&](const Tensor& x) {
      return x.narrow(1, begin, lengths[n]).unsqueeze(0);
    };
    const Tensors own{of(x.query), of(x.key), of(x.value), of(x.dout),
                      row(x.dlse)};
    const AttentionOptions rules{.dropout_p = options.dropout_p,
                                 .is_causal = options.is_causal,
                                 .window = options.window,
                                 .sinks = options.sinks};
    judge({of(all[0]), row(all[1]), of(all[2]), of(all[3]), of(all[4])},
          arguments(own, rules, n), own);
  }
}

TEST(RingDocuments, AreCutWhereThatMayBe) {
  const Tensor sinks = at::linspace(-1, 1, kH, at::kDouble);
  for (const auto order : {TokenOrder::kContiguous, TokenOrder::kHeadTail}) {
    for (const int world : {2, 3}) {
      SCOPED_TRACE(std::to_string(world));
      run_documents({5, 0, 12, 7, 1}, {}, order, world);
      run_documents({20}, {.is_causal = true}, order, world);
      run_documents({3, 3, 3, 3, 3}, {.is_causal = true, .window = {{1, 0}}},
                    order, world);
      run_documents({9, 8}, {.dropout_p = 0.3, .sinks = sinks}, order, world);
    }
  }
}

// --- The step by itself, and errors
// ---------------------------------------------

TEST(Merge, OfTwoPartsIsTheWhole) {
  at::manual_seed(1);
  const auto random = [](int64_t length) {
    return at::randn({1, 2, length, 8}, at::kDouble);
  };
  const Tensor q = random(5), k = random(9), v = random(9);
  const auto part = [&](int64_t begin, int64_t length) {
    return multihead::scaled_dot_product_attention_with_lse(
        q, k.narrow(2, begin, length), v.narrow(2, begin, length));
  };
  const auto [one, one_lse] = part(0, 4);
  const auto [other, other_lse] = part(4, 5);
  const auto [out, lse] =
      multihead::merge_attention(one, one_lse, other, other_lse);
  const auto [golden, golden_lse] = part(0, 9);
  EXPECT_TRUE(at::allclose(out, golden, 1e-13, 1e-14));
  EXPECT_TRUE(at::allclose(lse, golden_lse, 1e-13, 1e-14));
}

// What ring_attention throws on each of three ranks; "": nothing.
std::vector<std::string> errors(
    const std::function<Tensor(const Rank&, const Tensor&)>& call) {
  const Tensor x = at::randn({1, 2, 4, 8});
  std::vector<std::string> said(3);
  on_ranks(3, [&](const Rank& me) {
    try {
      call(me, x);
    } catch (const c10::Error& error) {
      said[me.rank] = error.what_without_backtrace();
    }
  });
  return said;
}

TEST(RingErrors, ReachEveryRank) {
  for (const auto& text : errors([](const Rank& me, const Tensor& x) {
         return multihead::ring_attention(x, x, x, me.group,
                                          {.is_causal = me.rank == 1});
       })) {
    EXPECT_NE(text.find("is_causal must be the same on all processes"),
              std::string::npos)
        << text;
  }
  const auto said = errors([](const Rank& me, const Tensor& x) {
    const Tensor key = me.rank == 2 ? x.narrow(3, 0, 7) : x;
    return multihead::ring_attention(x, key, x, me.group);
  });
  EXPECT_NE(said[2].find("key must have the head width"), std::string::npos);
  for (int r = 0; r < 2; ++r) {
    EXPECT_NE(said[r].find("process 2 has refused"), std::string::npos)
        << said[r];
  }
}

}  // namespace
}  // namespace distributed_test
