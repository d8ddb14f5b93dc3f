# SPDX-License-Identifier: MIT
"""Variables of a file that code reads in the place of its arguments, as happens in
notebooks, where both are there."""

import dis
import inspect
import re

from torch import Tensor

from ..report import Finding
from .holding import is_array
from .roles import TENSORS
from .signature import Call
from .target import Subject
from .words import words

_TENSORS = {*TENSORS, "mask", "context_mask", "padding"}
# What docstrings say of arguments that are there for others.
_ON_PURPOSE = re.compile(
    r"\bunused\b|\bignored\b|\bnot (?:\w+ )?(?:used|supported|applied|read)\b|"
    r"\bkept for\b|compatib",
    re.I,
)


def of_file(subject: Subject, call: Call) -> list[Finding]:
    """An argument that the code never reads, beside a tensor of its file that it does,
    of a like name: `padding_mask` for `key_padding_mask`."""
    entry = inspect.unwrap(subject.entry)
    code, known = getattr(entry, "__code__", None), getattr(entry, "__globals__", {})
    if code is None:
        return []
    loaded = [one for one in dis.get_instructions(code) if "LOAD" in one.opname]
    read = {one.argval for one in loaded if one.opname == "LOAD_GLOBAL"}
    named = {*code.co_cellvars, *(one.argval for one in loaded)}
    unread = [
        p.name
        for p in call.parameters
        if p.name not in named and call.roles[p.name] in _TENSORS
    ]
    if _ON_PURPOSE.search(inspect.getdoc(entry) or ""):
        return []
    tensors = [name for name in sorted(read) if _holds_numbers(known.get(name))]
    pairs = (
        (name, argument)
        for argument in unread
        for name in tensors
        if _are_alike(set(words(name)), set(words(argument)))
    )
    return [
        Finding(
            "global_read",
            f"It reads `{name}`, a variable of its file, and never its own argument "
            f"`{argument}`: what the caller gives has no effect.",
            f"Write `{argument}` for `{name}`.",
        )
        for name, argument in pairs
    ][:1]


def _are_alike(one: set[str], other: set[str]) -> bool:
    return one <= other or other <= one


def _holds_numbers(value: object) -> bool:
    return isinstance(value, Tensor) or is_array(value)
