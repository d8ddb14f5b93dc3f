# SPDX-License-Identifier: MIT
"""The verdict on a token that is computed on the keys and values of calls before."""

import re
from dataclasses import replace

import torch
from torch import Tensor

from ..calls import arguments
from ..capture.cached import is_told_positions
from ..capture.runner import Run
from ..report import Finding
from . import flaws
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
_OF_KEYS = re.compile(
    r"self\.(\w+_)?((k|v|kv|keys?|values?)_?cache|cache_?(k|v|kv|keys?|values?))\b",
    re.I,
)
_DIFFERS = Finding(
    "cache_differs",
    "A token on the keys and values of calls before gives something else than in one "
    "pass over all tokens.",
    "Keep what one pass computes: keys turned by the positions that they have in the "
    "whole sequence, the new ones behind the old ones, all that is seen, and each query "
    "at its own position.",
)
_PREPENDS = Finding(
    "cache_differs",
    "New keys and values stand before those of calls before, so that of several tokens "
    "at once some see others than the keys up to their own.",
    "Join them in the order of their positions: torch.cat((past, new), dim=-2).",
)


def judge(reading: Reading, judged: Judge) -> None:
    """Of code that is right in one pass: whether it gives the same on a cache; and,
    where the engine can tell, whether that is attention."""
    assert reading.verdict is not None
    run = compare(reading)
    if run is None:
        if _keeps_for_later(reading):
            reading.takes_one_token = True
            judged(reading, reading.kept)
        return
    several = reading.way.runner.run_on_cache(reading.kept[0], together=True)
    differs = several is not None and not _is_close(several.out, several.in_one_pass)
    if differs and run.prepends:
        reading.findings.append(_PREPENDS)
        return
    differs |= _is_open(reading)
    reading.takes_one_token = differs
    assumed = {fact["name"] for fact in reading.verdict["assumptions"]}
    kept = reading.kept if assumed & _OF_A_TRACE else [*reading.kept, run]
    if differs or len(kept) > len(reading.kept):
        judged(reading, kept)


def _keeps_for_later(reading: Reading) -> bool:
    """Whether it has a place for keys and values of later calls, as in another mode, and
    tokens see later ones: generating, they will not have them."""
    source = reading.way.runner.subject.source
    return _OF_KEYS.search(source) is not None and _is_open(reading)


def _is_open(reading: Reading) -> bool:
    """Whether tokens see later ones of their own sequence, and nothing can block them."""
    way = reading.way
    is_open = not way.call.takes("mask") and way.base.case.relation == "self"
    return is_open and flaws.sees_later_keys(way.runner, way.base)


def judge_steps(reading: Reading) -> None:
    """Of code that is called once for each token: where only the keys that a query sees
    are others than those up to its own, that is the fault of its cache."""
    if reading.verdict is None or reading.is_right:
        return
    faults = reading.verdict.get("faults", [])
    if any(fault["stage"] != "masked scores" for fault in faults):
        return
    seen = _seen_tokens(reading)
    if seen is None or (bool(seen.all()) and not faults):
        return
    places = torch.arange(len(seen))
    window = int(seen[:, -1].sum())  # what the last sees of those before
    newest = places - places[:, None] < window
    is_window = 0 < window < len(seen) and torch.equal(seen, newest)
    reading.verdict = None
    reading.findings.append(_of_window(window + 1) if is_window else _DIFFERS)


def _of_window(count: int) -> Finding:
    return Finding(
        "argument_guessed",
        f"Of the tokens before it keeps the newest, {count} with its own, which is a "
        "window that nothing states.",
        "Check it with its window as an argument of the constructor, sliding_window.",
        kind="unchecked",
    )


def _seen_tokens(reading: Reading) -> Tensor | None:
    """(L - 1, L - 1): whether token j makes a difference to token i + 1, where it is
    not later; true where it is."""
    way = reading.way
    case = replace(way.base.case, gradients=False)
    outputs = []
    for changed in range(-1, case.sizes.queries - 1):
        made = arguments.make(way.call, case)
        if changed >= 0:
            made.tensors["query"][:, changed] += 1.0
        run = way.runner.run(case, given=made)
        if run.refused:
            return None
        outputs.append(run.out)
    first, *others = outputs
    changes = [(out - first).abs().amax((0, -1)) > 0 for out in others]
    seen = torch.stack(changes)[:, 1:]
    return seen | ~torch.ones_like(seen).triu()


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
