// SPDX-License-Identifier: MIT
//
// From scores to weights: the softmax, dropout, and what is rounded there.
#include <ATen/TensorOperators.h>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

using at::Tensor;

// ---- Softmax ---------------------------------------------------------------

Tensor softmax_over_keys(const Tensor& scores) { return scores.softmax(-1); }

Tensor divide_by_sum(const Tensor& scores) {
  return scores / scores.sum(-1, /*keepdim=*/true);
}

// ---- Dropout ---------------------------------------------------------------

namespace {

// `draws` (1 = kept) on x, as torch.dropout would.
Tensor drop(const Tensor& x, const Tensor& draws, double p) {
  require(draws.defined());
  return x * (draws / (1.0 - p));
}

}  // namespace

bool drops(const ObservedCall& call, const Recipe& recipe) {
  return call.training
             ? call.dropout_p > 0.0 && recipe.dropout != Dropout::kExchanged
             : recipe.dropout == Dropout::kLeftOn ||
                   recipe.dropout == Dropout::kLeftOnOutput ||
                   recipe.dropout == Dropout::kExchanged;
}

Tensor drop_weights(const ObservedCall& call, const Recipe& recipe,
                    const Tensor& weights) {
  if (!drops(call, recipe)) return weights;
  switch (recipe.dropout) {
    case Dropout::kOnWeights:
    case Dropout::kOnOutputToo:
    case Dropout::kLeftOn:
    case Dropout::kExchanged:
      return drop(weights, call.kept_weights, call.dropout_p);
    case Dropout::kNotRescaled:
      return drop(weights, call.kept_weights, 0.0);
    case Dropout::kKeepsTheDropped:
      require(call.kept_weights.defined());
      return drop(weights, 1.0 - call.kept_weights, call.dropout_p);
    default:
      return weights;
  }
}

Tensor drop_at(Dropout where, const ObservedCall& call, const Recipe& recipe,
               const Tensor& x) {
  if (recipe.dropout != where || !drops(call, recipe)) return x;
  const bool scores =
      where == Dropout::kBeforeMask || where == Dropout::kBeforeSoftmax;
  const Tensor& draws = scores                         ? call.kept_weights
                        : where == Dropout::kOnContext ? call.kept_context
                                                       : call.kept_output;
  require(draws.defined() && draws.sizes() == x.sizes());
  return drop(x, draws, call.dropout_p);
}

// ---- Rounding --------------------------------------------------------------

Tensor narrowed(const Tensor& x, const Recipe& recipe, Narrow where) {
  if (recipe.narrow != where && recipe.narrow != Narrow::kEverywhere) return x;
  return x.to(recipe.narrow_type).to(at::kDouble);
}

// ---- Faults ----------------------------------------------------------------

namespace {

template <auto normalise>
void normalise_by(Recipe& r) {
  r.normalise = normalise;
}

// Over several dimensions that lie side by side.
template <int64_t from, int64_t to = from>
Tensor softmax_over(const Tensor& scores) {
  return scores.flatten(from, to).softmax(from).view(scores.sizes());
}

Tensor softmax_over_heads_and_keys(const Tensor& scores) {
  const Tensor queries_first = scores.transpose(1, 2);
  return queries_first.flatten(2)
      .softmax(-1)
      .view(queries_first.sizes())
      .transpose(1, 2);
}

Tensor as_they_are(const Tensor& scores) { return scores; }

template <Narrow where, at::ScalarType type>
void narrow_to(Recipe& r) {
  r.narrow = where;
  r.narrow_type = type;
}

template <at::ScalarType type>
std::vector<Way> narrow_ways() {
  return {
      {narrow_to<Narrow::kOutput, type>, "It is the output."},
      {narrow_to<Narrow::kSoftmax, type>,
       "It is the softmax and what enters it."},
      {narrow_to<Narrow::kEverywhere, type>, "It is every step."},
  };
}

constexpr std::string_view kSoftmaxRemedy =
    "Softmax over the keys, the last dimension of (B, H, Lq, Lk): each "
    "query's weights sum to 1. softmax(scores, dim=-1).";
constexpr std::string_view kDropoutRemedy =
    "Drop weights, after the softmax, in training only, and divide what is "
    "kept by 1 - p: F.dropout(weights, p, training=self.training), or an "
    "nn.Dropout that eval() reaches.";

}  // namespace

const std::vector<Fault> kWeightFaults = {
    {"softmax_over_queries",
     "The softmax runs over the queries, not over the keys.",
     kSoftmaxRemedy,
     {{normalise_by<softmax_over<2>>}}},
    {"softmax_over_heads",
     "The softmax runs over the heads, not over the keys.",
     kSoftmaxRemedy,
     {{normalise_by<softmax_over<1>>}}},
    {"softmax_over_batch",
     "The softmax runs over the batch, not over the keys.",
     kSoftmaxRemedy,
     {{normalise_by<softmax_over<0>>},
      {normalise_by<softmax_over<0, 1>>,
       "Batch and heads are one dimension, B·H."}}},
    {"softmax_over_all",
     "The softmax runs over queries and keys together.",
     kSoftmaxRemedy,
     {{normalise_by<softmax_over<2, 3>>},
      {normalise_by<softmax_over<0, 3>>,
       "And over heads and batch items: one sum for all."},
      {normalise_by<softmax_over<1, 3>>,
       "And over heads: one sum for each batch item."}}},
    {"softmax_over_heads_and_keys",
     "The softmax runs over the keys of all heads together.",
     kSoftmaxRemedy,
     {{normalise_by<softmax_over_heads_and_keys>}}},
    {"softmax_missing",
     "There is no softmax.",
     kSoftmaxRemedy,
     {{normalise_by<as_they_are>},
      {[](Recipe& r) {
         r.normalise = as_they_are;
         r.sentinel = 0.0;
       },
       "Blocked scores are 0."}}},
    {"softmax_not_normalised",
     "exp(scores) is not divided by its sum.",
     kSoftmaxRemedy,
     {{normalise_by<[](const Tensor& s) { return s.exp(); }>},
      {normalise_by<[](const Tensor& s) {
         return (s - s.amax(-1, /*keepdim=*/true)).exp();
       }>,
       "The largest score is subtracted, as it should be."}}},
    {"softmax_twice",
     "The softmax is applied twice.",
     kSoftmaxRemedy,
     {{normalise_by<[](const Tensor& s) {
       return s.softmax(-1).softmax(-1);
     }>}}},
    {"log_softmax",
     "log_softmax is used for softmax.",
     kSoftmaxRemedy,
     {{normalise_by<[](const Tensor& s) { return s.log_softmax(-1); }>}}},
    {"sigmoid_instead_of_softmax",
     "A sigmoid is used for the softmax.",
     kSoftmaxRemedy,
     {{normalise_by<[](const Tensor& s) { return s.sigmoid(); }>}}},
    {"scores_normalised_without_exp",
     "The scores are divided by their sum without exp.",
     kSoftmaxRemedy,
     {{normalise_by<divide_by_sum>},
      {[](Recipe& r) {
         r.normalise = divide_by_sum;
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
    {"dropout_left_on",
     "Dropout is on in evaluation: results are random.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kLeftOn; }},
      {[](Recipe& r) { r.dropout = Dropout::kExchanged; },
       "And it is off in training."}}},
    {"dropout_missing",
     "Nothing is dropped in training.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kMissing; }}}},
    {"dropout_before_softmax",
     "Scores are dropped, not weights: a dropped score is 0, which is a "
     "weight like any other.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kBeforeSoftmax; }},
      {[](Recipe& r) { r.dropout = Dropout::kBeforeMask; },
       "The mask comes after."}}},
    {"dropout_not_rescaled",
     "The weights that are kept are not divided by 1 - p: the output shrinks "
     "in training.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kNotRescaled; }}}},
    {"dropout_on_context",
     "The heads' results are dropped, the weights are not.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kOnContext; }},
      {[](Recipe& r) { r.dropout = Dropout::kOnMerged; },
       "They are merged before."}},
     Stage::kContext},
    {"dropout_keeps_what_it_should_drop",
     "What should be dropped is kept: p is taken for the share to keep.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kKeepsTheDropped; }}}},
    // The same name as above: the cause is one, the place is another.
    {"dropout_left_on",
     "Dropout of the output is on in evaluation: results are random.",
     "Drop in training only: `F.dropout(out, p, training=self.training)` or "
     "an `nn.Dropout` that eval() reaches.",
     {{[](Recipe& r) { r.dropout = Dropout::kLeftOnOutput; }}},
     Stage::kOutput},
    {"computed_in_bfloat16", "Numbers are rounded to bfloat16 on the way.",
     "Keep scores and weights in float32, also where inputs and outputs are "
     "bfloat16.",
     narrow_ways<at::kBFloat16>()},
    {"computed_in_float16", "Numbers are rounded to float16 on the way.",
     "Keep scores and weights in float32, also where inputs and outputs are "
     "float16.",
     narrow_ways<at::kHalf>()},
};

}  // namespace multihead::diagnosis
