# SPDX-License-Identifier: MIT
"""Whole models, which take the numbers of tokens, (B, L): what they look up for these
are our sequences, and nothing for all else, as for positions. What their first
attention does can then be judged as that of any layer.
"""

import contextlib
import functools
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..subject.roles import TENSORS
from ..subject.signature import Call
from ..subject.target import Subject
from . import cases
from .forms import Form, called, formed

# What a lookup says of a sequence, and what takes one.
_OF_NUMBERS = re.compile(
    r"'indices'|embedding|\bLong\b|LongTensor|one_hot|IntTensor|must be integ", re.I
)
# Numbers of tokens: none is usual for padding, and there are few of them.
_FIRST, _COUNT = 5, 50


def of_tokens(subject: Subject, call: Call, complaints: str = "") -> Iterator[Form]:
    """complaints: what it says of other forms."""
    inputs = [n for n, role in call.roles.items() if role in TENSORS]
    if subject.kind == "function" or not _OF_NUMBERS.search(complaints):
        return

    def how(target: object, /, **given: object) -> object:
        found = {n: given.get(n) for n in inputs}
        sequences = {n: t for n, t in found.items() if isinstance(t, Tensor)}
        whole = next(iter(sequences.values()))
        looked_up = [
            (_numbers(sequence, place), sequence)
            for place, sequence in enumerate(sequences.values())
        ]
        numbers = (number for number, _ in looked_up)
        with _embedded(target, looked_up):
            returned = called(
                subject, target, {**given, **dict(zip(sequences, numbers))}
            )
        return _like(returned, whole)

    how.has_many = True  # type: ignore[attr-defined]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in call.parameters]
    said = f"{', '.join(inputs)} taken for tokens, which are embedded as ours; none of "
    said += "them is padding"
    yield formed(subject, parameters, how, (cases.LAYER, cases.SEQUENCE_FIRST), said)


def has_many(subject: Subject) -> bool:
    """Whether it is called in that form, and may have attention in many layers."""
    return getattr(subject.how, "has_many", False)


def _numbers(sequence: Tensor, place: int) -> Tensor:
    """Tokens (B, L) that are no positions."""
    shape = sequence.shape[:2]
    steps = torch.arange(shape.numel()) * 7 + 3 * place
    return (_FIRST + steps % _COUNT).view(shape)


@contextlib.contextmanager
def _embedded(target: object, looked_up: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """All tables of a model give these sequences for these tokens, else zeros."""
    parts = target.modules() if isinstance(target, nn.Module) else ()
    tables = [part for part in parts if isinstance(part, nn.Embedding)]
    for table in tables:
        table.forward = functools.partial(_look_up, table, looked_up)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for table in tables:
            del table.forward


def _look_up(
    table: nn.Embedding, looked_up: list[tuple[Tensor, Tensor]], numbers: Tensor
) -> Tensor:
    for tokens, sequence in looked_up:
        is_wide = sequence.shape[-1] == table.embedding_dim
        if numbers.shape == tokens.shape and is_wide and numbers.equal(tokens):
            return sequence
    return table.weight.new_zeros(*numbers.shape, table.embedding_dim)


def _like(returned: object, whole: Tensor) -> object:
    """What was returned first, in the shape of a sequence, of which only matters what has
    a part in it: logits are cut or filled up with zeros to be as wide, and what is said
    of an item, as its class, is said of all its tokens."""
    parts = returned.values() if isinstance(returned, dict) else returned
    parts = list(parts) if isinstance(returned, (dict, tuple, list)) else [returned]
    plain = [p for p in parts if isinstance(p, Tensor) and p.is_floating_point()]
    if not plain:
        return returned
    out = plain[0]
    if out.dim() != 3 or out.shape[:2] != whole.shape[:2]:
        if len(out) != len(whole):
            return returned
        of_item = out.reshape(len(out), -1).sum(1)
        return of_item.view(-1, 1, 1).expand(whole.shape).clone()
    width = whole.shape[-1]
    return nn.functional.pad(out, (0, width - out.shape[-1]))
