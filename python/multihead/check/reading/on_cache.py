# SPDX-License-Identifier: MIT
"""The verdict on a token that is computed on the keys and values of calls before."""

from dataclasses import replace

import torch
from torch import Tensor

from ..calls import arguments
from ..capture.cached import is_told_positions
from ..capture.runner import Run
from ..report import Finding
from .apart import Judge
from .ways import Reading

# Structures that the engine reads from a trace, which this run has not, or in which it
# counts positions from the first query.
_OF_A_TRACE = {
    "rotary_positions",
    "position_bias",
    "falling_bias",
    "rising_bias",
    "bias_of_late_keys",
    "bias_of_early_keys",
    "softcap",
}
_DIFFERS = Finding(
    "cache_differs",
    "A token on the keys and values of calls before gives something else than in one "
    "pass over all tokens.",
    "Keep what one pass computes: keys turned by the positions that they have in the "
    "whole sequence, the new ones behind the old ones, all that is seen, and each query "
    "at its own position.",
)


def judge(reading: Reading, judged: Judge) -> None:
    """Of code that is right in one pass: whether it gives the same on a cache; and,
    where the engine can tell, whether that is attention."""
    assert reading.verdict is not None
    run = compare(reading)
    assumed = {fact["name"] for fact in reading.verdict["assumptions"]}
    if run is not None and not assumed & _OF_A_TRACE:
        judged(reading, [*reading.kept, run])


def judge_steps(reading: Reading) -> None:
    """Of code that is called once for each token: where only the keys that a query sees
    are others than those up to its own, that is the fault of its cache."""
    if reading.verdict is None or reading.is_right:
        return
    faults = reading.verdict.get("faults", [])
    sees_others = all(fault["stage"] == "masked scores" for fault in faults)
    if sees_others and (faults or _loses_tokens(reading)):
        reading.verdict = None
        reading.findings.append(_DIFFERS)


def _loses_tokens(reading: Reading) -> bool:
    """Whether some token makes no difference to one that comes later."""
    way = reading.way
    case = replace(way.base.case, gradients=False)
    outputs = []
    for changed in range(-1, case.sizes.queries - 1):
        made = arguments.make(way.call, case)
        if changed >= 0:
            made.tensors["query"][:, changed] += 1.0
        run = way.runner.run(case, given=made)
        if run.refused:
            return False
        outputs.append(run.out)
    first, *others = outputs
    kept = [
        (out - first)[:, position + 1 :].abs().amax(-1) > 0
        for position, out in enumerate(others)
    ]
    return not all(bool(of_token.all()) for of_token in kept)


def compare(reading: Reading) -> Run | None:
    """The last token on the keys and values of calls before, if the code takes these or
    keeps them, and gives the same in one pass; else that is a finding."""
    run = reading.way.runner.run_on_cache(reading.kept[0])
    if run is None or _is_close(run.out, run.in_one_pass):
        return run
    if is_told_positions(reading.way.call, reading.way.runner.subject.source):
        reading.findings.append(_DIFFERS)
    return None


def _is_close(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether they differ by rounding alone, of float32 perhaps, as tables have it."""
    assert x is not None and y is not None
    return torch.allclose(x, y, rtol=1e-4, atol=1e-5)
