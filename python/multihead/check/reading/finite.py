# SPDX-License-Identifier: MIT
"""Output that is not finite, and whose fault that is."""

from dataclasses import replace

import torch

from ..capture.runner import Run, Runner
from ..report import Finding


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
