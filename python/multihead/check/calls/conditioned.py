# SPDX-License-Identifier: MIT
"""Code that takes a vector for each item beside the sequence, as blocks of diffusion
models take the time and the class."""

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor

from ..subject.roles import normal
from ..subject.signature import Call
from ..subject.target import Subject
from ..subject.words import words
from .forms import Form, called, formed

# Letters and words of its name.
_LETTERS = {"c", "t", "s", "w", "y", "z"}
_WORDS = {"cond", "conds", "condition", "conditions", "conditioning", "temb", "time"}
_WORDS |= {"timestep", "timesteps", "style", "adaln", "modulation", "vec", "cemb"}


def conditioned(subject: Subject, call: Call) -> Iterator[Form]:
    """With a vector of the sequence's width, (B, E), or a column of it, (B, 1, E)."""
    sequence = call.parameter("x") or call.parameter("query")
    named = [
        p.name
        for p in call.parameters
        if p.name != sequence
        and p.default in (p.empty, None)
        and (normal(p.name) in _LETTERS or set(words(p.name)) & _WORDS)
    ]
    if sequence is None or not named:
        return

    def how(target: object, /, axes: int, **given: object) -> object:
        whole = given[sequence]
        assert isinstance(whole, Tensor)
        for name in named:
            given[name] = _vector(whole, axes)
        return called(subject, target, given)

    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in call.parameters
        if p.name not in named
    ]
    for axes, shape in ((2, "(B, E)"), (3, "(B, 1, E)")):

        def one(target: object, /, axes=axes, **given: object) -> object:
            return how(target, axes, **given)

        said = f"{', '.join(named)} taken for a vector for each item, {shape}"
        yield formed(subject, parameters, one, (), said, tuple(named))


def _vector(whole: Tensor, axes: int) -> Tensor:
    """Numbers that nothing is drawn for, so that nobody takes them for weights."""
    batch, width = len(whole), whole.shape[-1]
    numbers = torch.arange(batch * width, dtype=whole.dtype).cos()
    return numbers.view(batch, *[1] * (axes - 2), width)
