// SPDX-License-Identifier: MIT
//
// From scores to weights: the softmax, dropout, and what is rounded there.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include <cmath>

#include "diagnosis/stages/simulate.h"

namespace multihead::diagnosis {

using at::Tensor;

// ---- Softmax ---------------------------------------------------------------

Tensor softmax_over_keys(const Tensor& scores) { return scores.softmax(-1); }

Tensor divide_by_sum(const Tensor& scores) {
  return scores / scores.sum(-1, /*keepdim=*/true);
}

// ---- What the heads return -------------------------------------------------

Tensor weighted_sum(const Tensor& weights, const Tensor& value) {
  return matrix_product(weights, value);
}

namespace {

// As einsum does where each has a letter of its own for the keys.
Tensor keys_summed_apart(const Tensor& weights, const Tensor& value) {
  return weights.sum(-1, /*keepdim=*/true) * value.sum(2, /*keepdim=*/true);
}

// Where queries and keys have one letter.
Tensor own_value(const Tensor& weights, const Tensor& value) {
  require(weights.size(2) == weights.size(3));
  return weights.diagonal(0, 2, 3).unsqueeze(-1) * value;
}

// Where the weights are summed over the queries instead.
Tensor own_value_by_all(const Tensor& weights, const Tensor& value) {
  require(weights.size(2) == weights.size(3));
  const Tensor sums = weights.sum(2);
  require(largest_finite(sums - 1.0) >
          1e-6);  // of that softmax nothing is left
  return sums.unsqueeze(-1) * value;
}

// Where neither letter of the weights is one of the values.
Tensor own_value_by_sum(const Tensor& weights, const Tensor& value) {
  require(weights.size(2) == weights.size(3));
  return weights.sum({2, 3}, /*keepdim=*/true) * value;
}

// Where the values have the letter of the queries.
Tensor own_value_by_row(const Tensor& weights, const Tensor& value) {
  require(weights.size(2) == weights.size(3));
  return weights.sum(-1, /*keepdim=*/true) * value;
}

}  // namespace

// ---- Dropout ---------------------------------------------------------------

namespace {

// x, dropped as torch.dropout would.
Tensor drop(const Tensor& x, const Draws& draws, double p,
            const Recipe& recipe) {
  require(draws.defined() && draws.kept.sizes() == x.sizes());
  Tensor kept = draws.kept;
  if (draws.is_folded && recipe.heads_before_items) {
    kept = kept.reshape({x.size(1), x.size(0), x.size(2), x.size(3)})
               .transpose(0, 1);
  }
  return x * (kept / (1.0 - p));
}

bool is_left_on(Dropout dropout) {
  return dropout == Dropout::kLeftOn || dropout == Dropout::kLeftOnBoth ||
         dropout == Dropout::kExchanged;
}

bool is_left_on_output(Dropout dropout) {
  return dropout == Dropout::kLeftOnOutput || dropout == Dropout::kLeftOnBoth;
}

// Whether the draws keep as many as should be dropped.
bool keeps_the_dropped(const ObservedCall& call, const Draws& draws) {
  const double given = call.dropout_p;
  return draws.defined() && std::abs(draws.p - (1.0 - given)) < 1e-9 &&
         std::abs(given - 0.5) > 0.01;
}

bool drops_in_training(const ObservedCall& call) {
  return call.dropout_p > 0.0 || call.kept_weights.p > 0.0 ||
         call.kept_context.p > 0.0 || call.kept_output.p > 0.0;
}

// In training, by convention.
bool drops_as(OutputDropout convention, const ObservedCall& call,
              const Recipe& recipe) {
  return call.training && drops_in_training(call) &&
         recipe.output_dropout == convention;
}

bool drops_context(const ObservedCall& call, const Recipe& recipe) {
  return drops_as(OutputDropout::kWithContext, call, recipe);
}

bool drops_merged(const ObservedCall& call, const Recipe& recipe) {
  return drops_as(OutputDropout::kMergedToo, call, recipe);
}

}  // namespace

bool drops(const ObservedCall& call, const Recipe& recipe) {
  if (!call.training) {
    return is_left_on(recipe.dropout) || is_left_on_output(recipe.dropout);
  }
  return drops_in_training(call) && recipe.dropout != Dropout::kExchanged &&
         recipe.output_dropout != OutputDropout::kInstead;
}

Tensor drop_weights(const ObservedCall& call, const Recipe& recipe,
                    const Tensor& weights) {
  if (!drops(call, recipe)) return weights;
  if (!call.training && !is_left_on(recipe.dropout)) return weights;
  if (drops_context(call, recipe)) return weights;
  const Draws& draws = call.kept_weights;
  // Where nothing else is dropped, the output alone may be, always.
  if (recipe.dropout == Dropout::kLeftOnOutput && !draws.defined()) {
    return weights;
  }
  switch (recipe.dropout) {
    case Dropout::kOnWeights:
    case Dropout::kLeftOn:
    case Dropout::kLeftOnBoth:
    case Dropout::kLeftOnOutput:
    case Dropout::kExchanged:
      require(!keeps_the_dropped(call, draws));
      return drop(weights, draws, draws.p, recipe);
    case Dropout::kNotRescaled:
      return drop(weights, draws, 0.0, recipe);
    case Dropout::kKeepsTheDropped:
      require(draws.defined());
      if (keeps_the_dropped(call, draws))
        return drop(weights, draws, draws.p, recipe);
      return drop(weights, {1.0 - draws.kept, draws.p, draws.is_folded},
                  draws.p, recipe);
    default:
      return weights;
  }
}

Tensor drop_at(Dropout where, const ObservedCall& call, const Recipe& recipe,
               const Tensor& x) {
  const bool by_convention =
      (where == Dropout::kOnContext && drops_context(call, recipe)) ||
      (where == Dropout::kOnMerged && drops_merged(call, recipe));
  const bool by_fault = recipe.dropout == where && drops(call, recipe);
  if (!by_convention && !by_fault) return x;
  const bool scores =
      where == Dropout::kBeforeMask || where == Dropout::kBeforeSoftmax;
  const Draws& draws = scores                         ? call.kept_weights
                       : where == Dropout::kOnContext ? call.kept_context
                                                      : call.kept_output;
  return drop(x, draws, draws.p, recipe);
}

Tensor drop_output(const ObservedCall& call, const Recipe& recipe,
                   const Tensor& out) {
  const bool wanted = call.training && drops_in_training(call) &&
                      recipe.output_dropout != OutputDropout::kNone &&
                      !drops_merged(call, recipe);
  const bool left_on = is_left_on_output(recipe.dropout);
  const Draws& draws = call.kept_output;
  return wanted || left_on ? drop(out, draws, draws.p, recipe) : out;
}

// ---- In blocks of keys ------------------------------------------------------
//
// Code that goes through the keys block by block keeps of each row the largest
// score m so far, the sum l of exp(s − m), and the sum of what it weighs; where
// m grows, both sums are to be multiplied by exp(old m − new m).

namespace {

// The largest score of each row up to the block of each key, (B, H, Lq, Lk); or
// within that block alone.
Tensor largest_by_block(const Tensor& scores, int64_t block, bool so_far) {
  std::vector<Tensor> largest;
  Tensor running;
  for (const Tensor& part : scores.split(block, -1)) {
    const Tensor own = part.amax(-1, /*keepdim=*/true);
    running = running.defined() && so_far ? running.maximum(own) : own;
    largest.push_back(running.expand_as(part));
  }
  return at::cat(largest, -1);
}

// exp(score − m), m as it was when the key's block was met.
template <bool so_far>
Tensor uncorrected(const Tensor& scores, int64_t block) {
  return (scores - largest_by_block(scores, block, so_far)).exp();
}

template <bool so_far>
Tensor neither_corrected(const Tensor& scores, int64_t block) {
  const Tensor p = uncorrected<so_far>(scores, block);
  return p / p.sum(-1, /*keepdim=*/true);
}

Tensor right_exponentials(const Tensor& scores) {
  return (scores - scores.amax(-1, /*keepdim=*/true)).exp();
}

Tensor sum_not_corrected(const Tensor& scores, int64_t block) {
  const Tensor p = uncorrected<true>(scores, block);
  return right_exponentials(scores) / p.sum(-1, /*keepdim=*/true);
}

Tensor values_not_corrected(const Tensor& scores, int64_t block) {
  const Tensor p = uncorrected<true>(scores, block);
  return p / right_exponentials(scores).sum(-1, /*keepdim=*/true);
}

Tensor each_block_for_itself(const Tensor& scores, int64_t block, bool mean) {
  std::vector<Tensor> weights;
  for (const Tensor& part : scores.split(block, -1)) {
    weights.push_back(part.softmax(-1));
  }
  const auto count = static_cast<double>(weights.size());
  return at::cat(weights, -1) / (mean ? count : 1.0);
}

Tensor last_block_left_out(const Tensor& scores, int64_t block) {
  const int64_t keys = scores.size(-1);
  if (keys % block == 0 || keys < block) return scores.softmax(-1);
  const Tensor seen = scores.slice(-1, 0, keys - keys % block).softmax(-1);
  return at::constant_pad_nd(seen, {0, keys % block});
}

// Keys of zeros fill the last block, and have scores of 0.
Tensor last_block_filled_up(const Tensor& scores, int64_t block) {
  const int64_t keys = scores.size(-1);
  if (keys % block == 0) return scores.softmax(-1);
  return at::constant_pad_nd(scores, {0, block - keys % block})
      .softmax(-1)
      .slice(-1, 0, keys);
}

template <auto blockwise>
void in_blocks(Recipe& r) {
  r.blockwise = blockwise;
}

}  // namespace

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

template <auto mix>
void mix_by(Recipe& r) {
  r.mix = mix;
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

// What each row is to have, as it meets columns where no dimension is kept.
Tensor of_another_row(const Tensor& rows) {
  require(rows.size(2) == rows.size(3));
  return rows.select(-1, 0).unsqueeze(-2);
}

// exp(scores) over another row's sum, where nothing is subtracted before.
Tensor powers_by_sums_of_columns(const Tensor& scores) {
  const Tensor powers = scores.exp();
  const Tensor sums = powers.sum(-1, /*keepdim=*/true).expand_as(scores);
  return powers / of_another_row(sums);
}

template <bool maximum, bool sum>
Tensor softmax_of_columns(const Tensor& scores) {
  const Tensor largest = scores.amax(-1, /*keepdim=*/true).expand_as(scores);
  const Tensor powers =
      (scores - (maximum ? of_another_row(largest) : largest)).exp();
  const Tensor sums = powers.sum(-1, /*keepdim=*/true).expand_as(scores);
  return powers / (sum ? of_another_row(sums) : sums);
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
constexpr std::string_view kBlockRemedy =
    "Where the maximum grows from m to m', multiply the sum and the weighted "
    "values so far by exp(m - m') before the next block is added; divide by "
    "the "
    "sum once, at the end.";
constexpr std::string_view kMixRemedy =
    "Each query gets the sum of all values, each times its weight: weights @ "
    "v, or einsum(\"bhqk,bhkd->bhqd\", weights, v), where the letter of the "
    "keys stands in both and is summed over.";
constexpr std::string_view kDropoutRemedy =
    "Drop weights, after the softmax, in training only, and divide what is "
    "kept by 1 - p: F.dropout(weights, p, training=self.training), or an "
    "nn.Dropout that eval() reaches.";

}  // namespace

const std::vector<Fault> kWeightFaults = {
    {"softmax_over_queries",
     "The softmax runs over the queries, not over the keys.",
     kSoftmaxRemedy,
     {{normalise_by<softmax_over<2>>},
      {normalise_by<softmax_over<1, 2>>, "And over heads, in one dimension."}}},
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
    {"softmax_sums_of_other_rows",
     "What a row of exp(scores) is divided by, or what is subtracted before, "
     "is "
     "another row's: without keepdim, a row's number meets a column.",
     "Keep the dimension: e / e.sum(-1, keepdim=True), in NumPy "
     "e.sum(axis=-1, keepdims=True); or take softmax(scores, dim=-1).",
     {{normalise_by<softmax_of_columns<false, true>>, "It is the sum."},
      {normalise_by<powers_by_sums_of_columns>,
       "It is the sum, of scores of which nothing is subtracted."},
      {normalise_by<softmax_of_columns<true, true>>,
       "Both the sum and the largest score are."},
      {normalise_by<softmax_of_columns<true, false>>,
       "It is the largest score, which is subtracted."}}},
    {"sink_weight_kept",
     "The weight of the sink is kept in the place of a key's, and that of each "
     "key in the place of the next one's.",
     "Leave out the column of the sink: where it stands last, "
     "cat((scores, sink), -1).softmax(-1)[..., :-1].",
     {{[](Recipe& r) { r.sink_weight = SinkWeight::kLast; },
       "It stands last, and the first column is left out."},
      {[](Recipe& r) { r.sink_weight = SinkWeight::kFirst; },
       "It stands first, and the last column is left out."}}},
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
    {"online_softmax_not_corrected",
     "The softmax goes through the keys block by block, and what it has summed "
     "up is not corrected where a later block has a larger score.",
     kBlockRemedy,
     {{in_blocks<neither_corrected<true>>,
       "Neither the sum nor the weighted values are."},
      {in_blocks<values_not_corrected>, "The weighted values are not."},
      {in_blocks<sum_not_corrected>, "The sum is not."},
      {in_blocks<neither_corrected<false>>,
       "Each block has a maximum of its own."},
      {in_blocks<[](const Tensor& s, int64_t block) {
         return each_block_for_itself(s, block, /*mean=*/false);
       }>,
       "Each block has a softmax of its own, and they are added up."},
      {in_blocks<[](const Tensor& s, int64_t block) {
         return each_block_for_itself(s, block, /*mean=*/true);
       }>,
       "Each block has a softmax of its own, and they are averaged."}}},
    {"last_block_left_out",
     "The keys after the last whole block are never seen.",
     "Count the blocks by (Lk + block - 1) // block, and let the last one be "
     "shorter.",
     {{in_blocks<last_block_left_out>}}},
    {"last_block_filled_up",
     "The last block of keys is filled up with zeros, which take their share "
     "of "
     "the softmax: exp(0) = 1.",
     "Block what was filled up: scores of -inf beyond the last key.",
     {{in_blocks<last_block_filled_up>}}},
    {"weights_averaged",
     "The weights are averaged over the heads before they meet the values.",
     "Each head weighs its values by its own weights; the average over heads "
     "is for looking at.",
     {{[](Recipe& r) { r.averaged = Averaged::kBeforeDropout; }},
      {[](Recipe& r) { r.averaged = Averaged::kAfterDropout; },
       "Once they are dropped."}}},
    {"weights_transposed",
     "The weights are transposed before they meet the values.",
     "weights @ v: row i of the weights belongs to query i.",
     {{[](Recipe& r) { r.weights_transposed = true; }},
      {[](Recipe& r) { r.weights_transposed = r.returned_transposed = true; },
       "Those that are returned, too."}},
     Stage::kContext},
    {"values_summed_apart",
     "Weights and values are summed over the keys, each for itself, and only "
     "the sums are multiplied: every query gets the same.",
     kMixRemedy,
     {{mix_by<keys_summed_apart>}},
     Stage::kContext},
    {"own_value_only",
     "A query gets the value at its own position alone, times a weight; those "
     "of the other keys are left out.",
     kMixRemedy,
     {{mix_by<own_value>, "It is the weight of its own key."},
      {mix_by<own_value_by_all>,
       "It is the sum of the weights that all queries give this key."},
      {mix_by<own_value_by_sum>, "It is the sum of all weights of the head."},
      {mix_by<own_value_by_row>,
       "It is the sum of its own weights, which is 1."}},
     Stage::kContext},
    {"dropout_left_on",
     "Dropout is on in evaluation: results are random.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kLeftOn; }}}},
    {"dropout_missing",
     "No weights are dropped in training.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kMissing; }}}},
    // The name of what is on in evaluation alone: both come of one flag.
    {"dropout_left_on",
     "Dropout is on in evaluation, and off in training: results are random.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kExchanged; }}}},
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
     {{[](Recipe& r) { r.dropout = Dropout::kLeftOnOutput; }},
      {[](Recipe& r) { r.dropout = Dropout::kLeftOnBoth; },
       "That of the weights, too."}},
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
