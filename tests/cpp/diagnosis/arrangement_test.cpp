// SPDX-License-Identifier: MIT
//
// How heads are split and merged, where heads alone are observed and the trace
// shows what they are made of, and what is made of them.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "tests/cpp/diagnosis/observations.h"

namespace multihead::diagnosis {
namespace {

constexpr int64_t kWidth = kEmbed / kHeads;

// (B, L, H·d) as (B, H, L, d).
Tensor heads_of(const Tensor& x) {
  return x.unflatten(2, {kHeads, kWidth}).transpose(1, 2).contiguous();
}

// The fault of heads of these values that come of `projected`; `merge` makes of
// their result what is projected next.
std::string fault_of(const Tensor& projected, const Tensor& value,
                     Tensor (*merge)(const Tensor& context)) {
  Observation o;
  o.metadata = {{"name", "heads"},
                {"num_heads", std::to_string(kHeads)},
                {"embed_dim", std::to_string(kEmbed)},
                {"is_causal", "infer"},
                {"core_beside", "`gate.weight`"}};
  const Tensor query = random({kBatch, kHeads, kQueries, kWidth});
  const Tensor key = random({kBatch, kHeads, value.size(2), kWidth});
  const Tensor scores =
      query.matmul(key.transpose(-2, -1)) / std::sqrt(double{kWidth});
  const Tensor weights = scores.softmax(-1);
  const Tensor context = weights.matmul(value);
  o.tensors = {
      {"query", query}, {"key", key}, {"value", value}, {"out", context}};
  int64_t count = 0;
  for (const Tensor& x :
       {projected, value, scores, weights, context, merge(context)}) {
    o.tensors["trace." + std::to_string(count++)] = x.contiguous();
  }
  const Verdict verdict = explain(std::array{o});
  return verdict.faults.empty() ? "" : verdict.faults.front().name;
}

Tensor by_head(const Tensor& c) { return c.transpose(1, 2).flatten(2); }

TEST(Arrangement, WhatOnlyMovesWholePositionsIsNoFault) {
  at::manual_seed(3);
  const Tensor projected = random({kBatch, kKeys, kEmbed});
  EXPECT_EQ(fault_of(projected, heads_of(projected), by_head), "");
  // By features, as channels of an image, and with the sequence first.
  for (const auto merge :
       {+[](const Tensor& c) { return c.permute({0, 2, 3, 1}).flatten(2); },
        +[](const Tensor& c) { return c.transpose(2, 3).flatten(1, 2); },
        +[](const Tensor& c) { return c.permute({2, 0, 1, 3}).flatten(2); }}) {
    EXPECT_EQ(fault_of(projected, heads_of(projected), merge), "");
  }
}

TEST(Arrangement, HeadsMayStandBeforeItems) {
  at::manual_seed(6);
  // (H·B, L, d), observed as (B, H, L, d).
  const Tensor projected = random({kBatch, kKeys, kEmbed});
  const Tensor value = heads_of(projected).transpose(0, 1).reshape(
      {kBatch, kHeads, kKeys, kWidth});
  const auto merge = +[](const Tensor& c) {
    return c.reshape({kHeads, kBatch, kQueries, kWidth})
        .permute({1, 2, 0, 3})
        .flatten(2);
  };
  EXPECT_EQ(fault_of(projected, value, merge), "");
}

TEST(Arrangement, AViewInThePlaceOfATransposeIsOne) {
  at::manual_seed(4);
  const Tensor projected = random({kBatch, kKeys, kEmbed});
  for (const auto merge :
       {+[](const Tensor& c) { return c.reshape({kBatch, kQueries, kEmbed}); },
        +[](const Tensor& c) {
          return c.transpose(2, 3).reshape({kBatch, kQueries, kEmbed});
        },
        +[](const Tensor& c) {
          return c.reshape({kBatch, kEmbed, kQueries});
        }}) {
    EXPECT_EQ(fault_of(projected, heads_of(projected), merge),
              "merge_not_transposed");
  }
  const Tensor viewed = projected.view({kBatch, kHeads, kKeys, kWidth});
  EXPECT_EQ(fault_of(projected, viewed, by_head), "heads_not_transposed");
  // Queries, keys and values at once, (B, L, 3·H·d).
  const Tensor fused = random({kBatch, kKeys, 3 * kEmbed});
  const Tensor of_values =
      fused.reshape({kBatch, 3, kHeads, kKeys, kWidth}).select(1, 2);
  EXPECT_EQ(fault_of(fused, of_values, by_head), "heads_not_transposed");
  EXPECT_EQ(fault_of(fused, heads_of(fused.slice(2, 2 * kEmbed)), by_head), "");
}

TEST(Arrangement, ItemsThatAreExchangedAreOne) {
  at::manual_seed(7);
  const Tensor projected = random({kBatch, kKeys, kEmbed});
  const auto merge = +[](const Tensor& c) {
    return c.permute({2, 0, 1, 3}).reshape({kBatch, kQueries, kEmbed});
  };
  EXPECT_EQ(fault_of(projected, heads_of(projected), merge),
            "merge_of_batch_and_heads");
}

TEST(Arrangement, SizesThatAreTheSameTellNothing) {
  at::manual_seed(8);
  // As many positions as features: an axis of either is taken for the other.
  const Tensor projected = random({kBatch, kEmbed, kEmbed});
  const Tensor heads = heads_of(projected);
  EXPECT_EQ(fault_of(heads, heads, by_head), "");
}

TEST(Arrangement, NumbersThatAreTheSameTellNothing) {
  at::manual_seed(5);
  const Tensor rows = random({kBatch, kKeys, 1}).expand({-1, -1, kEmbed});
  const Tensor viewed = rows.reshape({kBatch, kHeads, kKeys, kWidth});
  EXPECT_EQ(fault_of(rows, viewed, by_head), "");
}

}  // namespace
}  // namespace multihead::diagnosis
