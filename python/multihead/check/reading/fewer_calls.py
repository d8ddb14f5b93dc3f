# SPDX-License-Identifier: MIT
"""Calls that code takes by chance, with masks of other shapes or meanings than the one
that it is for, or with more keys than it goes through: what is wrong with these alone is
judged without them."""

import copy
from dataclasses import replace

from ..capture.runner import Run
from ..subject.masking import makes_causal_masks
from .apart import Judge
from .ways import Reading


def judge(reading: Reading, kept: list[Run], judged: Judge) -> None:
    """The verdict on the calls that it is for, if it has a fault with the others."""
    call, subject = reading.way.call, reading.way.runner.subject
    faults = set(reading.faults)
    if faults == {"mask_inverted", "padding_inverted"} and not call.takes("padding"):
        # One parameter, for padding.
        judged(reading, [run for run in kept if "mask" not in run.arguments.masks])
    if faults == {"mask_taken_for_causal"} and makes_causal_masks(call, subject):
        reading.takes_causal_masks = True
        judged(reading, [run for run in kept if run.case.mask is None])
    if not faults and reading.verdict is not None and not reading.is_right:
        _judge_at_equal_lengths(reading, kept, judged)


def _judge_at_equal_lengths(reading: Reading, kept: list[Run], judged: Judge) -> None:
    """Where calls alone are wrong that have more keys than queries: the verdict on as
    many of both, if that is right. A loop over blocks of keys may end where queries
    do."""
    wrong = {case["name"] for case in reading.verdict["cases"] if not case["agrees"]}
    runs = []
    for run in kept:
        if run.case.name in wrong:
            if run.case.keys <= run.case.sizes.queries:
                return
            run = _at_equal_length(reading, run)
        if not run.refused:
            runs.append(run)
    if not runs or not wrong:
        return
    before = copy.copy(vars(reading))
    reading.leaves_keys = True
    judged(reading, runs)
    if not reading.is_right:
        vars(reading).update(before)


def _at_equal_length(reading: Reading, run: Run) -> Run:
    sizes, name = (
        replace(run.case.sizes, queries=run.case.keys),
        f"{run.case.name}, Lq = Lk",
    )
    case = replace(run.case, name=name, sizes=sizes, relation="equal")
    return reading.way.runner.run(case)
