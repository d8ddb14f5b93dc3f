# SPDX-License-Identifier: MIT
"""The verdict on the core alone: what attention does from its heads on, where the whole
is not explained, as beside layers that attention has no use for."""

import functools
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..calls import cases
from ..calls.models import has_head_behind
from ..calls.one_by_one import is_stepwise
from ..capture import core
from ..capture.core import Core
from ..capture.runner import Run
from ..report import Finding
from ..subject.words import OF_TARGET, words
from . import idle, observation, residuals, wiring
from .observation import Observation
from .ways import Reading

# What a search for faults of the core may do, of what one of the whole may; and one of
# another reading, once there is an explanation: only what has fewer faults is better.
_EFFORT, LITTLE_EFFORT = 0.1, 0.03
_MOST_EFFORT = 0.3  # of all of them, before each has little
_CUTS_HEADS = re.compile(
    r"//\s*(?:self\.)?\w*head|/\s*(?:self\.)?n\w*_?heads\b|head_?(?:dim|size|width)",
    re.I,
)
_SHOWN = 5  # names of what stands beside

# Where the whole is not explained, and nothing stands beside attention.
HEADS_RIGHT = Finding(
    "heads_right",
    "What its heads do is attention, from the queries, keys and values that meet to "
    "what comes of them: what is not lies before that or behind.",
    "Look at the projections, at how heads are split, and at how they are merged.",
    kind="remark",
)


def judge(readings: list[Reading], promises: dict[str, str]) -> dict[str, Any] | None:
    """The best verdict of several readings of the same calls, likelier first. promises:
    what the code says that it does, as every observation has it."""
    best = None
    for reading in readings:
        takes_less = not readings[0].taken <= reading.taken
        if best is None or (best["faults"] and not takes_less):
            is_first = best is None and not wiring.FLAWS.intersection(reading.findings)
            effort = _EFFORT if is_first else LITTLE_EFFORT
            best = _better(best, _of_one(reading, promises, effort))
    return best


def answers(reading: Reading) -> bool:
    """Whether what its heads are handed tells why the whole is not explained."""
    first = reading.kept[0]
    one = of_run(first)
    if one is not None and (
        reading.way.pools or residuals.OF_CONTEXT in reading.findings
    ):
        return True
    if one is None or (_slots(first, one) > 0 and reading.way.form is None):
        return False  # keys that nothing is known of, as those of padding
    return bool(_answers(first, one))


def _answers(run: Run, one: Core) -> list[str]:
    more = ["keys beside those of its sequence"] * (_slots(run, one) > 0)
    shifted = ["what is added to its queries and keys"] * one.is_shifted
    turned = ["what turns its context by positions"] * one.is_turned
    scaled = ["what scales its scores"] * one.are_cosines
    behind = ["what its heads' context goes through"] * run.recorder.cores.has_layers
    return more + shifted + turned + scaled + behind


def answered(runs: list[Run]) -> set[str]:
    """The findings of the whole that a verdict on its heads answers: numbers that are
    not finite, where they come of the heads, as of a row that a mask blinds."""
    for run in runs:
        if run.out.isfinite().all():
            continue
        one = of_run(run)
        if one is None or one.context.isfinite().all():
            return set()
    return {"not_finite"}


def _of_one(
    reading: Reading, promises: dict[str, str], effort: float
) -> dict[str, Any] | None:
    """The engine's verdict on what the heads do in all runs, or in those without masks,
    where only these are explained; None where nothing explains them, or where some run
    does not show it."""
    if parts := _of_block(reading):
        return _judged_apart(reading, parts, promises, effort)
    found: list[tuple[Run, Core]] = []
    for run in reading.kept:
        one = of_run(run)
        if run.is_last or _drops_elsewhere(run, one):
            continue
        if one is None or not run.recorder.cores.reaches(run.out):
            return None
        found.append((run, one))
    if not found or are_one(reading, *found[0]):
        return None
    # What scales its scores would be rounded once more in our queries.
    exact = [(run, one) for run, one in found if run.case.dtype is torch.float64]
    found = exact if exact and found[0][1].own_scale else found
    best = of_these(reading, found, promises, effort)
    if best is None and any(run.recorder.rounds for run, _ in found):
        # A scale that was rounded on the way hides a fault beside it: as all numbers
        # are rounded, it does not.
        narrow = [(run, _narrowed(one)) for run, one in found]
        best = of_these(reading, narrow, promises, effort)
    names = [fault["name"] for fault in best["faults"]] if best else []
    if len(names) == 1 and "scale" in names[0] and "scales_by_design" in promises:
        scaled = [(run, _as_scaled(one)) for run, one in found]
        best = _better(best, of_these(reading, scaled, promises, effort))
    return best


def _as_scaled(one: Core) -> Core:
    """The same with the scale that it has as its own, where its scores show it."""
    if one.scores is None:
        return one
    product = one.query @ one.key.mT
    scale = (one.scores * product).sum() / (product * product).sum()
    query = one.query * scale * one.query.shape[-1] ** 0.5
    return replace(one, query=query, own_scale=True)


def _of_block(reading: Reading) -> list[list[tuple[Run, Core]]]:
    """The runs of each attention of a block that has several, as a decoder has one of
    its own sequence and one of its context; none where it has one."""
    first = wiring.attentions(reading.kept[0])
    if not first or is_stepwise(reading.way.runner.subject):
        return []
    parts: list[list[tuple[Run, Core]]] = [[] for _ in first]
    for run in reading.kept:
        found = wiring.attentions(run)
        batch = 1 if cases.unbatched(run.case) else run.case.sizes.batch
        lengths = run.case.sizes.queries, run.case.keys
        joined = [_joined(one, batch, lengths) for one in found]
        if len(found) != len(first) or None in joined or run.case.training:
            continue
        for part, one, its_own in zip(parts, joined, first):
            if not one.query.isfinite().all():
                continue  # behind one that a mask blinds
            one_mask = len(first) > 2 and not reading.way.call.takes("context_mask")
            # Of several contexts, nothing says which one a single mask is for.
            is_open = one_mask and wiring.reads_context(its_own)
            seen = _unmasked(run) if is_open else _with_masks(reading, run, its_own)
            part.append((seen, one))
    return parts if all(parts) else []


def _joined(found: list[Core], batch: int, lengths: tuple[int, int]) -> Core | None:
    """One of the block's own sequence asks, or one of its context."""
    either = (core.joined(found, batch, length) for length in lengths)
    return next((one for one in either if one is not None), None)


def _with_masks(reading: Reading, run: Run, found: list[Core]) -> Run:
    """The run with the masks that are meant for this attention, where the code takes
    one for each; with none where it reads what is no sequence of ours."""
    call, masks = reading.way.call, run.arguments.masks
    of_context = wiring.reads_context(found)
    if not of_context and not wiring.reads_its_own(found):
        return _unmasked(run)
    if not call.takes("context_mask"):
        return run
    is_own = run.case.of_self or run.case.relation == "self"
    padding = call.parameter("padding")
    pads_own = bool(set(words(padding)) & OF_TARGET) if padding else is_own
    own = {"mask": is_own, "key_padding_mask": pads_own}
    kept = {role: m for role, m in masks.items() if own[role] is not of_context}
    return replace(run, arguments=replace(run.arguments, masks=kept))


def _unmasked(run: Run) -> Run:
    return replace(run, arguments=replace(run.arguments, masks={}))


def _judged_apart(
    reading: Reading,
    parts: list[list[tuple[Run, Core]]],
    promises: dict[str, str],
    effort: float,
) -> dict[str, Any] | None:
    """The verdict on each attention of a block; the first that is wrong is that of
    all. None where nothing explains one of them."""
    attentions = wiring.attentions(reading.kept[0])
    if wiring.are_beside(attentions):
        promises = promises | {"attentions_beside": "true"}
    promised = [
        promises | {"of_context": "true"} if wiring.reads_context(one) else promises
        for one in attentions
    ]
    each = (
        _of_part(reading, found, said, effort) for found, said in zip(parts, promised)
    )
    judged = [one for one in each if one is not None]
    if len(judged) < len(parts):
        return None
    if any("unscaled" in _names(one, "assumptions") for one, _ in judged):
        # The bias of one is why none of them scales, as in T5.
        beside = {"beside_bias": "true"}
        judged = [
            (one["faults"] and _of_part(reading, found, said | beside, effort))
            or (one, by)
            for found, said, (one, by) in zip(parts, promised, judged)
        ]
    is_masked = reading.way.call.takes("context_mask") or any(
        by_masks and not one["faults"] for one, by_masks in judged
    )
    verdicts = [one for one, _ in judged]
    for place, one in enumerate(verdicts, 1):
        one["cases"] = _numbered(one["cases"], place)
    wrong = [one for one in verdicts if one["faults"]]
    if is_masked and not reading.way.call.takes("context_mask"):
        # What ignores it may leave it to the one that blocks by it.
        wrong = [one for one in wrong if not _ignores(one)]
    if wrong:
        return wrong[0]
    if any(map(_ignores, verdicts)) and not _ignores(verdicts[0]):
        later = len(parts) - 1
        first = [(run, replace(one, others=later)) for run, one in parts[0]]
        return of_these(reading, first, promises, effort)
    return functools.reduce(both, (one for one in verdicts if not one["faults"]))


def _of_part(
    reading: Reading,
    found: list[tuple[Run, Core]],
    promises: dict[str, str],
    effort: float,
) -> tuple[dict[str, Any], bool] | None:
    """The verdict on one attention, and whether masks had a part in it: its mask may be
    for another of them."""
    if best := of_these(reading, found, promises, effort):
        return best, any(run.arguments.masks for run, _ in found)
    plain = [(_unmasked(run), one) for run, one in found]
    best = of_these(reading, plain, promises, LITTLE_EFFORT)
    return (best, False) if best else None


def _names(verdict: dict[str, Any], kind: str) -> list[str]:
    return [one["name"] for one in verdict[kind]]


def _ignores(verdict: dict[str, Any]) -> bool:
    faults = set(_names(verdict, "faults"))
    return bool(faults) and faults <= {"mask_ignored", "padding_ignored"}


def both(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The verdict on two attentions that are right."""
    all_of = second | {"cases": first["cases"] + second["cases"]}
    for kind in ("assumptions", "conditions", "remarks"):
        all_of[kind] = list(
            {one["name"]: one for one in second[kind] + first[kind]}.values()
        )
    all_of["verdict"] = max(first["verdict"], second["verdict"])  # "bits" or "rounding"
    return all_of


def _numbered(cases_of: list[dict], place: int) -> list[dict]:
    return [case | {"name": f"{case['name']}, attention {place}"} for case in cases_of]


def of_these(
    reading: Reading,
    found: list[tuple[Run, Core]],
    promises: dict[str, str],
    effort: float,
) -> dict[str, Any] | None:
    plain = [(run, one) for run, one in found if not run.arguments.masks]
    # Which items and heads are which, only masks and biases tell.
    if len(plain) == len(found) and not found[0][1].is_biased:
        return _judged_either_way(reading, found, promises, effort)
    return _of_masked(reading, found, plain, promises, effort)


def _of_masked(
    reading: Reading,
    found: list[tuple[Run, Core]],
    plain: list[tuple[Run, Core]],
    promises: dict[str, str],
    effort: float,
) -> dict[str, Any] | None:
    turned = [(run, _turned(one)) for run, one in found]
    best = _judged_either_way(reading, found, promises, effort)
    if best is None or best["faults"]:
        effort = effort if best is None else LITTLE_EFFORT
        best = _better(best, _judged(reading, turned, promises, effort))
    if best is None and plain:
        best = _judged(reading, plain, promises, effort)
        best = best if best and best["faults"] else None
    return best


def _better(first: dict | None, later: dict | None) -> dict | None:
    if first is None or later is None:
        return first or later
    return later if observation.is_better(later, first) else first


def _judged_either_way(
    reading: Reading,
    found: list[tuple[Run, Core]],
    promises: dict[str, str],
    effort: float,
) -> dict[str, Any] | None:
    """Where queries are as many as keys, their product does not tell which is which."""
    best = _judged(reading, found, promises, effort)
    square = all(one.query.shape == one.key.shape for _, one in found)
    is_given = any(one.are_given for _, one in found)
    if square and not is_given and (best is None or best["faults"]):
        exchanged = [(r, replace(c, query=c.key, key=c.query)) for r, c in found]
        effort = effort if best is None else LITTLE_EFFORT
        other = _judged(reading, exchanged, promises, effort)
        best = other if other is not None and not other["faults"] else best
    return best


def _judged(
    reading: Reading,
    found: list[tuple[Run, Core]],
    promises: dict[str, str],
    effort: float,
) -> dict[str, Any] | None:
    """None where nothing explains it. Keys that a mask does not speak of are shown,
    whichever value of it shows one."""
    best = None
    masks = [m for run, _ in found for m in run.arguments.masks.values()]
    beside = any(_slots(run, one) for run, one in found) and bool(masks)
    for shown in (True, False) if beside else (True,):
        one = _explained(reading, found, promises, effort, shown)
        if one is not None and (not beside or _is_read_so(one, shown)):
            best = _better(best, one)
    return best


def _is_read_so(verdict: dict[str, Any], shown: bool) -> bool:
    """Whether its mask is read so that this value of it shows a key."""
    names = {*_names(verdict, "assumptions"), *_names(verdict, "conditions")}
    other = (
        {"mask_blocks", "padding_blocks"} if shown else {"mask_keeps", "padding_keeps"}
    )
    return not names & other


def _explained(
    reading: Reading,
    found: list[tuple[Run, Core]],
    promises: dict[str, str],
    effort: float,
    shown: bool,
) -> dict[str, Any] | None:
    way = reading.way
    if way.spent_on_heads >= _MOST_EFFORT:
        effort = LITTLE_EFFORT
    call, stated = way.call, reading.meaning.stated
    heads = _heads_to_be(reading, found) or [0] * len(found)
    seen = [
        observation.observe_unsplit(run, one, count, call, stated)
        if count
        else observation.observe_core(run, one, call, stated)
        for (run, one), count in zip(found, heads)
    ]
    is_before = _stand_before(found)
    for one, (run, its_core) in zip(seen, found):
        _show_slots(one, run, _slots(run, its_core), shown, is_before)
    named = [f"`{name}`" for name in reading.layers_beside]
    if len(named) > _SHOWN:
        named[_SHOWN:] = [f"{len(named) - _SHOWN} more"]
    later = found[0][1].others
    named += _answers(*found[0])
    named += ["what pools its positions"] * (way.pools is not None)
    behind = bool(later) or has_head_behind(reading.way.runner.subject)
    if found[0][1].are_given:  # what stands before them is said with their condition
        named, behind = [], behind or not _returns_context(*found[0])
    beside = " and ".join(named or ["what is behind it"] * behind)
    facts = {"core_beside": beside, "search_effort": repr(effort)}
    facts |= {"attentions": str(later + 1)} if later else {}
    one = found[0][1]
    facts |= {"scores_given": "true"} if one.are_given else {}
    if one.is_elsewhere:
        facts["attends_elsewhere"] = str(one.key.shape[2])
    if names := idle.projections(reading.way.base)[:_SHOWN]:
        facts["idle_weights"] = " and ".join(f"`{name}`" for name in names)
    for one in seen:
        one.metadata |= promises | facts
    # The products tell how many heads there are.
    untold = {"num_heads_guessed"}
    if "of_context" in promises:  # causal is said of the attention of its own sequence
        untold.add("causal_text")
        for one in seen:
            if one.metadata.get("is_causal") == "expected":
                one.metadata["is_causal"] = "infer"
    seen[0].metadata |= {n: v for n, v in reading.facts.items() if n not in untold}
    try:
        verdict = observation.explain(seen)
    except ValueError:
        return None
    way.spent_on_heads += verdict["effort"]
    return verdict if verdict["verdict"] != "unknown" else None


def _heads_to_be(reading: Reading, found: list[tuple[Run, Core]]) -> list[int]:
    """How many heads each run should have had, where it was told several and attends
    with one of all features; none otherwise."""
    call, stated = reading.way.call, reading.meaning.stated
    if not _CUTS_HEADS.search(reading.way.runner.subject.source):
        return []  # which may count something else
    told = []
    for run, one in found:
        count = observation.known_heads(run, call, stated.num_heads)
        width = run.case.sizes.embed
        is_whole = all(t.shape[1::2] == (1, width) for t in (one.query, one.value))
        if (
            one.are_given
            or one.is_elsewhere
            or not is_whole
            or width % (count or width)
        ):
            return []
        told.append(count or 1)
    return told if max(told) > 1 else []


def _slots(run: Run, one: Core) -> int:
    """How many more keys its heads have than the case, as learned ones."""
    return 0 if one.is_elsewhere else one.key.shape[2] - run.case.keys


def _stand_before(found: list[tuple[Run, Core]]) -> bool:
    """Whether these stand before the others, or behind: they are the same for all items,
    where the others are not."""
    for run, one in found:
        slots = _slots(run, one)
        before, behind = one.key[:, :, :slots], one.key[:, :, -slots:]
        if slots > 0 and _are_alike(before) != _are_alike(behind):
            return _are_alike(before)
    return True


def _are_alike(items: Tensor) -> bool:
    return bool((items == items[:1]).all())


def _show_slots(
    seen: Observation, run: Run, slots: int, shown: bool, is_before: bool
) -> None:
    """Masks know nothing of keys that stand beside those of the case. shown: the value
    of a mask that shows a key."""
    if slots < 1:
        return
    for role in {"mask", "key_padding_mask"} & seen.tensors.keys():
        mask = seen.tensors[role]
        added = role == "mask" and run.case.style.additive
        value = 0.0 if added else float(shown)
        sides = (slots, 0) if is_before else (0, slots)
        seen.tensors[role] = nn.functional.pad(mask, sides, value=value)
    if is_before and "is_causal" in seen.metadata:
        # Each query sees them, however early it is.
        seen.metadata["queries_are_last"] = "true"


def _returns_context(run: Run, one: Core) -> bool:
    merged = one.context.transpose(1, 2).flatten(2)
    return run.out.numel() == merged.numel() and torch.allclose(
        run.out.reshape(merged.shape), merged
    )


def are_one(reading: Reading, run: Run, one: Core) -> bool:
    """Two of queries, keys and values are the same, which may be what is wrong; not keys
    and values that are what was given for both, as the memory of Luong et al. (2015)."""
    query, key, value = one.query, one.key, one.value
    call = reading.way.call
    has_memory = call.takes("key") or call.takes("context")
    given = [t for t in run.arguments.tensors.values() if t.shape == key[:, 0].shape]
    is_given = has_memory and not call.takes("value") and key.shape[1] == 1
    is_given = is_given and any(torch.equal(key[:, 0], t) for t in given)
    return query.equal(key) or query.equal(value) or (key.equal(value) and not is_given)


def of_run(run: Run) -> Core | None:
    unbatched = cases.unbatched(run.case)
    batch = 1 if unbatched else run.case.sizes.batch
    cores = run.recorder.cores
    found = cores.found or run.recorder.scored.found
    # One query may be the code's own, of which all that it returns comes.
    lengths = run.case.sizes.queries, 1
    joined = (core.joined(found, batch, length) for length in lengths)
    one = next((one for one in joined if one is not None), None)
    return one and replace(one, is_turned=cores.is_turned)


def pools_by_a_query(run: Run) -> bool:
    """Whether one query of its own reads all positions, as of code that pools."""
    one = of_run(run)
    return one is None or one.query.shape[2] == 1


def _drops_elsewhere(run: Run, one: Core | None) -> bool:
    """Dropout before the core, or behind it, says nothing of what it does in training."""
    return run.case.training and (one is None or one.draws == one.first_draw)


def _narrowed(one: Core) -> Core:
    names = ("query", "key", "value", "context")
    return replace(one, **{name: getattr(one, name).float() for name in names})


def _turned(one: Core) -> Core:
    """The same of code that has the heads before the items."""
    batch, heads = one.query.shape[:2]
    names = ("query", "key", "value", "context", "scores", "added")
    parts = {name: part for name in names if (part := getattr(one, name)) is not None}
    turned = {
        name: part.flatten(0, 1).unflatten(0, (heads, batch)).transpose(0, 1)
        for name, part in parts.items()
    }
    return replace(one, **turned)
