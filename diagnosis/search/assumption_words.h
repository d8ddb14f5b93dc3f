// SPDX-License-Identifier: MIT
// What is said of assumptions that are no conventions: of facts that nothing in
// the code states, and of parts that are not judged.
#pragma once

#include <string_view>

namespace multihead::diagnosis {

// An assumption that is no convention. {} stands for what the facts say of it.
struct Assumption {
  std::string_view name, sentence, remedy = "";
  std::string_view condition = "";  ///< of one that decides: "right if ..."
};

// Their opposites are conventions.
inline constexpr Assumption kMaskBlocks = {
    "mask_blocks", "The mask is read as True (or 1) = blocked.",
    "If True is meant to be seen, say mask=\"keep\".",
    "True in the mask means blocked"};
inline constexpr Assumption kPaddingBlocks = {
    "padding_blocks", "The padding mask is read as True (or 1) = padding.",
    "If True is meant to mark real tokens, say mask=\"keep\".",
    "True in the padding mask means padding"};

inline constexpr std::string_view kNotAdded =
    "If it is True and False, say mask=\"blocked\" or \"keep\": added, they "
    "block nothing.";
inline constexpr Assumption kAddedByText = {
    "mask_additive",
    "The mask is read as added to the scores, as it says: \"{}\".", kNotAdded};
inline constexpr Assumption kAddedByName = {
    "mask_additive",
    "The mask is read as added to the scores, by its name, `{}`.", kNotAdded};
inline constexpr Assumption kAddedByGuess = {
    "mask_additive",
    "The mask is read as added to the scores, which leaves fewer faults.",
    kNotAdded, "the mask holds numbers to add, such as 0 and -inf"};

inline constexpr Assumption kSequenceFirst = {
    "sequence_first", "Inputs are (L, B, E), which nothing in the code states.",
    "If they are (B, L, E), this is batch and sequence exchanged: say "
    "`batch_first=True`.",
    "inputs are (L, B, E)"};
inline constexpr Assumption kBatchFirst = {
    "batch_first",
    "Inputs are (B, L, E): the (L, B, E) in its text is taken for a step "
    "inside.",
    "If inputs are (L, B, E), say `batch_first=False`."};
inline constexpr Assumption kHeads = {
    "num_heads", "It is taken to have {}, which nothing in the code states.",
    "If it has another number, say `num_heads=`."};
inline constexpr Assumption kSettings = {
    "settings",
    "{} of its configuration, of which nothing says what it is, is made up.",
    "Check an instance that is made with yours, or say how by `call=`."};
inline constexpr Assumption kNoOutput = {
    "no_output_projection",
    "There is no output projection; it is judged as attention without one.",
    "In multi-head attention one more matrix follows: `out = W_o(merged)`.",
    "it is meant to have no output projection"};
inline constexpr Assumption kLayersBeside = {
    "layers_beside",
    "Only what its heads do is judged, from the queries, keys and values that "
    "meet to what comes of them. Nothing is known of {}.",
    "Check the part that is attention by itself to have all of it judged.",
    "what comes before its heads and after them is right, which is not judged"};
inline constexpr Assumption kScoresGiven = {
    "scores_given",
    "Its scores are no plain products of queries and keys, as in additive "
    "attention: only what it does with them is judged, from masks and softmax "
    "to what comes of the values.",
    "Compare the scores with their equation.",
    "its scores, which are no plain products of queries and keys, are right"};
inline constexpr Assumption kElsewhere = {
    "attends_elsewhere",
    "Each head attends to {} things that are not positions of its input: "
    "perhaps channels, frames or pixels.",
    "Look whether these are meant to attend to each other.",
    "its heads are meant to attend to something else than the positions of its "
    "input"};
inline constexpr Assumption kLaterAttentions = {
    "later_attentions", "Only its first attention is judged, of {} in all.",
    "Check the layer that has the attention, which is judged for all of them.",
    "its later attentions are right, which are not judged"};
inline constexpr Assumption kIdleWeights = {
    "idle_weights", "Never used: {}.",
    "Use them for what their names say, or take them out.",
    "matrices of its own are meant not to be used"};
inline constexpr Assumption kHeadsOnly = {
    "heads_only",
    "Only what its heads do is judged, from the queries, keys and values that "
    "meet to what comes of them: nothing explains the rest.",
    "Repair this first, then check it again."};
inline constexpr Assumption kScaleArgument = {
    "scale_argument", "It is called with `{}`, which asks it to scale.",
    "Make it the default: attention scales by 1 / sqrt(d).",
    "every call asks it to scale"};
inline constexpr std::string_view kCausalByStep =
    "It takes one token at a time, so that no query sees a later key.";
inline constexpr std::string_view kCausalByText =
    "It is causal by itself, as its text says: \"{}\".";

// What it refuses, which is a remark on every verdict.
inline constexpr Assumption kEqualLengths = {
    "equal_lengths_only", "It refuses keys that are longer than the queries.",
    "Take the number of keys from the keys: `k.size(-2)`, not `q.size(-2)`.",
    "keys are always as many as queries"};
inline constexpr Assumption kKeysLeft = {
    "equal_lengths_only",
    "Where there are more keys than queries it is another thing: perhaps a "
    "loop "
    "over keys ends where the queries do.",
    kEqualLengths.remedy, kEqualLengths.condition};
inline constexpr Assumption kOneSequence = {
    "self_attention_only", "It refuses queries, keys and values that differ.",
    "Project each for itself: `W_q(query)`, `W_k(key)`, `W_v(value)`.",
    "query, key and value are always one tensor"};

inline constexpr Assumption kOneToken = {
    "one_token_on_cache",
    "On a cache it takes one token at a time: of several at once, some see "
    "others than the keys up to their own.",
    "Let each see the keys up to its own: torch.ones(Lq, Lk).tril(Lk - Lq).",
    "it is given one token at a time on its cache"};
inline constexpr Assumption kMasksAreCausal = {
    "masks_are_causal",
    "What its mask holds is ignored: any mask only makes it causal, and its "
    "file makes none but causal ones.",
    "To block what the mask blocks, hand it on: "
    "scaled_dot_product_attention(q, k, v, attn_mask=mask).",
    "every mask that it is given is causal"};
inline constexpr Assumption kBiasOfAnother = {
    "bias_of_another_query",
    "What is added to the scores of later keys, as a bias of relative "
    "positions, follows the next query, not the query's own.",
    "Shift 2 * L - 1 distances, or index a table by j - i, unless a mask hides "
    "all later keys.",
    "every call has a mask that hides later keys"};
inline constexpr Assumption kOneWindow = {
    "one_window",
    "Its images are one window each: of several in an image, some come out "
    "otherwise than alone.",
    "If windows are not meant to mix or to be shifted: put back each pixel "
    "where it was cut out.",
    "windows of an image are meant to come out otherwise than alone"};
inline constexpr Assumption kBeside = {
    "attentions_beside",
    "Its attentions stand beside each other: that of the context asks with the "
    "sequence as it came in, and not with what the first has made of it.",
    "In a layer of a decoder the second asks with the output of the first: "
    "cross_attention(x + self_attention(x), context).",
    "its attentions are meant to stand beside each other"};
inline constexpr Assumption kContextLeft = {
    "context_left",
    "It may be given a context, and has several attentions, none of which "
    "reads it: it does nothing with that argument.",
    "Hand it to the attention that is meant to read it, or leave the argument "
    "out.",
    "its context is meant not to be read"};
inline constexpr Assumption kMaskOfBoth = {
    "mask_of_both",
    "Its one mask reaches attention of its own sequence and that of a context.",
    "Take another mask for the context, or none: a causal one is for the "
    "first.",
    "its one mask is meant for the keys of its context, too"};
inline constexpr Assumption kMaskLeft = {
    "mask_left", "It takes a mask, and overwrites that with one of its own.",
    "Join them: mask = mask & its_own. Or leave the argument out.",
    "the mask that it takes is meant to be replaced by its own"};
inline constexpr Assumption kSeesLaterKeys = {
    "sees_later_keys",
    "It decodes, by its name or by the words that it returns, and each query "
    "of its own sequence sees later keys, too.",
    "To predict what comes next, hide it: block torch.ones(L, L, "
    "dtype=torch.bool).triu(1).",
    "its queries are meant to see later keys, though it decodes"};
inline constexpr Assumption kSwitchedOff = {
    "switched_off",
    "It must be told {}, and is told False: with True it is not judged.",
    "Check an instance that is made with your values, or say how by `call=`.",
    "its switches are off"};
inline constexpr Assumption kPositionsUnseen = {
    "positions_unseen",
    "Every token was given position 0, as NumPy does not show what is made of "
    "positions.",
    "Check the same code in PyTorch to have positions judged.",
    "what it makes of positions is right, which is not judged"};
inline constexpr Assumption kTurnedAlike = {
    "turned_alike",
    "Queries and keys of a head are turned by the same angles at every "
    "position, which cancel: the weights do not depend on where a token "
    "stands.",
    "Rotary positions turn each by its own: angle = position * frequency.",
    "its heads are meant to be turned alike at every position"};
inline constexpr Assumption kPositionsLeftOut = {
    "positions_left_out",
    "What turns queries and keys by their positions is imported from what is "
    "not there. What stands in turned nothing, and all else is judged.",
    "Check it beside what it imports.",
    "queries and keys are turned by their positions as they should be"};
inline constexpr Assumption kOtherArguments = {
    "other_arguments",
    "It insists on arguments of which nothing is known, and was given what "
    "lets it run, zeros mostly: what it makes of them is not judged, all else "
    "is.",
    "Give a call of yours by `inputs=` or `call=` to have all of it judged.",
    "what it makes of its other arguments is right, which is not judged"};
inline constexpr Assumption kTurnedElsewhere = {
    "turned_elsewhere",
    "Queries and keys are turned by positions of its own, which are not those "
    "at which tokens stand: scores do not follow their distance alone.",
    "If tokens are meant to be counted one by one: tables of (L, d) meet (B, "
    "H, "
    "L, d) by its last two axes, and no view exchanges axes.",
    "its heads are meant to be turned by other positions than 0, 1, 2 and so "
    "on"};
inline constexpr Assumption kKeysTransposed = {
    "keys_come_transposed",
    "Its keys are handed transposed, (B, H, D, Lk), as they meet the queries.",
    "Else they must be transposed here: q @ k.transpose(-2, -1).",
    "its keys are handed transposed"};

inline constexpr Assumption kOwnScale = {
    "own_scale",
    "The scale of its scores is its own, learned, stated or that of cosines, "
    "and not "
    "judged.",
    "nn.MultiheadAttention divides them by the square root of the head width.",
    "its scores are meant to have a scale of their own"};

inline constexpr Assumption kPaddingOfRows = {
    "padding_of_rows",
    "Its mask of padding zeroes rows of the output, and hides no key.",
    "Block the padded keys: scores.masked_fill(padding[:, None, None, :], "
    "float(\"-inf\")).",
    "its mask of padding is for rows of the output, and padded keys are seen"};

inline constexpr const Assumption* kWithCondition[] = {
    &kMaskBlocks,     &kPaddingBlocks,    &kAddedByGuess,    &kSequenceFirst,
    &kNoOutput,       &kLayersBeside,     &kScaleArgument,   &kEqualLengths,
    &kOneSequence,    &kKeysTransposed,   &kTurnedAlike,     &kOneToken,
    &kOwnScale,       &kPaddingOfRows,    &kLaterAttentions, &kIdleWeights,
    &kBiasOfAnother,  &kPositionsUnseen,  &kOneWindow,       &kSwitchedOff,
    &kBeside,         &kContextLeft,      &kSeesLaterKeys,   &kTurnedElsewhere,
    &kMaskOfBoth,     &kMaskLeft,         &kScoresGiven,     &kElsewhere,
    &kMasksAreCausal, &kPositionsLeftOut, &kOtherArguments};

}  // namespace multihead::diagnosis
