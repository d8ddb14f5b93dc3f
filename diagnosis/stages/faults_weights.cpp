// SPDX-License-Identifier: MIT
//
// Faults of the weights, of what becomes of them, and of what is returned.
#include "diagnosis/stages/faults_by_stage.h"

namespace multihead::diagnosis {
namespace {

constexpr std::string_view kDropoutRemedy =
    "Drop weights, after the softmax, in training only, and divide what is "
    "kept "
    "by 1 - p: F.dropout(weights, p, training=self.training), or an nn.Dropout "
    "that eval() reaches.";

template <NarrowType type>
std::vector<Way> narrow_ways() {
  return {{[](Recipe& r) {
             r.narrow = Narrow::kOutput;
             r.narrow_type = type;
           },
           "It is the output."},
          {[](Recipe& r) {
             r.narrow = Narrow::kSoftmax;
             r.narrow_type = type;
           },
           "It is the softmax and what enters it."},
          {[](Recipe& r) {
             r.narrow = Narrow::kEverywhere;
             r.narrow_type = type;
           },
           "It is every step."}};
}

}  // namespace

namespace {

constexpr Stage kWeightsStage = Stage::kWeights;
constexpr std::string_view kWeightsRemedy =
    "Softmax over the keys, the last dimension of (B, H, Lq, Lk): each "
    "query's weights sum to 1. softmax(scores, dim=-1).";
const std::vector<Fault> kWeights = {
    {"softmax_over_queries",
     kWeightsStage,
     "The softmax runs over the queries, not over the keys.",
     kWeightsRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kOverQueries; }}}},
    {"softmax_over_heads",
     kWeightsStage,
     "The softmax runs over the heads, not over the keys.",
     kWeightsRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kOverHeads; }}}},
    {"softmax_over_batch",
     kWeightsStage,
     "The softmax runs over the batch, not over the keys.",
     kWeightsRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kOverBatch; }},
      {[](Recipe& r) { r.normalise = Normalise::kOverBatchAndHeads; },
       "Batch and heads are one dimension, B·H."}}},
    {"softmax_over_all",
     kWeightsStage,
     "The softmax runs over queries and keys together.",
     kWeightsRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kOverQueriesAndKeys; }},
      {[](Recipe& r) { r.normalise = Normalise::kOverAll; },
       "And over heads and batch items: one sum for all."},
      {[](Recipe& r) { r.normalise = Normalise::kOverItem; },
       "And over heads: one sum for each batch item."}}},
    {"softmax_over_heads_and_keys",
     kWeightsStage,
     "The softmax runs over the keys of all heads together.",
     kWeightsRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kOverHeadsAndKeys; }}}},
    {"softmax_missing",
     kWeightsStage,
     "There is no softmax.",
     kWeightsRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kNothing; }},
      {[](Recipe& r) {
         r.normalise = Normalise::kNothing;
         r.sentinel = 0.0;
       },
       "Blocked scores are 0."}}},
    {"softmax_not_normalised",
     kWeightsStage,
     "exp(scores) is not divided by its sum.",
     kWeightsRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kExpOnly; }},
      {[](Recipe& r) { r.normalise = Normalise::kShiftedExpOnly; },
       "The largest score is subtracted, as it should be."}}},
    {"softmax_twice",
     kWeightsStage,
     "The softmax is applied twice.",
     kWeightsRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kTwice; }}}},
    {"log_softmax",
     kWeightsStage,
     "log_softmax is used for softmax.",
     kWeightsRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kLog; }}}},
    {"sigmoid_instead_of_softmax",
     kWeightsStage,
     "A sigmoid is used for the softmax.",
     kWeightsRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kSigmoid; }}}},
    {"scores_normalised_without_exp",
     kWeightsStage,
     "The scores are divided by their sum without exp.",
     kWeightsRemedy,
     {{[](Recipe& r) { r.normalise = Normalise::kSumOnly; }},
      {[](Recipe& r) {
         r.normalise = Normalise::kSumOnly;
         r.sentinel = 0.0;
       },
       "Blocked scores are 0."}}},
    {"dropout_left_on",
     kWeightsStage,
     "Dropout is on in evaluation: results are random.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kLeftOn; }},
      {[](Recipe& r) { r.dropout = Dropout::kExchanged; },
       "And it is off in training."}}},
    {"dropout_missing",
     kWeightsStage,
     "Nothing is dropped in training.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kMissing; }}}},
    {"dropout_before_softmax",
     kWeightsStage,
     "Scores are dropped, not weights: a dropped score is 0, which is a "
     "weight like any other.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kBeforeSoftmax; }},
      {[](Recipe& r) { r.dropout = Dropout::kBeforeMask; },
       "The mask comes after."}}},
    {"dropout_not_rescaled",
     kWeightsStage,
     "The weights that are kept are not divided by 1 - p: the output shrinks "
     "in training.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kNotRescaled; }}}},
    {"dropout_on_context",
     Stage::kContext,
     "The heads' results are dropped, the weights are not.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kOnContext; }},
      {[](Recipe& r) { r.dropout = Dropout::kOnMerged; },
       "They are merged before."}}},
    {"dropout_keeps_what_it_should_drop",
     kWeightsStage,
     "What should be dropped is kept: p is taken for the share to keep.",
     kDropoutRemedy,
     {{[](Recipe& r) { r.dropout = Dropout::kKeepsTheDropped; }}}},
    {"weights_averaged",
     kWeightsStage,
     "The weights are averaged over the heads before they meet the values.",
     "Each head weighs its values by its own weights; the average over heads "
     "is for looking at.",
     {{[](Recipe& r) { r.weights_averaged = true; }}}},
    {"weights_transposed",
     Stage::kContext,
     "The weights are transposed before they meet the values.",
     "weights @ v: row i of the weights belongs to query i.",
     {{[](Recipe& r) { r.weights_transposed = true; }}}},
    {"computed_in_bfloat16", kWeightsStage,
     "Numbers are rounded to bfloat16 on the way.",
     "Keep scores and weights in float32, also where inputs and outputs are "
     "bfloat16.",
     narrow_ways<NarrowType::kBFloat16>()},
    {"computed_in_float16", kWeightsStage,
     "Numbers are rounded to float16 on the way.",
     "Keep scores and weights in float32, also where inputs and outputs are "
     "float16.",
     narrow_ways<NarrowType::kHalf>()},
};

}  // namespace

std::span<const Fault> faults_of_weights() { return kWeights; }

namespace {

constexpr std::string_view kOutputMergeRemedy =
    "Exchange back before the heads are laid side by side: "
    "context.transpose(1, 2).reshape(B, Lq, H * d).";
const std::vector<Fault> kOutput = {
    {"merge_not_transposed",
     Stage::kMerge,
     "Heads are merged without exchanging heads and positions back.",
     kOutputMergeRemedy,
     {{[](Recipe& r) { r.merge = Merge::kNotTransposed; }}}},
    {"merge_interleaved",
     Stage::kMerge,
     "Heads are merged feature by feature: 0 of all heads, 1 of all heads, …",
     kOutputMergeRemedy,
     {{[](Recipe& r) { r.merge = Merge::kFeatureMajor; }}}},
    {"heads_averaged_together",
     Stage::kMerge,
     "The heads' results are averaged or summed, not laid side by side.",
     kOutputMergeRemedy,
     {{[](Recipe& r) { r.merge = Merge::kMean; }, "They are averaged."},
      {[](Recipe& r) { r.merge = Merge::kSum; }, "They are summed."}}},
    {"output_weight_transposed",
     Stage::kOutput,
     "The output matrix W_o is transposed.",
     "nn.Linear stores its weight as (out, in) and computes x @ weight.T.",
     {{[](Recipe& r) { r.transposed[3] = true; }}}},
    {"output_bias_forgotten",
     Stage::kOutput,
     "The bias of the output projection is not added.",
     "Add it after the matrix: x @ weight.T + bias.",
     {{[](Recipe& r) { r.without_bias[3] = true; }}}},
    {"output_forgotten",
     Stage::kOutput,
     "The output projection is missing.",
     "Multiply the merged heads by W_o: it is what lets the heads mix.",
     {{[](Recipe& r) { r.output = Output::kNone; }}}},
    {"output_per_head",
     Stage::kOutput,
     "The output projection is applied to each head by itself.",
     "W_o is (E, H·d) and takes all heads laid side by side.",
     {{[](Recipe& r) { r.output = Output::kPerHead; }}}},
    {"output_projection_twice",
     Stage::kOutput,
     "The output projection is applied twice.",
     "Apply W_o once.",
     {{[](Recipe& r) { r.output = Output::kTwice; }}}},
    // The name of what happens to the weights: the cause is one, the place not.
    {"dropout_left_on",
     Stage::kOutput,
     "Dropout of the output is on in evaluation: results are random.",
     "Drop in training only: `F.dropout(out, p, training=self.training)` or an "
     "`nn.Dropout` that eval() reaches.",
     {{[](Recipe& r) { r.dropout = Dropout::kLeftOnOutput; }}}},
    {"input_added",
     Stage::kOutput,
     "The query input is added to the output.",
     "The residual connection belongs to the block around attention.",
     {{[](Recipe& r) { r.input_added = true; }}}},
    {"returned_weights_summed",
     Stage::kReturnedWeights,
     "The weights returned are summed over the heads, not averaged.",
     "nn.MultiheadAttention returns their mean: weights.mean(dim=1).",
     {{[](Recipe& r) { r.returned = Returned::kSum; }}}},
    {"returned_weights_of_one_head",
     Stage::kReturnedWeights,
     "The weights returned are those of one head.",
     "Return all heads, or their mean.",
     {{[](Recipe& r) { r.returned = Returned::kFirstHead; },
       "It is the first head."},
      {[](Recipe& r) { r.returned = Returned::kLastHead; },
       "It is the last head."}}},
    {"returned_weights_before_softmax",
     Stage::kReturnedWeights,
     "What is returned as weights are scores, before the softmax.",
     "Return the softmax of the scores.",
     {{[](Recipe& r) { r.returned = Returned::kScores; }}}},
    {"returned_weights_unmasked",
     Stage::kReturnedWeights,
     "The weights returned are those without the mask.",
     "Return the weights that were used.",
     {{[](Recipe& r) { r.returned = Returned::kUnmasked; }}}},
    {"gradient_detached",
     Stage::kGradients,
     "The output is right, and no gradient passes through a part of it.",
     "Look for .detach(), .data, torch.no_grad(), .item() or a tensor made "
     "anew from values.",
     {{[](Recipe& r) { r.detached = Detached::kOutput; },
       "It is the whole output."},
      {[](Recipe& r) { r.detached = Detached::kWeights; },
       "It is the weights: queries and keys never learn."},
      {[](Recipe& r) { r.detached = Detached::kQuery; }, "It is the query."},
      {[](Recipe& r) { r.detached = Detached::kKey; }, "It is the key."},
      {[](Recipe& r) { r.detached = Detached::kValue; }, "It is the value."}}},
};

}  // namespace

std::span<const Fault> faults_of_output() { return kOutput; }

}  // namespace multihead::diagnosis
