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
    context = call.parameter("context")
    makes_keys = not named and context is not None
    if makes_keys:
        named = [context]
    if sequence is None or not named:
        return

    def how(target: object, /, shape: str, **given: object) -> object:
        whole = given[sequence]
        if not isinstance(whole, Tensor):
            raise ValueError("it takes no sequence")
        vector = _mean(whole) if makes_keys else _vector(whole, shape)
        given |= dict.fromkeys(named, vector)
        return called(subject, target, given)

    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in call.parameters
        if p.name not in named
    ]
    for shape in ("(B, E)",) if makes_keys else ("(B, E)", "(B, 1, E)", "(B,)"):
        one = functools.partial(how, shape=shape)
        said = f"{', '.join(named)} taken for a vector for each item, {shape}"
        yield formed(subject, parameters, one, (), said, tuple(named))


def beside_others(subject: Subject, call: Call) -> Iterator[Form]:
    """With more sequences like its own in the place of what nobody understands."""
    sequence = call.parameter("value") or call.parameter("x") or call.parameter("query")
    unknown = [
        p.name
        for p in call.parameters
        if p.default is p.empty
        and (call.roles[p.name] is None or call.is_guessed(call.roles[p.name]))
        and call.roles[p.name] in (None, "mask")
    ]
    if sequence is None or not unknown:
        return

    def how(target: object, /, **given: object) -> object:
        whole = given[sequence]
        if not isinstance(whole, Tensor):
            raise ValueError("it takes no sequence")
        more = {n: whole.roll(i, 0) for i, n in enumerate(unknown, 1)}
        return called(subject, target, given | more)

    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in call.parameters
        if p.name not in unknown
    ]
    said = f"{', '.join(unknown)} taken for more sequences, like {sequence}"
    yield formed(subject, parameters, how, (), said, tuple(unknown))


def _mean(whole: Tensor) -> Tensor:
    """(B, E) of all positions. What becomes keys must come of what is given."""
    return whole.flatten(2).mean(-1) if whole.dim() == 4 else whole.mean(1)


def _vector(whole: Tensor, shape: str) -> Tensor:
    """Numbers that nothing is drawn for, so that nobody takes them for weights; as wide
    as the features, which are the channels of an image."""
    batch, width = len(whole), whole.shape[1 if whole.dim() == 4 else -1]
    if shape == "(B,)":
        return torch.arange(batch)
    numbers = torch.arange(batch * width, dtype=whole.dtype).cos().view(batch, width)
    return numbers if shape == "(B, E)" else numbers.unsqueeze(1)
