# SPDX-License-Identifier: MIT
"""Rotary positions (Su et al., 2021) of packages, files and objects that are not there:
what stands in turns nothing, as if each token were the first, so that all else can be
judged."""

import dis
import re
import sys
import types
from typing import TypeGuard

import torch
from torch import Tensor, nn

from ..sandbox.guard import stood_in
from .words import words

ROTARY = {"rope", "rotary"}
_NAMES = ROTARY | {"xpos"}
_TURNS = re.compile(r"^(apply|rotate|rope|turn|forward)")


def is_named(name: str) -> bool:
    """Whether it is the name of what turns heads, or makes what does."""
    return bool(_NAMES & set(words(name))) or name == "rotate_half"


class Unturned(nn.Module):
    """However it is called: what it is given comes back, without what only says where it
    stands; cosines of 1 and sines of 0 where two things are taken of one."""

    def __call__(self, *given: object, **named: object) -> object:
        return _unturned(given, named, _taken(sys._getframe(1)))

    forward = __call__

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if _TURNS.search(name):
                return self.__call__
            raise


class Maker:
    """A class or a function of this name, which turns what it is called with, or makes
    what does."""

    def __init__(self, reason: ImportError, name: str) -> None:
        self.reason, self.name = reason, name

    def __call__(self, *given: object, **named: object) -> object:
        stood_in[self.name] = self.reason
        if any(map(_are_heads, (*given, *named.values()))):
            return _unturned(given, named, _taken(sys._getframe(1)))
        made = Unturned()
        numbers = {n: v for n, v in named.items() if isinstance(v, (int, float))}
        vars(made).update(numbers)
        return made

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return Maker(self.reason, self.name)  # of a module, or a method of a class

    def __mro_entries__(self, bases: tuple) -> tuple[type, ...]:
        stood_in[self.name] = self.reason
        return (Unturned,)


def _are_heads(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.dim() >= 3 and x.is_floating_point()


def _unturned(given: tuple, named: dict[str, object], taken: int) -> object:
    """Queries before keys, whatever their order by name; of what has as many axes, the
    largest, as tables are the same for all items and heads."""
    of_queries = sorted(named, key=lambda name: not name.startswith("q"))
    heads = [x for x in (*given, *(named[n] for n in of_queries)) if _are_heads(x)]
    if not heads:
        return None
    most = max(x.dim() for x in heads)
    heads = [x for x in heads if x.dim() == most]  # tables have fewer axes
    if taken == 2 and len(heads) == 1:
        ones = torch.ones((1, 1, heads[0].shape[-1] if most > 3 else 1)).to(heads[0])
        return ones, torch.zeros_like(ones)
    if taken == 1 or len(heads) == 1:
        return heads[0]
    least = sorted(x.numel() for x in heads)[-2]
    return tuple([x for x in heads if x.numel() >= least][:2])


def _taken(frame: types.FrameType) -> int:
    """How many things the caller takes of what its call returns; 0: nobody knows."""
    is_next = False
    for instruction in dis.get_instructions(frame.f_code):
        if is_next and instruction.opname != "CACHE":
            return instruction.arg or 0 if "UNPACK" in instruction.opname else 0
        is_next = is_next or instruction.offset == frame.f_lasti
    return 0
