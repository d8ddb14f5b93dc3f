# SPDX-License-Identifier: MIT
"""Which keys each query reads, whatever computes it: tokens are changed one after the
other, and what comes out elsewhere is compared. It gives a name to code that no fault of
the catalogue explains.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..calls import arguments, cases
from ..calls.arguments import Arguments
from ..calls.cases import Case
from ..capture.runner import Run, Runner
from ..report import Finding
from . import again, wiring

POSITIONS_APART = Finding(
    "positions_apart",
    "No position reads another: what is returned for a token changes with that token "
    "alone, so that heads or features attend to each other, and not positions.",
    "The axis of positions must be the last but one where queries meet keys: "
    "q.transpose(1, 2) of (B, L, H, d), then q @ k.transpose(-2, -1) is (B, H, L, L).",
)
HIDDEN_KEYS_READ = Finding(
    "hidden_keys_read",
    "Queries read keys that lengths leave out, or that a mask hides, whichever value of "
    "it hides: what is returned for them changes with such a key.",
    "Fill the scores of hidden keys with -inf, before the softmax, and go on with what "
    "masked_fill returns. A mask of keys, (B, Lk), is mask[:, None, None, :] over scores "
    "(B, H, Lq, Lk); the keys behind lengths are torch.arange(Lk) >= lengths[:, None].",
)
DOCUMENTS_MIXED = Finding(
    "documents_mixed",
    "Documents in one sequence read each other: what is returned for a token changes "
    "with one that has another number.",
    "Block what has another number before the softmax: "
    "scores.masked_fill(ids[:, None, :, None] != ids[:, None, None, :], -inf).",
)
DOCUMENT_DIFFERS = Finding(
    "document_differs_alone",
    "A document gives something else beside a longer one than alone: what fills it up has "
    "a part in its weights.",
    "Block what fills it up before the softmax, with -inf; a mask of True and False is "
    "no number to add, and masked_fill leaves it True and False.",
)
PREFIX_MISREAD = Finding(
    "prefix_misread",
    "Given a prefix of two tokens, its queries do not see what they should: all of the "
    "prefix, and of what follows nothing behind themselves.",
    "Compare the places of keys with the length of the prefix: the query at i sees the "
    "key at j where (j < prefix[:, None, None]) | (j <= i[:, None]).",
)
INPUT_RETURNED = Finding(
    "input_returned",
    "It returns its input as it is: nothing of what it computes is in it.",
    "Return what attention gives, or the sum of both where a residual is meant.",
)
INPUT_UNREAD = Finding(
    "input_unread",
    "It returns the same whatever it is given: nothing of its input is read.",
    "Project the input itself, and nothing that only has its shape.",
)
_PREFIX = 2
_KINDS = ("rows", "causal", "rows of each item", "keys of each item")
_HIDES = re.compile(
    r"inf\b|1e-?\d+|finfo|masked_fill|-\d{4,}"
)  # what a text fills with
_MOSTLY = 0.6  # of the keys that are hidden
_MOST = 16  # keys, each of which takes a run
_ADDED = -1e3  # what hides, where masks are added
_CHANGED = 1e-9, 1e-4  # in float64, in float32


def astray(runner: Runner, base: Run, kept: list[Run]) -> Finding | None:
    """What is wrong about who reads whom."""
    if are_apart(runner, base):
        return POSITIONS_APART
    if "L" not in _axes(base.case):
        return None
    if base.case.sizes.queries < 3:
        return HIDDEN_KEYS_READ if reads_behind_lengths(runner, kept) else None
    if not _HIDES.search(runner.subject.source):
        return None  # a mask may be a bias, which hides nothing
    # Learned queries, for which the sequence stands, may be keys, too.
    own = [run for run in kept if run.case.relation == base.case.relation]
    return HIDDEN_KEYS_READ if any(_leaks(runner, run) for run in own) else None


def mixes_documents(runner: Runner, base: Run) -> bool:
    """Whether others follow the last token, which is a document by itself, or it follows
    the first."""
    call = runner.call
    name = call.parameter("documents") or call.parameter("bounds")
    case = replace(base.case, gradients=False)
    length = case.sizes.queries
    if name is None or "L" not in _axes(case) or case.keys != length or length < 3:
        return False
    shape = (length,) if cases.unbatched(case) else (case.sizes.batch, length)
    alone = torch.ones(shape, dtype=torch.int64)
    alone[..., -1] = 2
    if call.takes("bounds"):
        alone = torch.tensor([0, length - 1, length], dtype=torch.int32)
    given = (
        arguments.make(call, case),
        _with_another(runner, case, "L", length - 1),
        _with_another(runner, case, "L", 0),
    )
    runs = []
    for made in given:
        if made is None:
            return False
        made.keywords[name] = alone.numpy() if case.style.numpy else alone.clone()
        runs.append(runner.run(case, given=made))
    before, last, first = runs
    if before.refused:
        return False
    of_last, of_first = (_changed(before, one, case) for one in (last, first))
    is_read = of_last is not None and bool(of_last[:-1].any())
    return is_read or (of_first is not None and bool(of_first[-1]))


def differs_alone(runner: Runner, base: Run) -> bool:
    """Whether the last token, as a document behind a longer one, gives something else
    than alone."""
    name, case = runner.call.parameter("bounds"), replace(base.case, gradients=False)
    length, axes = case.sizes.queries, _axes(case)
    if name is None or axes[:1] != ["L"] or case.keys != length or length < 3:
        return False
    short = replace(case, sizes=replace(case.sizes, queries=1, keys=1))
    both, alone = (arguments.make(runner.call, c) for c in (case, short))
    if both.tensors.keys() != alone.tensors.keys():
        return False
    for role, tensor in alone.tensors.items():
        tensor.copy_(both.tensors[role][-1:])
    both.keywords[name] = torch.tensor([0, length - 1, length], dtype=torch.int32)
    alone.keywords[name] = torch.tensor([0, 1], dtype=torch.int32)
    return again.last_differs(runner, case, both, alone)


def misreads_prefix(runner: Runner, base: Run) -> bool:
    """Whether queries see other keys than those of a prefix, and those up to their
    own."""
    name, case = runner.call.parameter("prefix"), replace(base.case, gradients=False)
    length = case.sizes.queries
    if name is None or "L" not in _axes(case) or case.relation == "cross":
        return False
    if cases.unbatched(case) or length < _PREFIX + 2:
        return False
    prefix = torch.full((case.sizes.batch,), _PREFIX)
    without, read = (_read(runner, case, {name: n}) for n in (prefix * 0, prefix))
    if without is None or read is None or torch.equal(without, read):
        return False  # it is for something else
    places = torch.arange(length)
    seen = (places < _PREFIX) | (places <= places[:, None])
    return bool((_off_diagonal(read, case) != _off_diagonal(seen, case)).any())


def reads_behind_lengths(runner: Runner, kept: list[Run]) -> bool:
    """Whether queries read keys that lengths leave out: no guess brings that about."""
    of_lengths = [run for run in kept if run.case.padding == "lengths"]
    return any(_leaks(runner, run) for run in of_lengths)


def are_apart(runner: Runner, base: Run) -> bool:
    """Whether no position reads another, in a call without masks."""
    case = replace(base.case, gradients=False, training=False)
    axes = _axes(case)
    if "L" not in axes or case.sizes.queries < 3 or case.mask or case.padding:
        return False
    call = runner.call
    if wiring.leaves_keys(base):
        return False
    if call.takes("context") and any(map(call.is_open, call.roles)):
        return False  # what is taken for the context may be what asks
    read = _read(runner, case)
    if read is None or _off_diagonal(read, case).any():
        return False
    return len(axes) < 3 or not _mixes_items(runner, case)


def returns_input(kept: list[Run]) -> bool:
    """Whether all runs return one of their sequences, bit for bit, of those that the
    code had copies of."""
    copied = [run for run in kept if run.leaves]
    return bool(copied) and all(
        any(_is_same(run.out, leaf) for leaf in run.leaves.values()) for run in copied
    )


def _is_same(out: Tensor, sequence: Tensor) -> bool:
    """sequence: as it was given, with its features first, perhaps."""
    ways = [sequence] + [sequence.movedim(1, -1)] * (sequence.dim() > 2)
    return any(torch.equal(out.flatten(), way.flatten()) for way in ways)


def reads_nothing(runner: Runner, kept: list[Run]) -> bool:
    """Whether other sequences make no difference."""
    base = next((run for run in kept if run.gradients), None)
    if base is None or any(one.any() for one in base.gradients.values()):
        return False

    def redraw(sequence: Tensor) -> None:
        sequence.copy_(torch.randn_like(sequence))

    runs = again.twice(runner, replace(base.case, gradients=False), redraw)
    return runs is not None and torch.equal(runs[0].out, runs[1].out)


def _axes(case: Case) -> list[str]:
    return case.layout.strip("()").split(", ")


def _leaks(runner: Runner, run: Run) -> bool:
    """Whether a run with a mask reads what it hides, and what it reads without it."""
    case = run.case
    is_plain = (
        case.training or case.is_causal or case.sizes.queries > cases.Sizes().keys
    )
    of_lengths = case.padding == "lengths" and case.mask is None
    hides = (case.mask in _KINDS) is not (case.padding == "mask")
    if is_plain or not (of_lengths or hides):
        return False
    case = replace(case, gradients=False)
    hidden = list(_hidden(arguments.make(runner.call, case), case))
    read = _read(runner, case) if hidden else None
    if read is None:
        return False
    # Of a few keys it may be meant, as of the first token in Longformer.
    shares = ((_off_diagonal(read, case) & one).sum() / one.sum() for one in hidden)
    # What lengths leave out may not be read at all.
    return min(shares, default=0.0) > (0.0 if of_lengths else _MOSTLY)


def _hidden(made: Arguments, case: Case) -> Iterator[Tensor]:
    """(Lq, Lk) of the first item, True where a key is hidden: one for each meaning that
    the mask may have."""
    if len(made.masks) != 1:
        return
    mask = next(iter(made.masks.values()))
    if case.padding == "lengths":  # True is a token
        yield ~mask[0].bool().expand(case.sizes.queries, -1)
        return
    is_of_items = case.padding == "mask" or case.mask.endswith("each item")
    mask = mask[0] if is_of_items else mask
    rows = mask if mask.dim() == 2 else mask.expand(case.sizes.queries, -1)
    if case.mask is not None and case.style.additive:
        yield rows < _ADDED
        return
    yield rows != 0
    yield rows == 0


def _off_diagonal(read: Tensor, case: Case) -> Tensor:
    """Without what a token makes of itself, which asks, too, in self-attention; nor of
    the one that stands beside it, where there are as many."""
    own = torch.eye(*read.shape, dtype=torch.bool)
    return read if case.relation == "cross" else read & ~own


def _read(
    runner: Runner, case: Case, others: Mapping[str, Tensor] | None = None
) -> Tensor | None:
    """(Lq, Lk) of the first item: whether what is returned for a query changes with a
    key. None where that cannot be told. others: arguments in the place of ours."""

    def run(made: Arguments) -> Run:
        made.keywords |= {name: one.clone() for name, one in (others or {}).items()}
        return runner.run(case, given=made)

    before = run(arguments.make(runner.call, case))
    if before.refused or case.keys > _MOST or not before.out.isfinite().all():
        return None
    columns = []
    for key in range(case.keys):
        made = _with_another(runner, case, "L", key)
        changed = made and _changed(before, run(made), case)
        if changed is None:
            return None
        columns.append(changed)
    return torch.stack(columns, 1)


def _with_another(
    runner: Runner, case: Case, axis: str, place: int
) -> Arguments | None:
    """The arguments with another token, or another item, in one place; None where there
    is no such place."""
    made = arguments.make(runner.call, case)
    roles = ("query",) if case.relation == "self" else ("key", "value")
    at = _axes(case).index(axis)
    for sequence in again.sequences(made, roles):
        if sequence.dim() <= at or sequence.shape[at] <= place:
            return None
        one = sequence.select(at, place)
        one.copy_(one.flip(-1) * 1.7 + 0.3)
    return made


def _changed(before: Run, after: Run, case: Case) -> Tensor | None:
    """(Lq,) of the first item, whether it changed."""
    if after.refused or after.out.shape != before.out.shape:
        return None
    off = (after.out - before.out).abs() > _CHANGED[before.out.dtype is torch.float32]
    axis = cases.query_axis(case) % off.dim()
    if not cases.unbatched(case):
        batch = 1 if case.layout.startswith("(L") else 0
        off = off.select(batch, 0)
        axis -= batch < axis
    return off.movedim(axis, 0).flatten(1).any(1)


def _mixes_items(runner: Runner, case: Case) -> bool:
    """Whether the first item changes with the second."""
    before = runner.run(case, given=arguments.make(runner.call, case))
    made = _with_another(runner, case, "B", 1)
    if before.refused or made is None:
        return True
    changed = _changed(before, runner.run(case, given=made), case)
    return changed is None or bool(changed.any())
