# SPDX-License-Identifier: MIT
"""Code that takes a vector for each item beside the sequence, as blocks of diffusion
models take the time and the class."""

import functools
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
    """With a vector of the sequence's width, (B, E) or (B, 1, E), or a number, (B,)."""
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

    def how(target: object, /, shape: str, **given: object) -> object:
        whole = given[sequence]
        if not isinstance(whole, Tensor):
            raise ValueError("it takes no sequence")
        given |= dict.fromkeys(named, _vector(whole, shape))
        return called(subject, target, given)

    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in call.parameters
        if p.name not in named
    ]
    for shape in ("(B, E)", "(B, 1, E)", "(B,)"):
        one = functools.partial(how, shape=shape)
        said = f"{', '.join(named)} taken for a vector for each item, {shape}"
        yield formed(subject, parameters, one, (), said, tuple(named))


def _vector(whole: Tensor, shape: str) -> Tensor:
    """Numbers that nothing is drawn for, so that nobody takes them for weights; as wide
    as the features, which are the channels of an image."""
    batch, width = len(whole), whole.shape[1 if whole.dim() == 4 else -1]
    if shape == "(B,)":
        return torch.arange(batch)
    numbers = torch.arange(batch * width, dtype=whole.dtype).cos().view(batch, width)
    return numbers if shape == "(B, E)" else numbers.unsqueeze(1)
