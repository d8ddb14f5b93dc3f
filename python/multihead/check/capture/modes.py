# SPDX-License-Identifier: MIT
"""Modes of layers that are written by hand, which their model sets from outside:
`layer.mode = "test"`, which a layer by itself has not, or `layer.training = False`."""

import re
from collections.abc import Iterator

from torch import nn

_COMPARED = re.compile(r"self\.(\w*mode)\s*(?:==|!=)\s*[\"'](\w+)[\"']")
_FLAGS = ("training", "is_training", "train_mode", "is_train")
_OF_OTHERS = ("builtins", "torch", "numpy", "collections")
_DEEPEST = 4


class Modes:
    """Those of the objects that an instance is made of, as a text compares them."""

    def __init__(self, target: object, text: str) -> None:
        self._choices: dict[str, list[str]] = {}
        for name, choice in _COMPARED.findall(text):
            self._choices.setdefault(name, []).append(choice)
        by_hand = not isinstance(target, nn.Module)  # which has eval()
        parts = list(_parts(target, _DEEPEST)) if self._choices or by_hand else []
        self._flags = [
            (part, name)
            for part in parts
            for name in _FLAGS
            if by_hand and type(vars(part).get(name)) is bool
        ]
        self._without = [
            (part, name)
            for part in parts
            for name in self._choices
            if not hasattr(part, name)
        ]

    def set(self, training: bool) -> None:
        for part, name in self._flags:
            setattr(part, name, training)
        for part, name in self._without:
            usual = "train" if training else "test"
            fitting = (c for c in self._choices[name] if ("train" in c) == training)
            setattr(part, name, next(fitting, usual))


def _parts(target: object, depth: int) -> Iterator[object]:
    """An object of the code's own, and those that it keeps."""
    if isinstance(target, (list, tuple, dict, nn.ModuleList)):
        kept = target.values() if isinstance(target, dict) else target
    elif type(target).__module__.partition(".")[0] in _OF_OTHERS:
        return
    elif not hasattr(target, "__dict__"):
        return
    else:
        yield target
        kept = [*getattr(target, "__dict__", {}).values()]
    for one in kept if depth else ():
        yield from _parts(one, depth - 1)
