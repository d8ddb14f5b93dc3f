# SPDX-License-Identifier: MIT
"""Flaws that runs show by themselves, whatever else the code does: heads that compute
the same, a softmax of one number, items that are mixed, and biases of relative positions
that another query has a part in.

Transformer-XL (Dai et al., 2019) multiplies each query with all distances at once and
shifts the rows to their places. That takes 2L - 1 distances; with L of them, what it
puts at later keys is of the next query, which only a causal mask hides.
"""

import re
from dataclasses import replace

import torch
from torch import Tensor

from ..calls import arguments, cases
from ..calls.cases import Case
from ..calls.forms import splits_batch
from ..capture import core
from ..capture.places import place
from ..capture.runner import Run, Runner
from ..report import Finding
from ..subject.signature import text_of_entry
from ..subject.target import Subject, text_of_file
from . import again
from .layouts import written_batch_first

OF_ANOTHER_QUERY = Finding(
    "bias_of_another_query",
    "What is added to the scores of a query, as a bias of relative positions, follows "
    "the query beside it, too.",
    "Index a table by j - i, or shift 2 * L - 1 distances: F.pad(x, (1, 0)), viewed with "
    "the last two axes exchanged, without its first row. What the shift of L distances "
    "puts at later keys belongs to the next query.",
)
HEADS_ALIKE = Finding(
    "heads_alike",
    "All heads have the same queries, keys and values: together they know no more than "
    "one.",
    "Give each head matrices of its own, W_q of (E, H * d), and cut the features.",
)
NORMALISED_OVER_HEADS = Finding(
    "normalised_over_heads",
    "Keys are normalised over the heads, not over the features of each: their squares "
    "add up to 1 over all heads.",
    "Normalise the last axis of (B, H, L, d): F.normalize(x, dim=-1), whose default is "
    "dim=1.",
)
ALIBI_RISES = Finding(
    "alibi_rises",
    "A bias is added to the scores that rises with the distance of a key, so that far "
    "keys get more weight than near ones. The text speaks of ALiBi, which is the "
    "reverse.",
    "Subtract it: scores - slopes * distance, where slopes and distance are positive.",
)
VALUES_TURNED_TOO = Finding(
    "values_turned_too",
    "Values are turned by their positions, too, so that what a query reads changes with "
    "where it stands. The text speaks of queries and keys.",
    "Turn queries and keys alone: their scores follow the distance of the two.",
)
TURNED_ALIKE = Finding(
    "turned_alike",
    "Queries and keys of a head are turned by the same angles at every position, which "
    "cancel: weights do not follow positions, which rotary ones are for.",
    "Count positions along the axis of the sequence, which is -2 in (B, H, L, d) and 1 in "
    "(B, L, H, d): torch.arange(x.shape[-2]) before heads are moved counts heads.",
)
CAUSAL_IN_TRAINING = Finding(
    "causal_in_training_alone",
    "Later keys are hidden in training, and seen in evaluation: what it has learned does "
    "not hold where it is used.",
    "Mask in both modes: only dropout depends on self.training.",
)
MODE_OVERWRITTEN = Finding(
    "mode_overwritten",
    "A call sets `self.training`, by default to True: in evaluation, each call that "
    "leaves this out drops weights as in training.",
    "Leave `self.training` to train() and eval(), and hand on the flag of the call: "
    "F.dropout(x, p, training and self.training).",
)
_IN_TRAINING = re.compile(
    r"\bif\b[^\n]*\bself\.training\b|\bself\.training (?:and|else)\b"
)
_ONE_BY_ONE = re.compile(
    r"cache|past_|one (?:token|step)|step by step|incremental|autoregressive decod",
    re.I,
)
LATER_TOKENS_SEEN = Finding(
    "later_tokens_seen",
    "What it says of a token changes with later ones, which it is trained to predict: "
    "its file hands it all tokens but the last, and compares with all but the first.",
    "Hide later tokens from each: block torch.ones(L, L, dtype=torch.bool).triu(1); "
    "nn.Transformer takes such a mask as tgt_mask.",
)
SOFTMAX_OF_ONE = Finding(
    "softmax_of_one",
    "Its softmax goes along an axis of one number: every weight is 1, whatever the "
    "scores are.",
    "Take the softmax along the axis of what is weighed, as the keys of a query: "
    "scores.softmax(dim=-1) where scores are (..., Lq, Lk), weights.softmax(dim=1) where "
    "they are (B, L, 1).",
)
VALUES_AVERAGED = Finding(
    "values_averaged",
    "What it returns is the mean of values times their weights, which add up to 1 by "
    "themselves: the more keys, the smaller it is.",
    "Sum them: (weights * values).sum(dim), or weights @ values.",
)
WEIGHTS_ALIKE = Finding(
    "weights_alike",
    "All keys that a query sees get the same weight, whatever queries and keys are: the "
    "scores of a query are one number.",
    "Let the scores of a query follow the keys: q @ k.transpose(-2, -1), or, one by one, "
    "(q[:, :, None] * k[:, None]).sum(-1).",
)
SOFTMAX_OF_ANOTHER_AXIS = Finding(
    "softmax_of_another_axis",
    "Its softmax goes along another axis than the one that is summed over: the weights "
    "of a query do not add up to 1.",
    "Take the softmax along the axis of what is weighed, as the keys of a query: "
    "scores.softmax(dim=-1) where scores are (..., Lq, Lk), weights.softmax(dim=1) where "
    "they are (B, L, 1).",
)
EXCHANGED = Finding(
    "batch_and_sequence_exchanged",
    "Batch and sequence are exchanged: each position attends to the same position of the "
    "other batch items, and its text has items first.",
    "The code takes (L, B, E), as nn.MultiheadAttention does unless batch_first=True, and "
    "gets (B, L, E). Exchange the first two dimensions on the way in and out, or state "
    "batch_first=True where it is made.",
)
ITEMS_MIXED = Finding(
    "items_mixed",
    "What comes of one item of the batch changes with the others, whichever axis is "
    "taken for that of items.",
    "Keep the axis of items to itself: x.view(B, L, H, d).transpose(1, 2) for heads, and "
    "its inverse behind them; a view in another order, or one that flattens items, "
    "mixes them, and so does nn.MultiheadAttention on (B, L, E) without batch_first.",
)
MASK_AFTER_SOFTMAX = Finding(
    "mask_after_softmax",
    "Weights are filled with -inf, or a number as far below 0, behind the softmax, where "
    "it was meant for scores: what comes of them is huge, infinite or NaN.",
    "Fill scores, and take the softmax of them: "
    'scores.masked_fill(mask, float("-inf")).softmax(-1).',
)
MASK_BEHIND_WEIGHTS = Finding(
    "mask_after_softmax",
    "The mask meets weights, behind their softmax: what is left of a query's weights does "
    "not add up to 1, and follows the scores of what is hidden.",
    "Mask scores, and take the softmax of them: "
    'scores.masked_fill(mask == 0, float("-inf")).softmax(-1).',
)
# What is said of code that mixes items on purpose, as BatchFormer (Hou et al., 2022).
_ACROSS_ITEMS = re.compile(
    r"(?:across|between|among|over) (?:all |the )*(?:items|samples|batch\w*|examples)|"
    r"batch_?former|inter[-_ ]?sample|contrastive|multi[-_ ]?view|\b(?:n|num)_views|"
    r"track_running_stats=False|quanti[sz]|int8",  # by one scale for all of a tensor
    re.I,
)
# What is said of code whose weights compete for what is weighed, as slots and experts.
# Each row becomes a sequence of one: x.unsqueeze(1), x[:, None].
_OF_ITEMS = re.compile(
    r"\.unsqueeze\(\s*(?:dim\s*=\s*)?1\s*\)[^\n]*\.unsqueeze\(\s*1\s*\)"
)
_COMPETES = re.compile(
    r"slot|vlad|cluster|soft_?assign|assign\w*_?(?:mat|tensor|prob)|codebook|"
    r"prototype|experts?\b|\bgat(?:es?|ed|ing)\b|_gate|rout(?:er|ing)|capsul|dispatch|"
    r"sinkhorn|mixture",
    re.I,
)
_HUGE = 1e3  # what is returned of numbers around 1
_HIDDEN = 1e-12  # a weight of what a mask hides, or less
# What text says of code whose queries see later keys, or of other code.
_SEES_ALL = re.compile(r"conformer|encoder\b|bidirectional|acoustic|speech", re.I)
_SEES_EARLIER = re.compile(
    r"causal|tril\b|triu\b|subsequent|ahead|autoregress|decoder|future|later|music",
    re.I,
)


def of_residual(runner: Runner, base: Run) -> Finding | None:
    """What is said of what is given as zeros and not added to the output."""
    name, case = runner.call.parameter("residual"), replace(base.case, gradients=False)
    if name is None:
        return None
    runs = []
    for factor in (0.0, 1.0):
        made = arguments.make(runner.call, case)
        added = factor * torch.randn_like(made.tensors["query"])
        made.keywords[name] = added
        runs.append(runner.run(case, given=made))
    before, after = runs
    if before.refused or after.refused or before.out.shape != added.shape:
        return None
    if torch.allclose(after.out - before.out, added, atol=1e-5):
        return None
    return Finding(
        "argument_guessed",
        f"`{name}` was given as zeros, and other numbers are not added to the output.",
        "Give a call of yours, by `inputs=` or `call=`.",
        kind="unchecked",
    )


def has_heads_alike(base: Run) -> bool:
    """Whether a loop over heads computes the same for each, of the same matrices: heads
    of their own may begin with the same numbers."""
    if base.recorder is None:
        return False
    found = base.recorder.cores.found
    of_all = len(base.recorder.uses) <= 4  # for queries, keys, values and the output
    if len(found) < 2 or len(found) != base.case.sizes.heads or not of_all:
        return False
    first, *others = found
    parts = ("query", "key", "value", "context")
    return all(
        getattr(first, part).shape == getattr(other, part).shape
        and torch.equal(getattr(first, part), getattr(other, part))
        for other in others
        for part in parts
    )


def normalises_over_heads(base: Run) -> bool:
    """Whether keys (B, H, L, d) have squares that add up to 1 over heads."""
    if base.recorder is None or cases.unbatched(base.case):
        return False
    sizes = base.case.sizes
    one = core.joined(base.recorder.cores.found, sizes.batch, sizes.queries)
    if one is None or one.key.shape[1] < 2:
        return False
    squares = one.key.square()
    over_heads, own = squares.sum(1), squares.sum(-1)
    ones = torch.ones_like
    return torch.allclose(over_heads, ones(over_heads), atol=1e-4) and not (
        torch.allclose(own, ones(own), atol=1e-4)
    )


def projection_unused(names: list[str]) -> Finding:
    return Finding(
        "projection_unused",
        f"It projects by {' and '.join(names)}, and nothing of that is in what it "
        "returns: something else is used in its place.",
        "Look for what is used twice where two are meant, as in q, k, v = qkv[0], qkv[1], "
        "qkv[1] or in q @ v.transpose(-2, -1).",
    )


def projection_cancels(names: list[str]) -> Finding:
    return Finding(
        "projection_unused",
        f"It projects by {' and '.join(names)}, and what it returns does not change with "
        "that: what comes of it cancels.",
        "Look for a sum of the weights alone, which is 1, as by a letter of its own in "
        'an einsum: "bhqk,bhvd" sums both apart, "bhqk,bhkd" is meant.',
    )


def query_cancels(run: Run) -> Finding | None:
    """What is said of scores that are no products, and follow no query."""
    if run.recorder is None or run.recorder.cores.found or not run.cancelled:
        return None
    made_by = run.recorder.scored.made_by
    cancelled = [n for n, one in run.cancelled.items() if place(one) in made_by]
    if not run.recorder.scored.found or not cancelled:
        return None
    names = " and ".join(f"`{name}`" for name in cancelled)
    return Finding(
        "query_cancels",
        f"It projects by {names}, and no weight follows that: it adds one number to all "
        "scores of a query, which the softmax removes.",
        "Bend the sum of query and key before one number is made of it: "
        "v(torch.tanh(W_q(q) + W_k(k))).",
    )


def weights_without_gradient(names: list[str]) -> Finding:
    return Finding(
        "weights_without_gradient",
        f"No gradient reaches {' and '.join(names)}: what it returns is right, and these "
        "never learn.",
        "Look for .detach(), .data, torch.no_grad(), or keys and values that are read "
        "from a cache. To freeze them on purpose, requires_grad_(False) says so.",
    )


def filling_weights(runs: list[Run]) -> list[Run]:
    """Those that fill weights as scores are, of which nothing finite comes, or what is
    huge."""
    filled = [
        run
        for run in runs
        if run.recorder is not None
        and run.recorder.cores.fills_weights
        and not all(map(_is_small, [run.out, *run.recorder.cores.contexts]))
    ]
    # Nothing finite may come of a row that sees nothing.
    is_told = any(run.case.mask != "blocked row" for run in filled)
    return filled if is_told else []


def _is_small(returned: Tensor) -> bool:
    return bool((returned.abs() < _HUGE).all())


def weighs_one(runner: Runner, base: Run) -> bool:
    """Whether every softmax goes along one number, also where sequences are longer and
    items more."""
    if base.recorder is None or base.recorder.normalised != {1}:
        return False
    if cases.unbatched(base.case):
        # Rows that are read as items have one key each; else that axis may be another.
        return _OF_ITEMS.search(runner.subject.source) is not None
    sizes = base.case.sizes
    queries = 1 if sizes.queries == 1 else 40
    longer = replace(sizes, batch=sizes.batch + 1, queries=queries, keys=60)
    run = runner.run(replace(base.case, sizes=cases.in_one_window(longer, sizes)))
    return not run.refused and run.recorder.normalised == {1}


def competes(subject: Subject) -> bool:
    """Whether what is read is meant to be shared out among what reads it, as by slots."""
    return _COMPETES.search(subject.source) is not None


def weighs_along_another_axis(runner: Runner, base: Run) -> bool:
    """Whether no sum over what is weighed has weights that add up to 1."""
    if base.recorder is None or competes(runner.subject):
        return False
    return base.recorder.cores.sums.are_astray


def weighs_alike(base: Run) -> bool:
    """Whether every softmax gives all that is weighed the same weight."""
    seen = base.recorder.cores.sums.are_alike if base.recorder else []
    return bool(seen) and all(seen)


def masks_weights(runs: list[Run]) -> bool:
    """Whether masks meet weights alone, which do not add up to 1 behind that."""
    seen = [run.recorder.cores.sums.masked_are_one for run in runs if run.recorder]
    return any(seen) and not any(one for sums in seen for one in sums)


def mixed_items(runner: Runner, base: Run) -> Finding | None:
    """What is said of code in which each axis that may be that of items has some of
    which others follow the change. Sequence-first code mixes the first axis, and not the
    second: where its text has items first, the two are exchanged."""
    case = base.case
    if cases.unbatched(case) or case.layout in cases.CORE or case.style.numpy:
        return None
    on_purpose = _ACROSS_ITEMS.search(runner.subject.source) is not None
    if on_purpose or splits_batch(runner.subject):
        return None
    if not _mixes(runner, case, 0):
        return None
    is_either = case.layout in (cases.LAYER, cases.SEQUENCE_FIRST)
    if not is_either or _mixes(runner, case, 1):
        return ITEMS_MIXED
    return EXCHANGED if written_batch_first(runner.subject) is True else None


def works_across_items(subject: Subject) -> bool:
    """Whether its file says that it mixes items on purpose."""
    return _ACROSS_ITEMS.search(text_of_file(subject)) is not None


def says_it_works_across_items(subject: Subject) -> bool:
    """Whether its own text says so, not only its file."""
    return _ACROSS_ITEMS.search(subject.source) is not None


def pools_mix_items(runner: Runner, run: Run) -> bool:
    """The same of code that returns a vector for each item, the first axis of what it
    is given."""
    case = replace(run.case, gradients=False)
    if case.layout not in (cases.LAYER, *cases.IMAGES) or case.style.numpy:
        return False
    if works_across_items(runner.subject):
        return False
    made = arguments.make(runner.call, case)
    before = runner.run(case, given=made).pooled
    again_same = runner.run(case, given=made).pooled
    if before is None or again_same is None or not torch.equal(before, again_same):
        return False  # it keeps something of its calls
    again.draw_last_item(made)
    after = runner.run(case, given=made).pooled
    if after is None or before.shape != after.shape:
        return False
    return not torch.allclose(before[:-1], after[:-1])


def _mixes(runner: Runner, case: Case, axis: int) -> bool:
    made = arguments.make(runner.call, case)
    if len({tensor.shape[axis] for tensor in made.tensors.values()}) > 1:
        return True  # lengths, of which items have none
    return _follows(runner, case, axis)


def is_another_switch(runner: Runner, causal: Run, takes_mask: bool) -> bool:
    """Whether a class that is constructed to be causal leaves that to a mask that it is
    given, or does something else by the switch."""
    plain = runner.run(replace(causal.case, built_causal=False))
    if causal.refused or plain.refused:
        return takes_mask
    if plain.out.isfinite().all() and not causal.out.isfinite().all():
        return False  # as where +inf is added
    if torch.allclose(plain.out, causal.out):
        return takes_mask
    return sees_later_keys(runner, causal, first=True)


def sees_later_keys(runner: Runner, base: Run, first: bool = False) -> bool:
    """Whether earlier positions of a sequence, or the first, follow the last one."""
    case = base.case
    axis = cases.query_axis(case)
    is_plain = case.layout in (cases.LAYER, cases.SEQUENCE_FIRST)
    return is_plain and _follows(runner, case, axis % 3, first)


def overwrites_mode(runner: Runner, base: Run) -> bool:
    """Whether a call in evaluation that leaves out its flag sets `self.training` by it,
    and so drops weights."""
    flags = [
        p for p in runner.call.parameters if runner.call.roles[p.name] == "training"
    ]
    text = text_of_entry(runner.subject)
    if not any(
        p.default is True and re.search(rf"self\.training\s*=\s*{p.name}\b", text)
        for p in flags
    ):
        return False
    case = replace(base.case, gradients=False, training=False, own_dropout=0.0)
    first, other = (runner.run(case, seed=seed) for seed in (0, 1))
    if first.refused or other.refused:
        return False
    return not torch.equal(first.out, other.out)


def is_causal_in_training_alone(runner: Runner, base: Run) -> bool:
    """Whether queries see later keys in evaluation, and not in training, whose dropout is
    left out."""
    text, case = runner.subject.source, replace(base.case, gradients=False)
    is_plain = case.layout in (cases.LAYER, cases.SEQUENCE_FIRST)
    if not (is_plain and _IN_TRAINING.search(text) and _SEES_EARLIER.search(text)):
        return False
    if _ONE_BY_ONE.search(text):
        return False  # in use there are no later tokens
    axis = cases.query_axis(case) % 3

    def change_first(sequence: Tensor) -> None:
        sequence.select(axis, 0).neg_()

    training = replace(case, training=True, built_whole=True)
    runs = again.twice(runner, training, change_first)
    last = [run.out.select(axis, -1) for run in runs or ()]
    if len(last) < 2 or torch.allclose(*last):
        return False  # nobody knows what it does in training
    return _follows(runner, case, axis) and not _follows(runner, training, axis)


def _follows(runner: Runner, case: Case, axis: int, first: bool = False) -> bool:
    """Whether others of this axis, of what comes out, or the first, change with the last
    of what is given."""

    def change_last(sequence: Tensor) -> None:
        last = sequence.select(axis, sequence.shape[axis] - 1)
        last.copy_(torch.randn_like(last))

    runs = again.twice(runner, replace(case, gradients=False), change_last)
    if runs is None or runs[0].out.dim() <= axis:
        return False
    others = 1 if first else runs[0].out.shape[axis] - 1
    before, after = (run.out.narrow(axis, 0, others) for run in runs)
    return not torch.allclose(before, after)


def may_see_later_keys(runner: Runner, base: Run) -> bool:
    """Whether nothing hides later keys, by all that is known: it makes no causal mask
    and takes none, or is of an encoder."""
    subject, takes = runner.subject, runner.call.takes
    said = f"{subject.name} {text_of_file(subject)}"
    of_encoder = _SEES_ALL.search(said) and not _SEES_EARLIER.search(said)
    is_open = not (takes("mask") or takes("is_causal") or base.recorder.has_triangle)
    return is_open or bool(of_encoder)


def follow_another_query(runner: Runner, base: Run) -> str | None:
    """Whether the bias of a query changes with the one beside it, and with no other: at
    "later" keys alone, which a mask may hide, or at "all". Positions that the code is
    handed are ours, and may be too few."""
    bias = _bias(base)
    is_ours = runner.call.takes("positions") or runner.call.takes("rotation")
    if bias is None or is_ours or base.case.style.numpy:
        return None
    if bias.shape[1] != bias.shape[2] or bias.shape[1] < 4:
        return None
    case = base.case
    made = arguments.make(runner.call, case)
    sequence = cases.as_sequence(made.tensors["query"], case)
    place = sequence.shape[cases.query_axis(case)] // 2
    sequence.select(cases.query_axis(case), place)[..., ::2] += 1.0
    changed = _bias(runner.run(case, given=made))
    if changed is None or changed.shape != bias.shape:
        return None
    off = (changed - bias).abs().amax(0) > 1e-6
    off[:, place] = off[place] = False
    rows = off.any(1).nonzero().flatten().tolist()
    if len(rows) != 1 or abs(rows[0] - place) != 1:
        return None
    return "all" if off.tril().any() else "later"


def _bias(run: Run) -> Tensor | None:
    """(N, Lq, Lk), with 0 where a mask hides the key; none where nothing is added."""
    found = run.recorder.cores.found if run.recorder is not None else []
    if len(found) != 1 or found[0].bias is None or found[0].scores is None:
        return None
    bias = torch.where(found[0].scores.softmax(-1) < _HIDDEN, 0.0, found[0].bias)
    return bias if bias.dim() == 3 and bias.abs().max() > 1e-6 else None
