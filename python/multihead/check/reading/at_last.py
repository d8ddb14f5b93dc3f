# SPDX-License-Identifier: MIT
"""What is said at last of code that nothing else explains: the verdict on what it does
from its scores on, whatever these are, or on heads that attend to something else than the
positions of its input."""

import functools
import re
from collections.abc import Iterable
from typing import Any

from ..calls import cases
from ..calls.forms import splits_batch
from ..capture import core as found_in
from ..capture.core import Core
from ..capture.runner import Run
from ..report import Finding
from ..subject.documented import docstrings
from . import across, core, flaws, idle, instead, observation, reads, residuals
from .observation import NO_WEIGHTS
from .ways import Reading

# Channels of XCiT (El-Nouby et al., 2021) and Restormer (Zamir et al., 2022), frames of
# TimeSformer (Bertasius et al., 2021), rows and columns of axial attention.
_ATTENDS_ELSEWHERE = re.compile(
    r"channel|covariance|\bxca\b|mdta|frame|temporal|axial|per[- ]pixel|spatial", re.I
)
_MIXES_POSITIONS = re.compile(r"conv|lstm|gru\b|rnn|cumsum|roll\(|pool\d|norm1d", re.I)
_MASKS_LEFT = Finding(
    "limit",
    "What it makes of masks is not judged, as its heads attend to something else than the "
    "positions of its input.",
    "Check the part that is attention by itself.",
    kind="limit",
)
_OF_ALL = "one_projection_for_all"  # says of each matrix that it is left out
_OF_SCORES = ("no product of queries and keys",)


def settle(
    reading: Reading, others: Iterable[Reading], promises: dict[str, str]
) -> list[Finding]:
    """What is said in the place of its verdict; none where that stands, which it may
    change for one on its heads. others: of the same calls, whose masks mean something
    else."""
    said, before = instead.of_verdict(reading), reading.verdict
    if not _is_open(reading, said):
        if "input_added" in reading.faults:  # which says the same
            same = residuals.OF_CONTEXT
            reading.findings = [f for f in reading.findings if f is not same]
        if reading.faults and not said and _OF_ALL not in reading.faults:
            # A matrix that is left out for another, which alone would be shared.
            text = reading.way.runner.subject.source
            left = idle.replaced(reading.way.base, text)
            reading.findings += [f for f in left if f.name not in reading.faults]
        return said
    reading.verdict = _judge(reading, promises)
    if reading.faults and not reading.meaning.additive:
        _read_as_added(reading, others, promises)
    reading.verdict = reading.verdict or before
    if reading.verdict is before:
        return [reads.HIDDEN_KEYS_READ] if _leaks(reading) else said
    mixed = flaws.mixed_items(reading.way.runner, reading.way.base)
    if across.attends_over_items(reading.way.runner, reading.way.base):
        mixed = flaws.ITEMS_MIXED
    if mixed is not None or instead.of_verdict(reading):
        reading.verdict = before
        return said if mixed is None else [mixed]
    reading.findings = [f for f in reading.findings if f.name != NO_WEIGHTS]
    is_elsewhere = "attends_elsewhere" in {
        one["name"] for one in reading.verdict["assumptions"]
    }
    if is_elsewhere and any(run.arguments.masks for run in reading.kept):
        reading.findings.append(_MASKS_LEFT)
    return []


def _read_as_added(
    reading: Reading, others: Iterable[Reading], promises: dict[str, str]
) -> None:
    """The better verdict, if its masks are meant to be added to the scores."""
    for other in (one for one in others if one.meaning.additive and one.kept):
        later = core.judge([other], promises) or _judge(other, promises)
        if later is not None and observation.is_better(later, reading.verdict or {}):
            reading.verdict = later
            reading.meaning, reading.kept = other.meaning, other.kept


def _leaks(reading: Reading) -> bool:
    """Whether it reads keys behind lengths; not where another layer may do that."""
    runner, text = reading.way.runner, reading.way.runner.subject.source
    if _MIXES_POSITIONS.search(text) or runner.call.is_guessed("lengths"):
        return False
    return reads.reads_behind_lengths(runner, reading.kept)


def _is_open(reading: Reading, said: list[Finding]) -> bool:
    """Whether nothing but that it is not understood is said, or nothing of code that says
    of itself that it attends to something else."""
    subject = reading.way.runner.subject
    if reading.faults == ["batch_and_sequence_exchanged"] and splits_batch(subject):
        return True
    if not reading.kept or reading.gains:
        return False
    if any(finding.name == "random" for finding in reading.findings):
        return False
    text = " ".join([subject.name, *docstrings(subject)])
    is_other = _ATTENDS_ELSEWHERE.search(text) is not None
    if said:
        kinds = _OF_SCORES if not is_other else (*_OF_SCORES, "weights of features")
        return all(
            f.name == "other_layers"
            or (f.name == "outside" and any(kind in f.sentence for kind in kinds))
            for f in said
        )
    verdict = (reading.verdict or {}).get("verdict")
    return verdict is None or (verdict == "unknown" and is_other)


def _judge(reading: Reading, promises: dict[str, str]) -> dict[str, Any] | None:
    quiet = [run for run in reading.kept if not run.case.training]
    scored = [(run, one) for run in quiet if (one := _scored(run)) is not None]
    of_heads = core.judge([reading], promises)
    if scored and len(scored) == len(quiet) and of_heads is None:
        best = core.of_these(reading, scored, promises, core.LITTLE_EFFORT)
        if best is not None:
            return best
    plain = [run for run in quiet if not run.arguments.masks]
    if plain and core.of_run(plain[0]) is not None:
        return None  # its positions are known
    parts = [_elsewhere(run) for run in plain]
    if not parts or not parts[0] or len({len(part) for part in parts}) > 1:
        return None
    judged = [
        _of_attention(reading, plain, list(each), promises) for each in zip(*parts)
    ]
    known = [one for one in judged if one is not None]
    if len(known) < len(judged):
        return None
    wrong = [one for one in known if one["faults"]]
    return wrong[0] if wrong else functools.reduce(core.both, known)


def _of_attention(
    reading: Reading,
    runs: list[Run],
    cores: list[Core | None],
    promises: dict[str, str],
) -> dict[str, Any] | None:
    found = [(run, one) for run, one in zip(runs, cores) if one is not None]
    if len(found) < len(runs) or core.are_one(reading, *found[0]):
        return None
    return core.of_these(reading, found, promises, core.LITTLE_EFFORT)


def _scored(run: Run) -> Core | None:
    batch = 1 if cases.unbatched(run.case) else run.case.sizes.batch
    scored = run.recorder.scored
    if not run.recorder.cores.reaches(run.out):
        return None
    found = scored.of_products or scored.found
    return found_in.joined(found, batch, run.case.sizes.queries)


def _elsewhere(run: Run) -> list[Core | None]:
    """Each attention of a run, whatever its positions are."""
    recorder = run.recorder
    if not recorder.cores.reaches(run.out):
        return []
    several = found_in.attentions(recorder.cores.found) or [recorder.scored.found]
    found: list[Core | None] = []
    for cores in several:
        one = found_in.elsewhere(cores)
        # Of one sequence along several axes, each by itself.
        apart = [found_in.elsewhere([core]) for core in cores] if one is None else [one]
        found += apart
    return found
