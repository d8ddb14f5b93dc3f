// SPDX-License-Identifier: MIT
#include "diagnosis/stages/softmax.h"

#include <ATen/TensorOperators.h>

#include "diagnosis/stages/recipe.h"

namespace multihead::diagnosis {

using at::Tensor;

Tensor normalise(const Tensor& scores, Normalise how) {
  const auto over = [&](int64_t from, int64_t to) {
    Tensor flat = scores.flatten(from, to);
    return flat.softmax(from).view(scores.sizes());
  };
  switch (how) {
    case Normalise::kOverKeys:
      return scores.softmax(-1);
    case Normalise::kOverQueries:
      return scores.softmax(2);
    case Normalise::kOverHeads:
      return scores.softmax(1);
    case Normalise::kOverBatch:
      return scores.softmax(0);
    case Normalise::kOverBatchAndHeads:
      return over(0, 1);
    case Normalise::kOverQueriesAndKeys:
      return over(2, 3);
    case Normalise::kOverItem:
      return over(1, 3);
    case Normalise::kOverAll:
      return over(0, 3);
    case Normalise::kOverHeadsAndKeys:
      return scores.transpose(1, 2)
          .flatten(2)
          .softmax(-1)
          .view({scores.size(0), scores.size(2), scores.size(1), -1})
          .transpose(1, 2);
    case Normalise::kNothing:
      return scores;
    case Normalise::kExpOnly:
      return scores.exp();
    case Normalise::kShiftedExpOnly:
      return (scores - scores.amax(-1, /*keepdim=*/true)).exp();
    case Normalise::kTwice:
      return scores.softmax(-1).softmax(-1);
    case Normalise::kLog:
      return scores.log_softmax(-1);
    case Normalise::kSigmoid:
      return scores.sigmoid();
    case Normalise::kSumOnly:
      return scores / scores.sum(-1, /*keepdim=*/true);
  }
  throw Impossible();
}

// ---- Faults ----------------------------------------------------------------

namespace {

constexpr std::string_view kRemedy =
    "Softmax over the keys, the last dimension of (B, H, Lq, Lk): each "
    "query's weights sum to 1. softmax(scores, dim=-1).";

}  // namespace

const std::vector<Fault> kSoftmaxFaults = {
    {"softmax_over_queries",
     "The softmax runs over the queries, not over the keys.",
     kRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kOverQueries; }}}},
    {"softmax_over_heads",
     "The softmax runs over the heads, not over the keys.",
     kRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kOverHeads; }}}},
    {"softmax_over_batch",
     "The softmax runs over the batch, not over the keys.",
     kRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kOverBatch; }},
      {[](Recipe& r) { r.normalise = Normalise::kOverBatchAndHeads; },
       "Batch and heads are one dimension, B·H."}}},
    {"softmax_over_all",
     "The softmax runs over queries and keys together.",
     kRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kOverQueriesAndKeys; }},
      {[](Recipe& r) { r.normalise = Normalise::kOverAll; },
       "And over heads and batch items: one sum for all."},
      {[](Recipe& r) { r.normalise = Normalise::kOverItem; },
       "And over heads: one sum for each batch item."}}},
    {"softmax_over_heads_and_keys",
     "The softmax runs over the keys of all heads together.",
     kRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kOverHeadsAndKeys; }}}},
    {"softmax_missing",
     "There is no softmax.",
     kRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kNothing; }},
      {[](Recipe& r) {
         r.normalise = Normalise::kNothing;
         r.sentinel = 0.0;
       },
       "Blocked scores are 0."}}},
    {"softmax_not_normalised",
     "exp(scores) is not divided by its sum.",
     kRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kExpOnly; }},
      {[](Recipe& r) { r.normalise = Normalise::kShiftedExpOnly; },
       "The largest score is subtracted, as it should be."}}},
    {"softmax_twice",
     "The softmax is applied twice.",
     kRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kTwice; }}}},
    {"log_softmax",
     "log_softmax is used for softmax.",
     kRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kLog; }}}},
    {"sigmoid_instead_of_softmax",
     "A sigmoid is used for the softmax.",
     kRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kSigmoid; }}}},
    {"scores_normalised_without_exp",
     "The scores are divided by their sum without exp.",
     kRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kSumOnly; }},
      {[](Recipe& r) {
         r.normalise = Normalise::kSumOnly;
         r.sentinel = 0.0;
       },
       "Blocked scores are 0."}}},
    {"weights_averaged",
     "The weights are averaged over the heads before they meet the values.",
     "Each head weighs its values by its own weights; the average over heads "
     "is for looking at.",
     {{[](Recipe& r) { r.weights_averaged = true; }}}},
    {"weights_transposed",
     "The weights are transposed before they meet the values.",
     "weights @ v: row i of the weights belongs to query i.",
     {{[](Recipe& r) { r.weights_transposed = true; }}},
     Stage::kContext},
};

}  // namespace multihead::diagnosis
