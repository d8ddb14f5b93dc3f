# SPDX-License-Identifier: MIT
"""Code that has two ways to compute attention, one by a fused function and one step by
step, and an attribute that chooses: `if self.flash:`. Calls show the one that is on; the
other is run beside it."""

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..calls import cases
from ..capture.runner import Run, Runner
from ..report import Finding
from . import flaws
from .ways import Reading, Way

_FUSED = re.compile(
    r"(^|_)(flash|fused|sdpa?|xformers|efficient|mem)(_|$|attn|att)", re.I
)
_REFUSED, _NUMBERS = "refused", "numbers"
_ON_PURPOSE = ("AssertionError", "NotImplementedError", "ValueError", "ImportError")
_CLOSE = 1e-6  # of float64, which some fused functions narrow on the way


def settle(
    reading: Reading,
    better: Callable[[None, Way], Reading],
    judge_parts: Callable[[Reading], None],
) -> Reading:
    """The reading of the other way to compute it, if that has a fault; else this one,
    with what is to be said of it."""
    switched = _other(reading.way)
    base = switched.run(reading.way.base.case) if switched else None
    if base is None or base.refused:
        return reading
    difference = _difference(switched, reading.kept)
    if difference is None:
        return reading
    other = better(None, replace(reading.way, runner=switched, base=base))
    judge_parts(other)
    if set(other.faults) == {"mask_added"}:
        return reading  # both add the numbers that are meant
    if other.faults or flaws.MASK_AFTER_SOFTMAX in other.findings:
        return other
    is_same = other.is_right and other.meaning.stated == reading.meaning.stated
    if difference == _REFUSED or not is_same:
        (name,) = switched.switched
        reading.findings.append(_disagree(name))
    return reading


def _disagree(name: str) -> Finding:
    return Finding(
        "paths_disagree",
        f"It has two ways to compute its attention, which `{name}` chooses between, and "
        "they do not return the same for the same call.",
        "Compare both with scaled_dot_product_attention, whose bool masks are True where "
        "a query may attend; masked_fill fills where its mask is True.",
    )


def _other(way: Way) -> Runner | None:
    """One whose instances take the other way; None where there is one way."""
    runner = way.runner
    target, _ = runner.target_of(way.base.case, may_hang=True)
    if not isinstance(target, nn.Module):
        return None
    for name, value in vars(target).items():
        asked = rf"\bif\s+(?:not\s+)?(?:\(\s*)?self\.{name}\b"
        is_fused = type(value) is bool and _FUSED.search(name)
        if is_fused and re.search(asked, runner.subject.source):
            return runner.switching(name, not value)
    return None


def _difference(switched: Runner, kept: list[Run]) -> str | None:
    """Whether it breaks or returns something else in one of these calls; neither rows of
    masks that hide all keys nor draws count."""
    for run in kept:
        case = run.case
        blind, given = case.mask == "blocked row", case.name == "your inputs"
        if case.training or blind or given or case.dtype is torch.float32:
            continue
        beside = switched.run(case)
        if beside.refused:
            on_purpose = beside.findings[0].sentence.startswith(_ON_PURPOSE)
            if beside.findings[0].name == "raises" and not on_purpose:
                return _REFUSED
        elif not torch.allclose(*_seen(run, beside.out), rtol=_CLOSE, atol=_CLOSE):
            return _NUMBERS
    return None


def _seen(run: Run, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both outputs, without queries that may see no key."""
    axis, mask = cases.query_axis(run.case), run.arguments.masks.get("mask")
    outs = [out.detach().movedim(axis, 0) for out in (run.out, other)]
    if mask is not None and mask.ndim >= 2 and mask.shape[-2] == len(outs[0]):
        sees = ~cases.may_be_blind(mask)
        outs = [out[sees] for out in outs]
    return outs[0], outs[1]
