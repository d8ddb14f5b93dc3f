# SPDX-License-Identifier: MIT
"""Whole models of sequences, (B, L, E), that return what a head makes of each position or
of each item: numbers, classes. What their first attention does is judged as that of any
layer."""

import inspect
import re
from collections.abc import Iterator

from torch import Tensor

from ..subject.roles import TENSORS
from ..subject.signature import Call
from ..subject.target import Subject
from . import cases
from .forms import Form, called, formed
from .images import OF_LAYER
from .tokens import has_many, is_of_items, like

_OTHER_SHAPE = re.compile(r"It returns shape")
# Of each item, of which each head may say something.
_POOLS = re.compile(
    r"It returns one vector|It returns shape \((\d+), \d+\) for a query of shape \(\1, \d+, "
)


def of_models(subject: Subject, call: Call, complaints: list[str]) -> Iterator[Form]:
    """Its one input as our sequence. complaints: what it says of the usual calls. A layer
    of attention may pool, and returns no other shape."""
    inputs = [n for n, role in call.roles.items() if role in TENSORS]
    pools = any(map(_POOLS.match, complaints))
    is_other = any(map(_OTHER_SHAPE.match, complaints))
    is_model = pools or (is_other and not OF_LAYER.search(subject.name))
    if subject.kind == "function" or not is_model or len(inputs) != 1:
        return
    name = inputs[0]

    def how(target: object, /, x: Tensor, **given: object) -> object:
        return like(called(subject, target, {**given, name: x}), x)

    how.has_many = how.has_head = True  # type: ignore[attr-defined]
    kind = inspect.Parameter.KEYWORD_ONLY
    others = [p.replace(kind=kind) for p in call.parameters if p.name != name]
    parameters = [inspect.Parameter("x", kind), *others]
    layouts = (cases.LAYER, cases.SEQUENCE_FIRST)
    said = "what it returns is of a head behind its attention"
    yield formed(subject, parameters, how, layouts, said)


def has_head_behind(subject: Subject, out: Tensor | None = None) -> bool:
    """Whether it is called in that form, or returns something that is said of items."""
    of_items = out is not None and has_many(subject) and is_of_items(out)
    return of_items or getattr(subject.how, "has_head", False)
