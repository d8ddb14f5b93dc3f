# SPDX-License-Identifier: MIT
"""Output that is not finite, or jumps, and whose fault that is."""

from dataclasses import replace

import torch

from ..calls import cases
from ..calls.cases import Case
from ..capture.runner import Run, Runner
from ..report import Finding
from . import again

ZEROS_BLOCKED = Finding(
    "zero_scores_blocked",
    "A score of exactly 0 is taken for a blocked one: a token of zeros, as padding is "
    "embedded, gives something else than one of very small numbers.",
    "Block by the mask, not by what it leaves: scores.masked_fill(mask, float('-inf')).",
)
_TINY = 1e-30  # less than what any norm adds


def not_finite(kept: list[Run]) -> list[Finding]:
    for run in kept:
        if not may_be_blind(run) and not run.out.isfinite().all():
            share = float((~run.out.isfinite()).double().mean())
            finding = Finding(
                "not_finite",
                f"{share:.0%} of the output is NaN or infinite in the case "
                f"{run.case.name!r}, in which every query sees a key.",
                "Print each intermediate tensor's `isfinite().all()`: the first "
                "that is false is where to look.",
            )
            return [finding]
    return []


def may_be_blind(run: Run) -> bool:
    """Whether its mask leaves some query without a key, read in one of both ways."""
    case, kind = run.case, run.case.mask
    square = case.keys <= case.sizes.queries
    return kind == "blocked row" or (kind in ("causal", "later keys") and square)


def of_either_width(runner: Runner, run: Run) -> Run:
    """The run, or the same in float32 where that is finite and it is not: the least number
    of float64 times a mask that is made float32 is infinite."""
    case = run.case
    if run.refused or case.dtype is not torch.float64 or run.out.isfinite().all():
        return run
    narrow = runner.run(replace(case, dtype=torch.float32))
    is_finite = not narrow.refused and bool(narrow.out.isfinite().all())
    return narrow if is_finite else run


def blocks_zeros(runner: Runner, run: Run) -> bool:
    """Whether scores that are 0 by themselves are blocked: with a first token of zeros
    it does not return what it returns with one of nearly zeros. run: what came to its
    end."""
    if run.recorder is None or not run.recorder.asks_for_zeros:
        return False
    if run.case.dtype is not torch.float64:
        return False
    case = replace(run.case, gradients=False)
    near, zero = (_with_first(runner, case, by) for by in (_TINY, 0.0))
    if near is None or zero is None:
        return False
    return not torch.allclose(near, zero, rtol=1e-3, atol=1e-3, equal_nan=True)


def _with_first(runner: Runner, case: Case, factor: float) -> torch.Tensor | None:
    """What comes of a sequence whose first position is multiplied by this."""

    def change(x: torch.Tensor) -> None:
        x.select(axis, 0).mul_(factor)

    axis = cases.query_axis(case)
    both = again.twice(runner, case, change)
    return None if both is None else both[1].out
