# SPDX-License-Identifier: MIT
"""Rotary positions (Su et al., 2021) of packages, files and objects that are not there:
what stands in turns nothing, as if each token were the first, so that all else can be
judged."""

import dis
import re
import sys
import types

import torch
from torch import Tensor, nn

from .words import words

ROTARY = {"rope", "rotary"}
_NAMES = ROTARY | {"xpos"}
_TURNS = re.compile(r"^(apply|rotate|rope|turn|forward)")
left_out: set[str] = set()  # names that were called since the last file was loaded


def is_named(name: str) -> bool:
    """Whether it is the name of what turns heads, or makes what does."""
    return bool(_NAMES & set(words(name))) or name == "rotate_half"


class Unturned(nn.Module):
    """However it is called: what it is given comes back, without what only says where it
    stands; cosines of 1 and sines of 0 where two things are taken of one."""

    def __call__(self, *given: object, **named: object) -> object:
        return _unturned([*given, *named.values()], _taken(sys._getframe(1)))

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

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *given: object, **named: object) -> object:
        left_out.add(self.name)
        if any(map(_are_heads, (*given, *named.values()))):
            return _unturned([*given, *named.values()], _taken(sys._getframe(1)))
        made = Unturned()
        numbers = {n: v for n, v in named.items() if isinstance(v, (int, float))}
        vars(made).update(numbers)
        return made

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return Maker(self.name)  # of a module, or a method of a class

    def __mro_entries__(self, bases: tuple) -> tuple[type, ...]:
        return (Unturned,)


def _are_heads(x: object) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 3 and x.is_floating_point()


def _unturned(given: list[object], taken: int) -> object:
    heads = [x for x in given if isinstance(x, Tensor) and _are_heads(x)]
    if not heads:
        return None
    most = max(x.dim() for x in heads)
    heads = [x for x in heads if x.dim() == most]  # tables have fewer axes
    if len(heads) > 1 and taken != 1:
        return tuple(heads[:2])
    if taken == 2 and most == 4:  # of (B, H, L, D)
        ones = torch.ones_like(heads[0][:1, 0])
        return ones, torch.zeros_like(ones)
    return heads[0]


def _taken(frame: types.FrameType) -> int:
    """How many things the caller takes of what its call returns; 0: nobody knows."""
    is_next = False
    for instruction in dis.get_instructions(frame.f_code):
        if is_next and instruction.opname != "CACHE":
            return instruction.arg or 0 if "UNPACK" in instruction.opname else 0
        is_next = is_next or instruction.offset == frame.f_lasti
    return 0
