# SPDX-License-Identifier: MIT
"""Layers that are called twice where another like them, beside them, never is."""

import re

from torch import nn

from ..report import Finding
from .dropouts import is_spoken_of
from .frames import Frames

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_TIES = re.compile(r"ti(?:e|ed|es|ing)\b|shar(?:e|es|ed|ing)|reus|siamese", re.I)


def called_twice(target: object, frames: Frames, text: str) -> Finding | None:
    """What is wrong where one layer of an owner stands for two: their names differ in
    one word, and the text of the code speaks of the other one nowhere but where it is
    made, and does not tie them."""
    if not isinstance(target, nn.Module) or _TIES.search(text):
        return None
    for path, owner in target.named_modules():
        count = frames.calls[id(owner)] or int(owner is target)
        of_torch = type(owner).__module__.startswith("torch.")
        if isinstance(owner, _LISTS) or of_torch or count == 0:
            continue
        layers = dict(owner.named_children())
        for left, layer in layers.items():
            if id(layer) in frames.calls or not any(True for _ in layer.parameters()):
                continue
            for used, other in layers.items():
                times = frames.calls[id(other)] // count
                alike = _are_named_alike(used, left) and _are_alike(layer, other)
                if times >= 2 and alike and not is_spoken_of(type(owner), left):
                    names = (f"{path}.{name}".strip(".") for name in (used, left))
                    return _of(*names, times)
    return None


def _are_named_alike(one: str, other: str) -> bool:
    """norm1 and norm2, q_norm and k_norm; not norm and norm_out."""
    parts = [re.findall(r"\d+|[A-Za-z][a-z]*", name) for name in (one, other)]
    if len(parts[0]) != len(parts[1]):
        return False
    return sum(a != b for a, b in zip(*parts)) == 1


def _are_alike(one: nn.Module, other: nn.Module) -> bool:
    shapes = [{n: p.shape for n, p in part.named_parameters()} for part in (one, other)]
    return type(one) is type(other) and shapes[0] == shapes[1]


def _of(used: str, left: str, times: int) -> Finding:
    often = "twice" if times == 2 else f"{times} times"
    return Finding(
        "layer_used_twice",
        f"`{used}` is called {often}, and `{left}`, a layer like it beside it, never is.",
        "Call each for what its name says, or take out the one that is not used.",
    )
