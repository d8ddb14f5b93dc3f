# SPDX-License-Identifier: MIT
"""Where nothing explains all runs: some of them, which hide what is to be said of the
others, are set apart."""

from collections.abc import Callable

from ..calls import cases
from ..capture.runner import Run
from ..report import Finding
from .suite import WIDE_MASKS, Cases, not_finite
from .ways import Reading

# Puts the verdict on these runs into the reading.
Judge = Callable[[Reading, list[Run]], None]


def judge(reading: Reading, runs: Cases, judged: Judge) -> None:
    """The verdict on a part of the runs, if it says more than that on all of them."""
    for attempt in (_without_chance, _without_wide_masks, _finite):
        if reading.verdict and reading.verdict["verdict"] == "unknown":
            attempt(reading, runs, judged)


def _without_chance(reading: Reading, runs: Cases, judged: Judge) -> None:
    """What a mask does that fits by chance may hide the fault of all others."""
    kept = [run for run in runs.kept if run not in runs.by_chance]
    if len(kept) < len(runs.kept):
        whole = reading.verdict
        judged(reading, kept)
        reading.verdict = reading.verdict if reading.faults else whole


def _without_wide_masks(reading: Reading, runs: Cases, judged: Judge) -> None:
    """Where masks (Lq, Lk) are right, and nothing explains what becomes of others,
    those may only be taken by chance, as text often says."""
    assert reading.verdict is not None
    failing = {c["name"] for c in reading.verdict["cases"] if not c["agrees"]}
    wrong = [run for run in runs.kept if run.case.name in failing]
    kinds = {run.case.mask for run in wrong}
    taken = {run.case.mask for run in runs.kept} - kinds
    if not kinds or not kinds <= set(WIDE_MASKS) or "rows" not in taken:
        return
    whole = reading.verdict
    judged(reading, [run for run in runs.kept if run not in wrong])
    if reading.is_right:
        shape = cases.MASKS[wrong[0].case.mask]
        sentence = f"Masks {shape} are taken, and do something else than block keys."
        remedy = "If they are meant to be given, too: broadcast them to the scores."
        reading.findings.append(Finding("limit", sentence, remedy, kind="limit"))
    else:
        reading.verdict = whole


def _finite(reading: Reading, runs: Cases, judged: Judge) -> None:
    """NaN in some runs is wrong by itself, and hides what is to be said of others:
    these are judged alone, where that explains them. What only a guess has made
    infinite is none."""
    found = not_finite(runs.kept)
    reading.findings += found
    if not_finite(runs.kept[:1]):
        reading.verdict = None  # that is what is wrong, mask or no mask
    elif found and not reading.meaning.why:
        whole = reading.verdict
        judged(reading, [run for run in runs.kept if run.out.isfinite().all()])
        if not reading.faults and not reading.is_right:
            reading.verdict = whole


def without_masks(reading: Reading, judged: Judge) -> None:
    """A fault of calls without masks is one, whatever becomes of masks. That is for the
    best reading alone: another may explain what masks do."""
    plain = [run for run in reading.kept if not run.arguments.masks]
    if not plain or len(plain) == len(reading.kept):
        return
    whole = reading.verdict
    judged(reading, plain)
    if reading.faults:
        sentence = "What it makes of masks, this does not explain."
        remedy = "Repair this first, then check it again."
        left = Finding("masks_left", sentence, remedy, kind="remark")
        reading.findings.append(left)
    else:
        reading.verdict = whole
