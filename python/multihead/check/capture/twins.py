# SPDX-License-Identifier: MIT
"""Layers that are called twice where another like them, beside them, never is."""

import re

from torch import nn

from ..report import Finding
from .dropouts import is_spoken_of
from .record import Frames

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_TIES = re.compile(r"\btie[sd]?(_|\b)|\bshar(e|es|ed|ing)(_|\b)", re.I)


def called_twice(target: object, frames: Frames, text: str) -> Finding | None:
    """What is wrong where one layer of an owner stands for two: the text of the code
    speaks of the other one nowhere but where it is made, and does not tie them."""
    if not isinstance(target, nn.Module) or _TIES.search(text):
        return None
    for path, owner in target.named_modules():
        if isinstance(owner, _LISTS) or type(owner).__module__.startswith("torch."):
            continue
        layers = dict(owner.named_children())
        for left, layer in layers.items():
            if id(layer) in frames.calls or not any(True for _ in layer.parameters()):
                continue
            if is_spoken_of(type(owner), left):
                continue
            # Once for each call of its owner would be the usual.
            most = 2 * max(1, frames.calls[id(owner)])
            for used, other in layers.items():
                if frames.calls[id(other)] >= most and _are_alike(layer, other):
                    return _of(*(f"{path}.{n}".strip(".") for n in (used, left)))
    return None


def _are_alike(one: nn.Module, other: nn.Module) -> bool:
    shapes = [{n: p.shape for n, p in part.named_parameters()} for part in (one, other)]
    return type(one) is type(other) and shapes[0] == shapes[1]


def _of(used: str, left: str) -> Finding:
    return Finding(
        "layer_used_twice",
        f"`{used}` is called twice, and `{left}`, a layer like it beside it, never is.",
        "Call each for what its name says, or take out the one that is not used.",
    )
