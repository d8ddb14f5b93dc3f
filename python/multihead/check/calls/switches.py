# SPDX-License-Identifier: MIT
"""What makes attention causal, turns it by positions, shifts its windows or has it keep
keys and values: arguments of a constructor, which are off, most of them, unless they are
asked for."""

import inspect
import re

from ..subject.absent_rotary import ROTARY
from ..subject.masking import causal_flag
from ..subject.target import Subject, text_of_file
from ..subject.words import words
from .settings import is_never_read

_CAUSAL = set("causal mask masked masking attention attn is use with apply".split())
_OF_LATER = re.compile(
    r"tri[lu]\b|causal|future|later|ahead|subsequent|decoder|regress", re.I
)
_OF_ROTARY = ROTARY | set(
    "use with apply enable is embedding embeddings emb pos".split()
)
_OF_ROTARY |= {"positional", "position", "encoding"}


def causal(subject: Subject, parameters: list[inspect.Parameter]) -> str | None:
    """The flag that makes it causal, and is off by default or, if it is on, is never
    read; where no mask is given, also one that says no more than that it is masked, in a
    file that speaks of later keys."""
    names = [p.name for p in parameters if p.default is False]
    on = (p.name for p in parameters if p.default is True)
    names += [name for name in on if is_never_read(subject.target, name)]
    said = {name: set(words(name)) for name in names}
    asked = inspect.signature(subject.entry).parameters
    takes_mask = any("mask" in name for name in asked)
    hides = _OF_LATER.search(text_of_file(subject)) is not None
    known = {"causal"} | (set() if takes_mask or not hides else {"masked", "mask"})
    named = (n for n in names if said[n] & known and said[n] <= _CAUSAL)
    return next(named, None) or causal_flag(subject.source, parameters)


def rotary(parameters: list[inspect.Parameter]) -> str | None:
    """The flag that turns queries and keys by their positions, if it is off."""
    off = (p.name for p in parameters if p.default is False)
    said = ((name, set(words(name))) for name in off)
    return next((n for n, w in said if w & ROTARY and w <= _OF_ROTARY), None)


def cache(parameters: list[inspect.Parameter]) -> str | None:
    """The flag that has it keep keys and values of its calls, if it is off."""
    off = (p.name for p in parameters if p.default is False)
    said = ((name, set(words(name))) for name in off)
    return next((n for n, w in said if w & _CACHES and w <= _OF_CACHES), None)


_CACHES = {"cache", "caching", "cached"}
_OF_CACHES = _CACHES | {"use", "with", "enable", "is", "kv", "key", "value", "k", "v"}


def shift(parameters: list[inspect.Parameter]) -> str | None:
    """By how many pixels windows are shifted, or whether they are."""
    kinds = (int, bool)
    may_be = (p for p in parameters if type(p.default) in kinds or p.default is p.empty)
    said = ((p.name, set(words(p.name))) for p in may_be)
    return next((n for n, w in said if w & _SHIFTS and w <= _OF_SHIFTS), None)


_SHIFTS = {"shift", "shifted"}
_OF_SHIFTS = _SHIFTS | {"size", "window", "windows", "win", "use", "is", "do", "with"}
