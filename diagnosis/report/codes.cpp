// SPDX-License-Identifier: MIT
#include "diagnosis/report/codes.h"

#include <algorithm>
#include <iterator>
#include <vector>

namespace multihead::diagnosis {
namespace {

// ---- What several faults do ------------------------------------------------

constexpr std::string_view kTransposed =
    "Square matrices hide it: shapes fit, and training from nothing works. "
    "Weights that come from PyTorch or go there give other results.";
constexpr std::string_view kMatrices =
    "Trained like that, nothing is lost; but state dicts lie about which "
    "matrix is which, and weights of others give other results.";
constexpr std::string_view kShared =
    "Two roles share one matrix, so the layer can express less; the other "
    "matrix is a parameter without effect that learns nothing.";
constexpr std::string_view kInputs =
    "In self-attention nothing is wrong. In cross-attention the other sequence "
    "is not read, or not where it should be: a decoder ignores its source.";
constexpr std::string_view kBiases =
    "Fresh layers often have zero biases, so that it shows only with trained "
    "weights: results are off by a constant.";
constexpr std::string_view kSplit =
    "Positions and features are mixed: a position reads parts of others as if "
    "they were its own, causal masks leak, and batch or length change results. "
    "Loss falls all the same, to a worse value.";
constexpr std::string_view kGroups =
    "Query heads read the wrong keys and values. It trains; weights of "
    "published grouped-query models give nonsense.";
constexpr std::string_view kRoles =
    "The layer is another function than attention: one of its projections has "
    "no effect, and learns nothing.";
constexpr std::string_view kTooLarge =
    "Scores grow with the head width, the softmax becomes one-hot, and its "
    "gradient vanishes: training is slow or diverges, more so for wide heads. "
    "Weights trained with the right scale give other results.";
constexpr std::string_view kTooSmall =
    "Scores are too small, the softmax is nearly uniform, and every query "
    "averages everything: training is slower and worse. Weights trained with "
    "the right scale give other results.";
constexpr std::string_view kOtherScale =
    "The sharpness of attention depends on the wrong size. At some sizes it is "
    "right by chance, so that tests pass; weights trained with the right scale "
    "give other results.";
constexpr std::string_view kLeak =
    "What is hidden is seen: padding changes results, and a model that "
    "predicts the next word sees it in training and not when it is used.";
constexpr std::string_view kWrongItem =
    "The wrong keys are hidden, and often no shape complains. With one item in "
    "the batch, as when trying it out, all is right.";
constexpr std::string_view kFuture =
    "A model that predicts the next word sees it: training loss is excellent, "
    "and generation is nonsense.";
constexpr std::string_view kAxis =
    "A query's weights do not sum to 1, and depend on other queries, heads or "
    "texts of the batch: results change with what else is computed, and causal "
    "masks leak.";
constexpr std::string_view kNoWeights =
    "The result is no average of values: its size grows with the number of "
    "keys or with the scores, and training is unstable.";
constexpr std::string_view kNarrow =
    "Results have two or three digits. Long sums and small differences between "
    "scores are lost, also where the caller uses float32.";
constexpr std::string_view kBlocks =
    "With as few keys as one block has, all is right, so that tests of a few "
    "positions pass; longer texts get wrong weights, without an error.";
constexpr std::string_view kReturned =
    "The output is right. Who draws, prunes or distils by the weights that are "
    "returned is misled.";

// ---- The table -------------------------------------------------------------
//
// A code is for ever: it stands in people's configurations. What is new gets
// the next number of its hundred; what goes leaves its number unused.

constexpr FaultCode kCodes[] = {
    // Projections.
    {"MH101", "query_weight_transposed", kTransposed},
    {"MH102", "key_weight_transposed", kTransposed},
    {"MH103", "value_weight_transposed", kTransposed},
    {"MH104", "all_weights_transposed", kTransposed},
    {"MH105", "query_key_swapped", kMatrices},
    {"MH106", "query_value_swapped", kMatrices},
    {"MH107", "key_value_swapped", kMatrices},
    {"MH108", "projections_rotated", kMatrices},
    {"MH109", "one_projection_for_all", kShared},
    {"MH110", "query_weight_for_keys", kShared},
    {"MH111", "key_weight_for_values", kShared},
    {"MH112", "query_weight_for_values", kShared},
    {"MH113", "key_weight_for_queries", kShared},
    {"MH114", "value_weight_for_keys", kShared},
    {"MH115", "value_weight_for_queries", kShared},
    {"MH116", "value_from_key", kInputs},
    {"MH117", "key_from_value", kInputs},
    {"MH118", "key_from_query", kInputs},
    {"MH119", "value_from_query", kInputs},
    {"MH120", "query_from_key", kInputs},
    {"MH121", "inputs_swapped", kInputs},
    {"MH122", "biases_forgotten", kBiases},
    {"MH123", "input_biases_forgotten", kBiases},
    {"MH124", "query_bias_forgotten", kBiases},
    {"MH125", "value_bias_forgotten", kBiases},
    {"MH126", "input_projection_forgotten",
     "Heads are then fixed slices of the input: the layer cannot learn what to "
     "compare, and has parameters that get no gradient."},
    {"MH127", "batch_and_sequence_exchanged",
     "Texts of one batch are mixed with each other, and no text with itself: "
     "the loss still falls a little, and the result depends on what else is in "
     "the batch."},
    // Heads.
    {"MH201", "heads_not_transposed", kSplit},
    {"MH202", "heads_not_split",
     "The layer has one head, whatever `num_heads` says: less can be "
     "expressed, and weights trained with heads give other results."},
    {"MH203", "heads_interleaved",
     "A layer that is trained like that learns as well; weights from or for "
     "any other implementation give other results without an error."},
    {"MH204", "groups_tiled", kGroups},
    {"MH205", "groups_truncated",
     "Keys and values of the other groups are computed and never read: they "
     "cost time, and learn nothing."},
    {"MH206", "groups_clamped", kGroups},
    {"MH207", "group_size_wrong", kGroups},
    {"MH208", "values_are_keys", kRoles},
    {"MH209", "values_are_queries", kRoles},
    {"MH210", "keys_are_values", kRoles},
    {"MH211", "keys_are_queries", kRoles},
    {"MH212", "queries_are_keys", kRoles},
    {"MH213", "keys_reshaped",
     "The scores compare features of one position with features of others: "
     "numbers of the right shape that mean nothing. Training hides it, badly."},
    {"MH214", "queries_and_keys_exchanged",
     "Weights are those with which keys look at queries. In self-attention no "
     "shape complains, and a causal mask lets the wrong half through."},
    {"MH215", "keys_and_values_exchanged", kRoles},
    {"MH216", "merge_not_transposed", kSplit},
    {"MH217", "merge_interleaved",
     "A layer that is trained like that learns as well; weights from or for "
     "any other implementation give other results without an error."},
    {"MH218", "heads_averaged_together",
     "What distinguishes the heads is averaged away before the output "
     "projection could use it."},
    {"MH219", "fused_view_without_permute", kSplit},
    {"MH220", "merge_of_batch_and_heads",
     "Items of one batch get parts of each other: results depend on what else "
     "is in the batch, and with one item all is right."},
    {"MH221", "head_left_out",
     "One head is computed for nothing, and its parameters learn nothing."},
    {"MH222", "one_head_for_all",
     "Several heads cost what several heads cost, and one of them does all the "
     "work; the parameters of the others learn nothing."},
    // Scale of the scores.
    {"MH223", "rotary_misapplied",
     "Scores depend on where a pair stands, not only on its distance, or "
     "values on where they stand: what was learned in one place is not known "
     "in another."},
    {"MH224", "queries_are_values", kRoles},
    {"MH301", "scale_missing", kTooLarge},
    {"MH302", "scale_not_root", kTooSmall},
    {"MH303", "scale_by_embed_dim", kTooSmall},
    {"MH304", "scale_by_all_heads", kTooSmall},
    {"MH305", "scale_by_value_width", kOtherScale},
    {"MH306", "scale_by_embed_dim_not_root", kTooSmall},
    {"MH307", "scale_applied_twice", kTooSmall},
    {"MH308", "scale_by_length",
     "The sharpness of attention depends on how long the text is, or how far "
     "it was padded: what was learned at one length is wrong at another."},
    {"MH309", "scale_by_heads", kOtherScale},
    {"MH310", "scale_by_group_count", kOtherScale},
    {"MH311", "scale_wrong_power", kOtherScale},
    {"MH312", "scale_multiplied", kTooLarge},
    {"MH313", "scale_after_softmax",
     "Scores are as large as without a scale, so the softmax is nearly one- "
     "hot; and the weights no longer sum to 1, so the output is too small."},
    {"MH314", "scale_of_another_number",
     "It fits one size. With another number of heads or another width the "
     "scores are too large or too small, and no error tells."},
    {"MH315", "scores_summed_apart",
     "A score no longer tells whether a query and a key are alike: all queries "
     "see the keys in one order, or in its reverse."},
    {"MH316", "scores_floored",
     "Queries and keys get no gradient and never learn; weights move in steps "
     "of a factor e."},
    // Masks.
    {"MH401", "mask_ignored", kLeak},
    {"MH402", "mask_inverted",
     "Attention sees exactly what it must not see and nothing of what it may: "
     "padding, or the future that it is to predict. Training loss can look "
     "excellent for that reason."},
    {"MH403", "mask_added", kLeak},
    {"MH404", "mask_multiplied", kLeak},
    {"MH405", "mask_after_softmax",
     "The weights of a masked row sum to less than 1, so the output shrinks "
     "with the share of padding, and what is hidden still decides by how "
     "much."},
    {"MH406", "mask_sentinel_leaks",
     "Hidden keys keep a little weight. It is small in most rows and large "
     "where all other scores are low, so results depend on padding now and "
     "then."},
    {"MH407", "mask_transposed",
     "Keys are hidden from the wrong queries. With a causal mask each query "
     "sees the future instead of the past."},
    {"MH408", "mask_batch_as_heads", kWrongItem},
    {"MH409", "mask_batch_as_queries", kWrongItem},
    {"MH410", "mask_head_order", kWrongItem},
    {"MH411", "mask_of_first_item", kWrongItem},
    {"MH412", "mask_of_first_head",
     "Masks that differ by head, such as windows or biases, have no effect but "
     "the first."},
    {"MH413", "padding_ignored",
     "Padding gets weight: results depend on how far a text was padded, and so "
     "on the other texts of its batch."},
    {"MH414", "padding_inverted",
     "Only padding is attended to. As it is the same everywhere, every output "
     "is nearly the same."},
    {"MH415", "padding_on_queries",
     "Rows of padded queries become NaN or uniform, and real queries still "
     "attend to padding."},
    {"MH416", "causal_ignored", kFuture},
    {"MH417", "causal_inverted", kFuture},
    {"MH418", "causal_bottom_right",
     "With as many keys as queries there is no difference. With more keys, "
     "each query sees further than PyTorch's `is_causal` lets it."},
    {"MH419", "causal_misses_diagonal",
     "No position sees itself, and the first sees nothing: its row is NaN, or "
     "an average of everything."},
    {"MH420", "causal_one_too_far", kFuture},
    {"MH421", "causal_without_effect", kFuture},
    {"MH422", "window_ignored",
     "Cost and memory are those of full attention, and weights trained with a "
     "window see what they have never seen."},
    {"MH423", "window_on_wrong_side", kFuture},
    {"MH424", "window_off_by_one",
     "Short texts hide it. Weights trained with the right window, and caches "
     "that keep so many keys, give other results."},
    {"MH425", "mask_taken_for_causal",
     "Padding is attended to, and tokens that may be seen are hidden. With a "
     "causal mask all is right, which hides it."},
    {"MH426", "causal_top_left",
     "With a cache, a new token sees the oldest keys and not the latest: what "
     "is generated goes wrong from the first step on. Without a cache all is "
     "right."},
    {"MH427", "causal_first_key_only",
     "All positions get the same, the value of the first: nothing that comes "
     "later has any effect."},
    {"MH428", "masks_joined_loosely",
     "A mask hides only what another hides, too: queries read padding, and "
     "later tokens."},
    {"MH429", "padding_off_by_one",
     "Each item sees one key of its padding, or not its last token: results "
     "depend on what padding holds."},
    // Weights.
    {"MH501", "softmax_over_queries", kAxis},
    {"MH502", "softmax_over_heads", kAxis},
    {"MH503", "softmax_over_batch", kAxis},
    {"MH504", "softmax_over_all", kAxis},
    {"MH505", "softmax_over_heads_and_keys", kAxis},
    {"MH506", "softmax_missing", kNoWeights},
    {"MH507", "softmax_not_normalised", kNoWeights},
    {"MH508", "softmax_twice",
     "Weights lie between 1/L and e/L: the layer averages nearly everything, "
     "whatever the scores say, and its gradient almost vanishes. Hidden keys "
     "get weight again."},
    {"MH509", "log_softmax",
     "Weights are negative and far from a sum of 1: the output is a weighted "
     "sum with the wrong sign, large where attention is to be small."},
    {"MH510", "sigmoid_instead_of_softmax", kNoWeights},
    {"MH511", "scores_normalised_without_exp",
     "The sum of the scores may be near 0 or negative: weights explode, change "
     "their sign, and training diverges."},
    {"MH512", "weights_averaged",
     "All heads attend alike: several heads cost what several heads cost, and "
     "do what one does."},
    {"MH513", "weights_transposed",
     "A query's result is made with the weights of others. In self-attention "
     "no shape complains."},
    {"MH514", "dropout_left_on",
     "The same input gives another result each time, in evaluation and in "
     "production; scores are lower than they could be."},
    {"MH515", "dropout_missing",
     "The layer is trained without the regularisation that was asked for, and "
     "overfits more."},
    {"MH516", "dropout_before_softmax",
     "A score of 0 is not a weight of 0: dropped keys are as visible as "
     "others, or more so. Masks of -inf may become NaN."},
    {"MH517", "dropout_not_rescaled",
     "Outputs are smaller in training than in evaluation by the factor 1 - p: "
     "later layers meet other numbers than they were trained on."},
    {"MH518", "dropout_on_context",
     "It regularises something else than attention: results of heads, not "
     "which keys are read. Compare with published numbers with care."},
    {"MH519", "dropout_keeps_what_it_should_drop",
     "With p = 0.1, 90 % of the weights are dropped in training: the layer "
     "learns almost nothing."},
    {"MH520", "computed_in_bfloat16", kNarrow},
    {"MH521", "computed_in_float16", kNarrow},
    {"MH522", "online_softmax_not_corrected", kBlocks},
    {"MH523", "last_block_left_out", kBlocks},
    {"MH524", "last_block_filled_up", kBlocks},
    {"MH525", "values_summed_apart",
     "No query chooses between values: all positions come out alike, whatever "
     "the scores are, and queries and keys learn nothing."},
    {"MH526", "own_value_only",
     "No position reads another: the layer mixes nothing, and what looks like "
     "attention is a gate of each position's own value."},
    {"MH527", "softmax_sums_of_other_rows",
     "A query's weights change with other queries, later ones, too, which "
     "causal masks are to hide. With several heads or items mostly a shape "
     "complains."},
    {"MH528", "sink_weight_kept",
     "Each value gets the weight of its neighbour, and one value gets that of "
     "the sink."},
    // Output.
    {"MH601", "output_weight_transposed", kTransposed},
    {"MH602", "output_bias_forgotten", kBiases},
    {"MH603", "output_forgotten",
     "Heads are not mixed with each other; and if the matrix exists, it is a "
     "parameter without effect that no optimiser moves."},
    {"MH604", "output_per_head",
     "Heads cannot be mixed: each position's heads are projected by "
     "themselves, and most of what W_o learns is not used."},
    {"MH605", "output_projection_twice",
     "The same matrix is applied to its own result: training has to find its "
     "square root, and weights of others give other results."},
    {"MH606", "input_added",
     "The output follows an input that no residual connection is for: it is "
     "no mean of the values any more, and weights of others give other "
     "results."},
    {"MH607", "returned_weights_summed", kReturned},
    {"MH608", "returned_weights_of_one_head", kReturned},
    {"MH609", "returned_weights_before_softmax", kReturned},
    {"MH610", "returned_weights_unmasked", kReturned},
    {"MH611", "gradient_detached",
     "Parts of the layer never learn. The loss falls nevertheless, because the "
     "rest of the model learns around it."},
    {"MH612", "weights_without_gradient",
     "A matrix stays as it was drawn. The loss falls nevertheless, because the "
     "rest of the model learns around it."},
    {"MH613", "output_diagonal",
     "The output mixes neither features nor heads, and of what W_o holds most "
     "is never used."},
};

}  // namespace

std::span<const FaultCode> all_codes() {
  static const std::vector<FaultCode> all = [] {
    std::vector<FaultCode> both(std::begin(kCodes), std::end(kCodes));
    const auto others = codes_of_programs();
    both.insert(both.end(), others.begin(), others.end());
    return both;
  }();
  return all;
}

std::string_view code_of(std::string_view name) {
  const auto all = all_codes();
  const auto found = std::ranges::find(all, name, &FaultCode::name);
  return found == all.end() ? std::string_view() : found->code;
}

}  // namespace multihead::diagnosis
