// SPDX-License-Identifier: MIT
//
// What keeps a program from being right beside faults of attention: that it
// raises, draws or changes what it is given, and what shows of who reads whom.
#include "diagnosis/report/codes.h"

namespace multihead::diagnosis {
namespace {

constexpr FaultCode kProgramCodes[] = {
    {"MH901", "raises", "The call ends with an exception; nothing is computed.",
     "The code raises an exception when it is called as its signature says.",
     "Read the line that the report quotes; if a call needs something "
     "special, state it by `inputs=`."},
    {"MH902", "hangs",
     "The call does not come back: training stands still without a word.",
     "The code had not come to an end when its time was over.",
     "Look for a loop whose condition stays true. If it only needs longer, "
     "`time_limit=` gives it more."},
    {"MH903", "crashes",
     "The whole process ends, and with it everything that is not saved.",
     "The process of the check ended by a signal, or past every way out that "
     "Python has.",
     "Look for what reads or writes memory by itself: an extension, ctypes, "
     "an uncompiled kernel; or for `os._exit`."},
    {"MH904", "wrong_shape",
     "What comes next fails, or, by broadcasting, goes on with numbers that "
     "mean something else.",
     "The output does not have the shape of the query.",
     "Merge the heads back into (B, Lq, H * d) before the output projection."},
    {"MH905", "not_finite",
     "NaN spreads: one step of an optimiser later, all weights are NaN.",
     "The output has NaN or infinities for inputs that are ordinary.",
     "Look for rows whose keys are all blocked, for a division by 0, for "
     "`exp` without the largest score subtracted."},
    {"MH906", "random",
     "The same input gives another result each time, so nothing can be "
     "compared or reproduced.",
     "Two calls with the same inputs differ in evaluation.",
     "Draw random numbers in training only, and create layers once, in "
     "`__init__`."},
    {"MH907", "changes_inputs",
     "The caller's tensors change behind its back: a residual connection, a "
     "second layer or a second epoch gets other numbers.",
     "A call writes into the tensors that it is given.",
     "Replace operations in place (`x += y`, `x.mul_(y)`, `x[...] = y`) by "
     "those that make a new tensor."},
    {"MH908", "changes_global_state",
     "Other code of the same process computes, or draws random numbers, "
     "otherwise than it expects.",
     "A call changes a setting of the whole process and leaves it so.",
     "Leave the default type, the random seed and the gradient mode to "
     "whoever starts the program."},
    {"MH909", "softmax_overflows",
     "Large scores become inf and then NaN. It happens late in training, on "
     "inputs that nobody tried.",
     "The softmax overflows where scores are large.",
     "Subtract each row's largest score before `exp`, or use "
     "`torch.softmax`, which does."},
    {"MH910", "not_comparable",
     "What comes out cannot be laid beside attention, so nothing is said of "
     "it.",
     "What comes out is no tensor that could be compared.",
     "Return the output, or a tuple whose first entry it is."},
    {"MH911", "missing_package",
     "The code needs a package that this Python does not find, and cannot be "
     "run here.",
     "The file imports a package that is not installed.",
     "Install it beside PyTorch, or check the attention in a file of its "
     "own."},
    {"MH912", "no_weights_found",
     "The parameters were not understood, so the output could not be "
     "compared.",
     "There are parameters whose part in attention could not be told.",
     "State them: `weights=` takes a module or tensors by name."},
    {"MH913", "not_called",
     "No call that was tried got through, because an argument's meaning is not "
     "known: nothing is said of the code.",
     "No call of the code succeeded, and an argument of which nothing is "
     "known had to be guessed.",
     "State it: a call of yours by `inputs=`, or a function that fills the "
     "argument in."},
    {"MH914", "returns_nothing", "Whoever uses the result fails.",
     "The call returns None.", "Return the output."},
    {"MH915", "wrong_type", "Whoever uses the result as a tensor fails.",
     "The call returns something else than a tensor, or a tuple that has one.",
     "Return the output, or a tuple whose first entry it is."},
    {"MH916", "integer_output",
     "Everything behind the decimal point is lost, and no gradient passes.",
     "The output has whole numbers.",
     "Look for a conversion to an integer type, or a tensor made from whole "
     "numbers."},
    {"MH917", "argument_guessed",
     "What came out may be due to an argument that was made up: nothing is "
     "said "
     "of the code.",
     "An argument of which nothing is known had to be guessed, and with the "
     "guess it is not attention.",
     "State it: a call of yours by `inputs=`, or a function that fills the "
     "argument in."},
    {"MH918", "other_layers",
     "Nothing is said of the code, as what those layers should do is not "
     "known.",
     "The data pass matrices that attention has no use for, and neither the "
     "output nor what the heads return is attention's alone.",
     "Check the part that is attention by itself, or split it off."},
    {"MH919", "cache_differs",
     "What a model writes token by token is not what it was trained to write: "
     "all is right as long as nothing is kept from calls before.",
     "A token on the keys and values of calls before gives something else than "
     "in one pass over all tokens.",
     "Keep what one pass computes: keys turned by the positions that they have "
     "in the whole sequence, the new ones behind the old ones, all that is "
     "seen, and each query at its own position."},
    {"MH920", "outside",
     "Nothing is said of the code: what it should compute is another thing "
     "than softmax(q k^T / sqrt(d)) v.",
     "The run computes no softmax, no product of queries and keys before it, "
     "or weights of features instead of keys, and no known fault explains the "
     "output.",
     "Compare it with code of its own kind."},
    {"MH921", "pools",
     "Nothing is said of the code: what asks is its own, and no query comes "
     "in.",
     "A module that is given one sequence returns one vector for each item.",
     "Check the attention inside, which is handed its queries."},
    {"MH922", "bias_of_another_query",
     "Keys are weighed by the positions of another query: what is learned of "
     "distances is wrong, at later keys or at all.",
     "A query is changed, and what is added to the scores of the query beside "
     "it changes, too.",
     "Index a table by j - i, or shift 2 * L - 1 distances: F.pad(x, (1, 0)), "
     "viewed with the last two axes exchanged, without its first row. What the "
     "shift of L distances puts at later keys belongs to the next query."},
    {"MH923", "heads_alike",
     "Several heads cost the time of several, and see what one sees.",
     "Each head of a loop gets the same queries, keys and values.",
     "Give each head matrices of its own, W_q of (E, H * d), and cut the "
     "features."},
    {"MH924", "positions_unseen",
     "Nothing is said of the code: NumPy does not show what it makes of "
     "positions.",
     "Code in NumPy computes with positions, and nothing explains its output "
     "without them.",
     "Check the same code in PyTorch, or attention without positions."},
    {"MH925", "context_unread",
     "A decoder that does not read what was encoded writes the same whatever "
     "the source says.",
     "Code with several attentions requires a context, and none of their "
     "queries, keys and values comes of it.",
     "Hand the context to the attention that is meant to read it, as its keys "
     "and values."},
    {"MH926", "context_half_read",
     "Weights say how much of each key's value is read, and the values are of "
     "another sequence: what is read has nothing to do with what was found.",
     "The keys of an attention come of the context and its values of the "
     "queries' own sequence, or the other way round.",
     "Take keys and values of one sequence."},
    {"MH927", "context_asks",
     "The result has a place for each position of the context, and is added to "
     "the sequence, whose positions are others.",
     "In a block that begins with self-attention the queries come of the "
     "context, and keys and values of the sequence itself.",
     "Queries are of the sequence, keys and values of the context."},
    {"MH928", "masks_exchanged",
     "Later positions of the target are seen in training, and padding of the "
     "source is read.",
     "The mask of the sequence reaches the attention of the context first, or "
     "that of the context the attention of the sequence.",
     "The target's mask, which hides later positions, is for self-attention; "
     "the source's is for the keys of the context."},
    {"MH929", "softmax_of_one",
     "Nothing is chosen: each key or feature counts as it is, and what the "
     "scores would say is lost.",
     "Every softmax of the code goes along an axis of one number, in calls of "
     "other lengths, too.",
     "Take the softmax along the axis of what is weighed."},
    {"MH930", "items_mixed",
     "Texts or images of one batch get parts of each other: results depend on "
     "what else is in the batch.",
     "Nothing explains the output, and one item is changed: others change with "
     "it, along each axis that may be that of items.",
     "Keep the axis of items to itself: split heads by x.view(B, L, H, "
     "d).transpose(1, 2)."},
    {"MH931", "mask_of_another",
     "Later positions of the target are seen in training, or padding of the "
     "source is read; and calls in which both are not of one length fail.",
     "A mask of one sequence blocks weights of the attention that another mask "
     "is for.",
     "Give each attention the mask of the keys that it reads."},
    {"MH932", "backward_differs",
     "It learns something else than to make its loss smaller, and may learn "
     "slowly, or not at all.",
     "What `backward` returns is compared with differences of the forward "
     "pass along random directions, in float64.",
     "Check each step by differences: (f(x + h) - f(x - h)) / 2h."},
    {"MH933", "global_read",
     "It works in the notebook where it was written, and in no other place; or "
     "it does there, and what it is given has no effect.",
     "An argument is never read, and a tensor of the file, of a like name, is.",
     "Read the argument; keep tests of a file from its code, as behind `if "
     "__name__ == \"__main__\":`."},
    {"MH934", "unregistered",
     "It computes what it should and learns nothing: state_dict() and "
     "parameters() lack these weights, and each run begins with others.",
     "Layers that meet the data are in a plain list or dictionary of their "
     "module, and nowhere else in it.",
     "nn.ModuleList or nn.ModuleDict for layers, nn.Parameter for tensors."},
    {"MH935", "projection_unused",
     "It computes a projection for nothing, which never learns; queries, keys "
     "or values are those of another.",
     "Nothing explains the output, and a matrix that meets the data, or a "
     "third of a fused one, gets no gradient.",
     "Look for a name that is written twice where two are meant."},
    {"MH936", "positions_scrambled",
     "Tokens are made of parts of several positions: attention compares what "
     "was never one thing, and pixels or frames are exchanged.",
     "Heads are right, and layers beside them work on each position alone; yet "
     "a sequence in another order gives other numbers.",
     "Exchange axes by transpose or permute, not by view."},
    {"MH937", "positions_apart",
     "It is no attention over positions: what a token becomes follows that "
     "token alone, and nothing of the sequence is learned.",
     "One token after the other is changed: what comes out at all others stays "
     "as it is. Said where no other fault explains the code.",
     "The axis of positions must be the last but one where queries meet keys: "
     "(B, H, L, d)."},
    {"MH938", "hidden_keys_read",
     "Padding and later tokens have a part in what is returned: results follow "
     "the padding, and training sees what it is to predict.",
     "A key that a mask hides is changed, and what the query returns changes "
     "with it, whichever value of the mask hides. Said where no other fault "
     "explains the code.",
     "Fill the scores of hidden keys with -inf, before the softmax."},
    {"MH939", "softmax_of_another_axis",
     "Weights of a query do not add up to 1: what it returns grows and shrinks "
     "with how many others ask, and one that nobody asks for is lost.",
     "Weights are followed from their softmax to where they are summed with: "
     "nowhere do they add up to 1. Said where no other fault explains the "
     "code, also of attention of another kind, as additive attention.",
     "Take the softmax along the axis of what is weighed, as that of the "
     "keys."},
    {"MH940", "later_tokens_seen",
     "In training it copies what it is to predict, so that the loss falls and "
     "nothing is learned; there is nothing to copy when it writes.",
     "A later token is changed, and what is said of an earlier one changes "
     "with "
     "it, in a model whose file trains it to say the next token.",
     "Block the keys j > i of each query i."},
    {"MH941", "weights_alike",
     "It averages, whatever is asked: queries and keys are learned for "
     "nothing.",
     "The weights of each query are one number, of all keys that it sees, "
     "though scores of others differ. Said where no other fault explains the "
     "code, also of attention of another kind.",
     "Let the scores of a query follow the keys."},
    {"MH942", "layer_used_twice",
     "Two steps share what each should learn for itself, and the other layer "
     "learns nothing; weights of others give other results.",
     "A layer is called twice in one call of its owner, and one of the same "
     "class and sizes beside it never is: the code speaks of that one only "
     "where it is made.",
     "Call each for what its name says, or take out the one that is not "
     "used."},
    {"MH943", "normalised_over_heads",
     "Scores are no cosines, and no scale fits them; what a head sees depends "
     "on the others.",
     "The squares of keys add up to 1 over the heads, and not over the "
     "features of each.",
     "Normalise the features of each head, the last axis of (B, H, L, d): "
     "F.normalize(x, dim=-1), whose default is dim=1."},
    {"MH944", "alibi_rises",
     "Far keys get more weight than near ones: the reverse of what ALiBi is "
     "for, and nothing like it for longer texts than those of training.",
     "A bias that rises with the distance of a key is added to the scores, and "
     "the text speaks of ALiBi, which subtracts it.",
     "Subtract: scores - slopes * distance, or scores + slopes * (j - i) for "
     "the keys j <= i."},
    {"MH945", "documents_mixed",
     "A model that is trained on several texts in one row learns from the "
     "wrong ones, and says something else of a text by itself.",
     "A token that has a number of its own is changed, and what is returned "
     "for others changes with it.",
     "Block what has another number, before the softmax, with -inf."},
    {"MH946", "values_turned_too",
     "What is read depends on where it stands, which the distance of a key "
     "from a query does not tell: weights of models with rotary positions give "
     "nonsense.",
     "Rotary positions turn the values, too, and the text says that they turn "
     "queries and keys.",
     "Turn queries and keys alone."},
    {"MH947", "prefix_misread",
     "A model of prefixes that sees its answer ahead learns to copy it; one "
     "that does not see its prefix whole reads half of the question.",
     "The keys that each query reads are found one by one, with a prefix of "
     "two tokens, and others are read than those of the prefix and those up to "
     "its own.",
     "Show key j to query i where (j < prefix) | (j <= i)."},
    {"MH948", "windows_misplaced",
     "What one part of an image makes of itself is taken for that of another.",
     "Images that are cut into several windows come out with the numbers of "
     "the windows alone, in other places.",
     "Put back each window by the inverse of the permutation that cut it."},
    {"MH949", "wraps_around",
     "What lies at one edge of an image is mixed with what lies at the "
     "opposite edge.",
     "With shifted windows, another first pixel changes the last rows or "
     "columns, and nothing in the middle.",
     "Mask each shifted window by the regions of the rolled image: -100, or "
     "-inf, between pixels of two regions."},
    {"MH950", "turned_alike",
     "A model of rotary positions that does not know the order of its tokens.",
     "Of one token, repeated, all queries and keys of a head are turned alike, "
     "and the text or the name speaks of rotary positions.",
     "Turn each position by its own angle, position * frequency."},
    {"MH951", "causal_in_training_alone",
     "It learns to do without what comes later, and is handed it in use: what "
     "it says is not what it was trained to say.",
     "Another last token changes what is said of earlier ones in evaluation, "
     "and does not in training.",
     "Hide later keys whether it trains or not."},
    {"MH952", "residual_lost",
     "Deep models do not train without them: gradients reach the first layers "
     "through every one behind, and a layer cannot leave a token as it is.",
     "Where the matrices of its attention are 0, the block says the same of "
     "any "
     "sequence; where those of another part are, it does not.",
     "Add what attention was given to what it returns."},
    {"MH953", "query_cancels",
     "Whatever is asked, the same keys get the same weights: the state of a "
     "decoder does not choose what it reads.",
     "A matrix that scores are made by gets no gradient: it adds one number "
     "to all scores of a query, which the softmax removes.",
     "Bend the sum of query and key before one number is made of it: "
     "v(torch.tanh(W_q(q) + W_k(k)))."},
    {"MH954", "values_averaged",
     "A context that shrinks with the length of what is read: what is trained "
     "on short sequences is lost in long ones.",
     "Values are multiplied with weights that add up to 1, one by one, and "
     "then averaged.",
     "Sum over the keys: (weights * values).sum(dim), or weights @ values."},
    {"MH955", "table_misread",
     "Pixels that lie alike to each other are told apart, or those that do "
     "not are taken for one: the table learns nothing of places.",
     "What is added to the scores of pairs of pixels with one offset differs, "
     "or is the same for pairs of different ones.",
     "Number offsets as (dy + h - 1) * (2 * w - 1) + dx + w - 1, and permute "
     "what the table gives, (L, L, heads), to (heads, L, L)."},
    {"MH956", "bias_cancels",
     "Weights do not follow positions: what is learned of these is never read.",
     "A learned table of relative positions takes part, and its gradient is 0: "
     "its numbers are the same for all keys that a query sees.",
     "Number positions as key minus query, or the other way round where the "
     "table wants that."},
    {"MH957", "paths_disagree",
     "Results follow which functions are installed, or a switch that nobody "
     "thinks of.",
     "An attribute chooses between a fused function and steps: with the other "
     "value, the same call returns other numbers.",
     "Compare both with scaled_dot_product_attention, whose bool masks are "
     "True "
     "where a query may attend."},
    {"MH958", "shift_not_undone",
     "Every other layer moves the image by a few pixels, so that what a pixel "
     "says is added to another one.",
     "With shifted windows, another first pixel changes what comes out at "
     "others, and not what comes out in its own place.",
     "Roll by -shift on the way in and by +shift on the way out."},
    {"MH959", "batch_size_counts",
     "What a model returns depends on how many are asked at once: it is "
     "evaluated with another number of items than it was trained with.",
     "An item gives something else alone than in a batch.",
     "Take from the batch's size nothing but shapes: no scale, no positions."},
    {"MH960", "zero_scores_blocked",
     "Tokens of zeros, as padding is embedded, vanish as keys, and give NaN "
     "where they are all that a query sees.",
     "A first token of zeros gives something else than one of very small "
     "numbers.",
     "Block by the mask, not by what it leaves: scores.masked_fill(mask, "
     "float('-inf'))."},
    {"MH961", "document_differs_alone",
     "What is returned for a text depends on how long the others in its row "
     "are.",
     "A document of one token gives something else behind a longer one than "
     "alone.",
     "Block what fills up shorter documents before the softmax, with -inf."},
    {"MH962", "mode_overwritten",
     "What is evaluated drops weights at random, and gives another result each "
     "time.",
     "forward() sets self.training to an argument that is True by default.",
     "Leave self.training to train() and eval()."},
    {"MH963", "output_thrown_away",
     "The output projection learns nothing and does nothing.",
     "A layer is called in a statement of its own, and nothing keeps its "
     "result.",
     "Assign it: y = self.proj(y)."},
    {"MH964", "residual_of_context",
     "What a decoder has made of its own tokens is lost: in its place stands "
     "what the encoder says of another sequence.",
     "Where its matrices are 0, what comes out at a place follows the "
     "sequence that is read, and not the one that asks.",
     "Add what asks to what attention returns."},
    {"MH965", "input_returned",
     "The layer does nothing: all of its weights are without effect.",
     "What comes out is an input, bit for bit.",
     "Return what attention gives."},
    {"MH966", "input_unread", "The model says the same of everything.",
     "Another input makes no difference to what comes out.",
     "Project the input, not ones or zeros of its shape."},
    {"MH999", "unknown",
     "The layer is not attention, and another layer, or weights of others, "
     "will not do what it does.",
     "The output is not attention's, and no known fault explains it.",
     "Begin at the first step that differs, which the report names."},
};

}  // namespace

std::span<const FaultCode> codes_of_programs() { return kProgramCodes; }

}  // namespace multihead::diagnosis
