# SPDX-License-Identifier: MIT
"""Where nothing explains all runs: some of them, which hide what is to be said of the
others, are set apart."""

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ..calls import arguments, cases
from ..capture.runner import Run
from ..report import Finding
from ..subject.documented import written_masks
from ..subject.words import is_position_bias
from .finite import not_finite
from .suite import EQUAL_SIZES, WIDE_MASKS, Cases
from .ways import Reading

_IN_FLOAT32 = 1e-5
_LONGER = dict(batch=2, queries=11, keys=11)
# Puts the verdict on these runs into the reading.
Judge = Callable[[Reading, list[Run]], None]


def judge(reading: Reading, runs: Cases, judged: Judge) -> None:
    """The verdict on a part of the runs, if it says more than that on all of them."""
    attempts = (_without_chance, _without_wide_masks, _finite, _output_alone)
    for attempt in (*attempts, _with_turned_draws, _in_evaluation):
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
    failing = {c["name"] for c in reading.verdict["cases"] if _is_off(c)}
    wrong = [run for run in runs.kept if run.case.name in failing]
    wrong = [run for run in wrong if run.case.mask != "blocked row"]
    kinds = {run.case.mask for run in wrong}
    taken = {run.case.mask for run in runs.kept} - kinds
    if not kinds or not kinds <= set(WIDE_MASKS) or "rows" not in taken:
        return
    if kinds & written_masks(reading.way.call, reading.way.runner.subject):
        return  # its text says that it takes them
    whole = reading.verdict
    judged(reading, [run for run in runs.kept if run not in wrong])
    if reading.is_right:
        shape = cases.MASKS[wrong[0].case.mask]
        sentence = f"Masks {shape} are taken, and do something else than block keys."
        remedy = "If they are meant to be given, too: broadcast them to the scores."
        reading.findings.append(Finding("limit", sentence, remedy, kind="limit"))
    else:
        reading.verdict = whole


def _is_off(case: dict) -> bool:
    """Whether attention is far from it: by more than numbers of float32 on the way."""
    error = case["error"]
    return not case["agrees"] and (error is None or error > _IN_FLOAT32)


def _finite(reading: Reading, runs: Cases, judged: Judge) -> None:
    """NaN in some runs is wrong by itself, and hides what is to be said of others:
    these are judged alone, where that explains them. What only a guess has made
    infinite is none."""
    found = not_finite(runs.kept)
    if is_position_bias(reading.way.call.parameter("mask") or ""):
        # Of positions they are finite: what becomes of -inf in one is ours.
        found = [replace(finding, kind="unchecked") for finding in found]
    reading.findings += found
    if not_finite(runs.kept[:1]):
        reading.verdict = None  # that is what is wrong, mask or no mask
    elif found and not reading.meaning.why:
        whole = reading.verdict
        judged(reading, [run for run in runs.kept if run.out.isfinite().all()])
        if not reading.faults and not reading.is_right:
            reading.verdict = whole


def _output_alone(reading: Reading, runs: Cases, judged: Judge) -> None:
    """Beside its output code may return weights that are not those of all heads or their
    mean, as the mean of some. Where these add up to 1, the output is judged alone."""
    returned = [r.attention for r in runs.kept if not r.case.training]
    shown = [x.sum(-1).nan_to_num(1.0) for x in returned if x is not None]
    if not shown or any((total - 1).abs().max() > 1e-3 for total in shown):
        return
    whole = reading.verdict
    judged(reading, [replace(run, attention=None) for run in runs.kept])
    if reading.is_right or reading.faults:
        sentence = (
            "What it returns beside its output are weights, which add up to 1, but not "
            "those of its heads or their mean; that is not judged."
        )
        remedy = "Return the weights, or say what it is."
        reading.findings.append(
            Finding("other_weights", sentence, remedy, kind="limit")
        )
    else:
        reading.verdict = whole


def _with_turned_draws(reading: Reading, runs: Cases, judged: Judge) -> None:
    """Scores that are keys times queries drop weights (Lk, Lq)."""
    dropping = _failing_in_training(reading, runs)
    if not dropping:
        return
    whole = reading.verdict
    judged(reading, [_turned(r) if r in dropping else r for r in runs.kept])
    if not reading.is_right:
        reading.verdict = whole


def _turned(run: Run) -> Run:
    recorder, sizes = copy.copy(run.recorder), (run.case.keys, run.case.sizes.queries)
    recorder.draws = [
        replace(draw, keep=draw.keep.mT.contiguous())
        if tuple(draw.keep.shape[-2:]) == sizes
        else draw
        for draw in recorder.draws
    ]
    return replace(run, recorder=recorder)


def _failing_in_training(reading: Reading, runs: Cases) -> list[Run]:
    """The runs that drop, if nothing but these is not explained."""
    assert reading.verdict is not None
    failing = {c["name"] for c in reading.verdict["cases"] if not c["agrees"]}
    dropping = [run for run in runs.kept if run.case.training]
    return dropping if failing <= {run.case.name for run in dropping} else []


def _in_evaluation(reading: Reading, runs: Cases, judged: Judge) -> None:
    """Draws of another size than weights, as of those of blocks, tell nothing of what is
    dropped: what it does in evaluation is judged alone."""
    dropping = _failing_in_training(reading, runs)
    if not dropping:
        return
    if not all(map(_drops_others, dropping)):
        return
    whole = reading.verdict
    judged(reading, [run for run in runs.kept if run not in dropping])
    if reading.is_right:
        sentence = (
            "What it drops in training has not the size of weights, (B, H, Lq, Lk), "
            "and is not judged."
        )
        remedy = "Drop weights, after the softmax."
        reading.findings.append(Finding("limit", sentence, remedy, kind="limit"))
    else:
        reading.verdict = whole


def _drops_others(run: Run) -> bool:
    """Whether what is dropped between scores and context is not as many as weights."""
    draws, case = run.recorder.draws, run.case
    spans = [(one.first_draw, one.draws) for one in run.recorder.cores.found]
    sizes = {draw.keep.numel() for span in spans for draw in draws[slice(*span)]}
    weights = case.sizes.batch * case.sizes.queries * case.keys
    return bool(sizes) and not {weights, weights * case.sizes.heads} & sizes


def explained(reading: Reading, judged: Judge) -> None:
    """A fault of some calls is one, whatever becomes of the others: of those without
    masks, of those with one sequence, or of what is both; of those in evaluation mode;
    of those whose masks have a shape that is treated wrongly. That is for the best
    reading alone: another may explain the others."""
    whole = reading.verdict
    for others, part in _parts(reading):
        judged(reading, part)
        if reading.faults:
            sentence = f"What it makes of {others}, this does not explain."
            remedy = "Repair this first, then check it again."
            left = Finding("others_left", sentence, remedy, kind="remark")
            reading.findings.append(left)
            return
        reading.verdict = whole


def is_explained(reading: Reading, judged: Judge) -> bool:
    """Whether that finds a fault; the reading stays as it is."""
    if reading.verdict is None or not reading.kept:
        return False
    copied = replace(reading, findings=list(reading.findings))
    explained(copied, judged)
    return bool(copied.faults)


def _parts(reading: Reading) -> Iterator[tuple[str, list[Run]]]:
    """Some of the runs, or others like them, and what these leave out."""
    plain = [run for run in reading.kept if not run.arguments.masks]
    # Code may treat a context in a way of its own, but not what is always there.
    has_context = reading.way.call.style == "x and context"
    alone = [r for r in reading.kept if has_context and r.case.relation == "self"]
    both = [run for run in plain if run in alone]
    quiet = [run for run in reading.kept if not run.case.training]
    # Made so that masks of the wrong axes fit, too, which is a fault of its own.
    usual = [run for run in reading.kept if not run.case.name.startswith(EQUAL_SIZES)]
    parts = {"masks where sizes are equal": usual, "dropout": quiet}
    parts |= {"masks": plain, "other keys": alone}
    parts["masks and of other keys"] = both
    for others, part in parts.items():
        if not part or len(part) == len(reading.kept):
            continue
        if len(part) == 1:  # one call may fit by chance
            part = [*part, *_longer(reading, part[0])]
        yield others, part
    masked = [run for run in reading.kept if run.arguments.masks]
    seen = (reading.verdict or {}).get("cases", [])
    agreeing = {case["name"] for case in seen if case["agrees"]}
    wrong = [run for run in masked if run.case.name not in agreeing]
    # Masks of four axes are often made to be added by who calls.
    small = all(t.dim() < 4 for run in wrong for t in run.arguments.masks.values())
    if plain and small and 0 < len(wrong) < len(masked):
        yield "masks of other shapes", [*plain, *wrong]
    for part in [] if plain else _blocking_nothing(reading):
        yield "masks that block", part


def _blocking_nothing(reading: Reading) -> Iterator[list[Run]]:
    """Where every call needs masks: some whose masks are all 0 or all 1, which may
    block nothing, and are judged as if there were none."""
    way = reading.way
    first = way.base.case
    longer = replace(first, sizes=replace(first.sizes, **_LONGER))
    if first.style.numpy:
        return
    for numbers in itertools.product((0, 1), repeat=len(way.base.arguments.masks)):
        runs = []
        for draw, case in enumerate((first, longer), 33):
            case = replace(case, name="masks that block nothing", draw=draw)
            made = arguments.make(way.call, case)
            filled = {
                id(mask): torch.full_like(mask, number)
                for mask, number in zip(made.masks.values(), numbers)
            }
            given = made.keywords.items()
            made.positional = [filled.get(id(v), v) for v in made.positional]
            made.keywords = {name: filled.get(id(v), v) for name, v in given}
            made.masks = {}
            run = way.runner.run(case, given=made)
            if run.refused or _is_same_of_all(run):
                break
            runs.append(run)
        else:
            yield runs


def _is_same_of_all(run: Run) -> bool:
    """Whether all queries give the same, as where all keys are blocked."""
    axis = cases.query_axis(run.case)
    rest = run.out - run.out.narrow(axis, 0, 1)
    return not bool(rest.nan_to_num(0.0).abs().max() > 1e-6 * run.out.abs().max())


def _longer(reading: Reading, run: Run) -> list[Run]:
    """The same call with other items of more positions, if it takes them."""
    sizes = replace(run.case.sizes, **_LONGER)
    name = f"{run.case.name}, longer"
    longer = reading.way.runner.run(replace(run.case, name=name, sizes=sizes, draw=33))
    return [] if longer.refused else [longer]
