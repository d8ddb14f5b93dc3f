# SPDX-License-Identifier: MIT
"""Rotary positions (Su et al., 2021) of heads that are judged alone. A turn keeps the
length of a query, so that queries and keys of one token, repeated, differ in nothing but
their positions; and its scores follow the distance of a query from a key alone.
"""

import re
from dataclasses import replace

import torch
from torch import Tensor

from ..calls import arguments, cases
from ..capture import core
from ..capture.core import Core
from ..capture.frames import ROTARY
from ..capture.runner import Run, Runner
from ..report import Finding
from ..sandbox.guard import stood_in
from ..subject.target import text_of_file
from . import again

ALIKE = "turned_alike"  # at every position
ELSEWHERE = "turned_elsewhere"  # by positions that are not 0, 1, 2, ...
MISAPPLIED = Finding(
    "rotary_misapplied",
    "Rotary positions do not turn queries and keys as they should: of one token, "
    "repeated, a query and the key of its own position do not meet alike everywhere.",
    "Turn queries and keys by the same positions. "
    "Where heads are cut, tables of (L, d) meet (B, H, L, d) by its last two axes; view "
    "and reshape do not exchange axes.",
)
# Turned by more than one number, as the row and the column of a pixel.
_OF_PLANES = re.compile(
    r"(?:rope|rotary|pos\w*|emb\w*)[-_ ]?[23]d|[23]d[-_ ]?(?:rope|rot|pos|emb|sin)|axial|"
    r"height|grid|image|patch|pixel|video|frames?\b|mrope|bins\b",
    re.I,
)
# By their positions: Llama 4's and Qwen's temperatures of long contexts.
_SCALES_QUERIES = re.compile(
    r"log_?n\b|temperature|attn_scale|floor_scale|scalable|ssmax|log_?scale", re.I
)
_CLOSE = 1e-4  # angles are of float32


def seen(runner: Runner, base: Run) -> str | Finding | None:
    """What is wrong, or unusual, about how queries and keys turn: ALIKE, ELSEWHERE,
    MISAPPLIED; None where nothing is, or nothing turns by positions of the code's
    own."""
    case, text = base.case, text_of_file(runner.subject)
    is_plain = case.layout in (cases.LAYER, cases.SEQUENCE_FIRST)
    is_plain &= case.relation == "self" and not case.style.numpy
    is_handed = runner.call.takes("rotation")
    if not is_plain or is_handed or base.recorder is None or stood_in:
        return None
    other = _OF_PLANES.search(text) or _SCALES_QUERIES.search(text)
    if not ROTARY.search(text) or other:
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
    if ELSEWHERE in ways:
        return ELSEWHERE
    return ALIKE if ways == {ALIKE} and base.turns else None


def _way(one: Core) -> str | Finding | None:
    """The same of one attention; "" where it is right, None where nobody knows. A norm
    of heads may hide from their lengths that positions were added."""
    q, k = one.query, one.key
    if q.shape[1] != k.shape[1] or q.shape[1] < 3:
        return None
    if _differ(one.value, one.value[:, :1]):
        # Positions were added to all, or values turn, too.
        forgotten = not one.is_shifted and not _differ(k, k[:, :1])
        return MISAPPLIED if forgotten and _differ(q, q[:, :1]) else None
    if any(_differ(x, x[:, :1]) for x in (_lengths(q), _lengths(k))):
        # Positions were added to these alone; or scale them, too, as those of xPos, of
        # which a query and the key of its own position meet alike.
        own = (q * k).sum(-1, keepdim=True) / _lengths(q[:, :1]) / _lengths(k[:, :1])
        return MISAPPLIED if not one.is_shifted and _differ(own, own[:, :1]) else None
    met = (q / _lengths(q)) @ (k / _lengths(k)).mT
    own = met.diagonal(dim1=1, dim2=2)
    if _differ(own, own[:, :1]):
        return MISAPPLIED
    if _differ(met[:, 1:, 1:], met[:, :-1, :-1]):
        return ELSEWHERE
    return "" if _differ(met, met[:, :1, :1]) else ALIKE


def _lengths(heads: Tensor) -> Tensor:
    return heads.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def _differ(x: Tensor, y: Tensor) -> bool:
    return not torch.allclose(x, y.expand_as(x), rtol=_CLOSE, atol=_CLOSE)
