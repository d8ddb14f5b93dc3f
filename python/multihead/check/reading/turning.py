# SPDX-License-Identifier: MIT
"""Rotary positions (Su et al., 2021) of heads that are judged alone. A turn keeps the
length of a query, so that queries and keys of one token, repeated, differ in nothing but
their positions; and its scores follow the distance of a query from a key alone.
"""

import re
from dataclasses import replace

import torch

from ..calls import arguments, cases
from ..capture import core
from ..capture.core import Core
from ..capture.runner import Run, Runner
from ..report import Finding
from ..subject.target import text_of_file
from . import again

ALIKE = "alike"  # at every position
MISAPPLIED = Finding(
    "rotary_misapplied",
    "Rotary positions do not turn queries and keys as they should: of one token, "
    "repeated, scores do not follow the distance of a query from a key alone.",
    "Turn queries and keys by their own positions. Where heads are cut, tables of (L, d) "
    "meet (B, H, L, d) by its last two axes; view and reshape do not exchange axes.",
)
_ROTARY = re.compile(r"\bropes?\b|rope[A-Z_]|_rope|RoPE|rotary|rotat", re.I)
# Turned by more than one number, as the row and the column of a pixel.
_OF_PLANES = re.compile(
    r"(?:rope|rotary|pos\w*|emb\w*)[-_ ]?[23]d|[23]d[-_ ]?(?:rope|rot|pos|emb|sin)|axial|"
    r"height|grid|image|patch|pixel|video|frames?\b|mrope|bins\b",
    re.I,
)
_CLOSE = 1e-4  # of the longest query times the longest key: angles are of float32


def seen(runner: Runner, base: Run) -> str | Finding | None:
    """What is wrong about how queries and keys turn: ALIKE, MISAPPLIED; None where
    nothing is, or nothing turns by positions of the code's own."""
    case, text = base.case, text_of_file(runner.subject)
    is_plain = case.layout in (cases.LAYER, cases.SEQUENCE_FIRST)
    is_plain &= case.relation == "self" and case.mask is None and not case.style.numpy
    is_handed = runner.call.takes("rotation") or runner.call.takes("position_ids")
    if not is_plain or is_handed or base.recorder is None:
        return None
    if not _ROTARY.search(text) or _OF_PLANES.search(text):
        return None
    case, axis = replace(case, gradients=False), cases.query_axis(case) % 3
    made = arguments.make(runner.call, case)
    for x in again.sequences(made):
        x.copy_(x.narrow(axis, 0, 1).clone().expand_as(x))
    run = runner.run(case, given=made)
    found = [] if run.refused else core.attentions(run.recorder.cores.found)[:1]
    ways = {_way(one) for each in found for one in each}
    if None in ways or not ways:
        return None
    if MISAPPLIED in ways:
        return MISAPPLIED
    return ALIKE if ways == {ALIKE} and base.turns else None


def _way(one: Core) -> str | Finding | None:
    """The same of one attention; "" where it is right, None where nobody knows."""
    q, k = one.query, one.key
    lengths = [heads.norm(dim=-1, keepdim=True) for heads in (q, k)]
    if q.shape[1] != k.shape[1] or q.shape[1] < 3:
        return None
    if not all(torch.allclose(n, n[:, :1].expand_as(n), rtol=1e-4) for n in lengths):
        return None  # positions were added, or something else was
    close = _CLOSE * float(lengths[0].max() * lengths[1].max())

    def differs(x: torch.Tensor, y: torch.Tensor) -> bool:
        return bool(((x - y).abs() > close).any())

    scores = q @ k.mT
    if differs(scores[:, 1:, 1:], scores[:, :-1, :-1]):
        return MISAPPLIED
    return "" if differs(scores, scores[:, :1, :1]) else ALIKE
