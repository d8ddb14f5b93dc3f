# SPDX-License-Identifier: MIT
"""Residual connections of blocks (He et al., 2015). What a block returns follows what it
is given even where the matrices of one of its parts are next to 0: the sequence goes
around it, in the block or in the part. If it does not, all has to pass that part."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..calls import cases
from ..capture.runner import Run, Runner
from ..report import Finding
from ..subject.documented import docstrings
from . import again

# Of others nobody knows that they have one.
_BLOCK = re.compile(r"(?:transformer|encoder|decoder)\w*(?:layer|block)|block$", re.I)
_NEXT_TO_NOTHING = 1e-100  # a run draws matrices that are all 0 anew
_ATTENDS = re.compile(r"attn|attention|mha\b|multi_?head", re.I)


# What says that it adds.
_PROMISES = re.compile(
    r"residual|add *(?:&|and) *norm|all you need|(?:pre|post)[- ]?(?:norm|ln)\b|\bx *\+",
    re.I,
)


def lost(runner: Runner, base: Run) -> Finding | None:
    """What is said of a block around one of whose attentions nothing goes, as it does
    around another of its parts."""
    case = replace(base.case, gradients=False)
    is_plain = case.layout in (cases.LAYER, cases.SEQUENCE_FIRST)
    if not is_plain or not _BLOCK.search(runner.subject.name):
        return None
    target = runner.target_of(case, may_hang=False)[0]
    if not isinstance(target, nn.Module):
        return None
    parts = {name for name, part in target.named_children() if _matrices(part)}
    kinds = {name: type(getattr(target, name)).__name__ for name in parts}
    attentions = [
        n for n, k in kinds.items() if _ATTENDS.search(n) or _ATTENDS.search(k)
    ]
    if not attentions or len(parts) < 2:
        return None
    around = {name: _goes_around(runner, case, target, name) for name in attentions}
    alone = [name for name, goes in around.items() if goes is False]
    if not alone:
        return None
    if runner.call.takes("context") or runner.call.takes("key"):
        # What reads a context may take the place of the sequence on purpose.
        promises = _PROMISES.search(" ".join(docstrings(runner.subject)))
        return _lost(alone) if promises and any(around.values()) else None
    others = (_goes_around(runner, case, target, n) for n in parts - set(attentions))
    return _lost(alone) if any(around.values()) or any(others) else None


OF_CONTEXT = Finding(
    "residual_of_context",
    "What goes around its attention is the sequence that it reads, not the one that "
    "asks: each query gets what stands at its place in the other sequence.",
    "Add what asks: y = y + attention(norm(y), x), not x + attention(norm(y), x).",
)


def is_of_context(runner: Runner, base: Run) -> bool:
    """Whether, with matrices next to 0, what comes out at a place follows the sequence
    that is read at that place alone, and not the one that asks."""
    case = replace(base.case, gradients=False, mask=None, padding=None)
    if case.layout != cases.LAYER or case.relation != "equal":
        return False  # lengths that differ have no common places
    if not _asks(base):
        return False  # what is taken for the context may be what asks
    target = runner.target_of(case, may_hang=False)[0]
    if not isinstance(target, nn.Module) or not _matrices(target):
        return False

    def redraw_last(sequence: Tensor) -> None:
        sequence[:, -1].copy_(torch.randn_like(sequence[:, -1]))

    with _next_to_nothing(_matrices(target) + _biases(target)):
        runs = [
            again.twice(runner, case, redraw_last, (role,)) for role in ("key", "query")
        ]
    if None in runs:
        return False
    by_key, by_query = (
        [not torch.allclose(b[:, p], a[:, p]) for p in range(b.shape[1])]
        for b, a in ((before.out, after.out) for before, after in runs)
    )
    return not any(by_query) and by_key[-1] and not any(by_key[:-1])


def _asks(run: Run) -> bool:
    """Whether queries come of what is taken for that, and keys of the other sequence."""
    found = run.recorder.cores.found if run.recorder else []
    return bool(found) and all(
        one.sources[0] == {"query"} and one.sources[1] == {"key"} for one in found
    )


def _lost(names: list[str]) -> Finding:
    quoted = " and ".join(f"`{name}`" for name in names)
    return Finding(
        "residual_lost",
        f"Nothing goes around {quoted}: what comes of it takes the place of the "
        "sequence, which is added elsewhere in the block.",
        "Add what it was given: x = x + attention(norm(x)), or, with the norm behind, "
        "x = norm(x + attention(x)).",
    )


def _matrices(part: nn.Module) -> list[nn.Parameter]:
    known = (w for w in part.parameters() if not nn.parameter.is_lazy(w))
    return [w for w in known if w.dim() > 1 and w.is_floating_point()]


def _goes_around(
    runner: Runner, case: cases.Case, target: nn.Module, name: str
) -> bool | None:
    """Whether what comes out follows the sequence with no matrix in this part; None
    where that cannot be told."""

    def redraw(sequence: Tensor) -> None:
        sequence.copy_(torch.randn_like(sequence))

    with _next_to_nothing(_matrices(getattr(target, name))):
        runs = again.twice(runner, case, redraw, ("query",))
    if runs is None:
        return None
    before, after = (run.out for run in runs)
    return not torch.allclose(before, after)


def _biases(part: nn.Module) -> list[nn.Parameter]:
    """What a gate multiplies where matrices are next to 0."""
    named = part.named_parameters()
    return [w for name, w in named if w.dim() == 1 and name.endswith("bias")]


@contextlib.contextmanager
def _next_to_nothing(weights: list[nn.Parameter]) -> Iterator[None]:
    kept = [(weight, weight.detach().clone()) for weight in weights]
    try:
        with torch.no_grad():
            for weight, _ in kept:
                weight.mul_(_NEXT_TO_NOTHING)
        yield
    finally:
        with torch.no_grad():
            for weight, numbers in kept:
                weight.copy_(numbers)
