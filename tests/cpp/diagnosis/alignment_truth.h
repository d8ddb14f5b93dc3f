// SPDX-License-Identifier: MIT
//
// What the tests of alignment share: matrices to be found again.
#pragma once

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "diagnosis/weights/alignment.h"

namespace alignment_truth {

using multihead::diagnosis::align_weights;
using multihead::diagnosis::AlignedWeights;
using multihead::diagnosis::FusedOrder;
using multihead::diagnosis::LayerSizes;
using enum multihead::diagnosis::Orientation;

using Orientations = std::map<std::string, multihead::diagnosis::Orientation>;
using Weights = std::map<std::string, at::Tensor>;
using Names = std::vector<std::string>;

constexpr int64_t kE = 12, kH = 3, kD = 4, kGroups = 2;
constexpr LayerSizes kPlain{kE, kH, kH}, kGrouped{24, 6, kGroups};

inline at::Tensor random(at::IntArrayRef sizes) { return at::rand(sizes); }

/// Four matrices (out, in) and biases that the names under test must lead to.
struct Truth {
  LayerSizes sizes = kPlain;
  at::Tensor q, k, v, o, q_bias, k_bias, v_bias, o_bias;

  explicit Truth(const LayerSizes& of = kPlain, int64_t head_dim = kD)
      : sizes(of) {
    const int64_t all = of.num_heads * head_dim;
    const int64_t kv = of.num_kv_heads * head_dim;
    q = random({all, of.embed_dim}), q_bias = random({all});
    k = random({kv, of.embed_dim}), k_bias = random({kv});
    v = random({kv, of.embed_dim}), v_bias = random({kv});
    o = random({of.embed_dim, all}), o_bias = random({of.embed_dim});
  }

  at::Tensor fused() const { return at::cat({q, k, v}); }
  at::Tensor fused_bias() const { return at::cat({q_bias, k_bias, v_bias}); }

  AlignedWeights align(const Weights& weights, const Orientations& known = {},
                       FusedOrder order = FusedOrder::kPartByPart) const {
    return align_weights(weights, known, sizes, order);
  }
};

inline void expect_same(const at::Tensor& found, const at::Tensor& truth,
                        const std::string& what) {
  ASSERT_EQ(found.defined(), truth.defined()) << what;
  if (truth.defined()) {
    EXPECT_TRUE(at::equal(found, truth)) << what;
  }
}

inline void expect_weights(const AlignedWeights& found, const Truth& truth,
                           const std::string& what = "") {
  expect_same(found.query.weight, truth.q, what + " query");
  expect_same(found.key.weight, truth.k, what + " key");
  expect_same(found.value.weight, truth.v, what + " value");
  expect_same(found.output.weight, truth.o, what + " output");
}

inline void expect_biases(const AlignedWeights& found, const Truth& truth,
                          const std::string& what = "") {
  expect_same(found.query.bias, truth.q_bias, what + " query bias");
  expect_same(found.key.bias, truth.k_bias, what + " key bias");
  expect_same(found.value.bias, truth.v_bias, what + " value bias");
  expect_same(found.output.bias, truth.o_bias, what + " output bias");
}

}  // namespace alignment_truth
