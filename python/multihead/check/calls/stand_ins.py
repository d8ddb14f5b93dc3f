# SPDX-License-Identifier: MIT
"""Modules that a constructor is handed, where nobody has others."""

import re

import torch
from torch import nn

from ..subject.words import words
from .cases import Sizes

_TURNS = re.compile(r"^(apply|rotate|rope|turn|forward)")


class Unturned(nn.Module):
    """Rotary positions that turn nothing, however they are called: each is the first.
    What it is given comes back, without what only says where it stands."""

    def forward(self, *given: object, **_: object) -> object:
        heads = [x for x in given if isinstance(x, torch.Tensor) and x.dim() >= 3]
        return tuple(heads[:2]) if len(heads) > 1 else heads[0] if heads else None

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if _TURNS.search(name):
                return self.forward
            raise


def projection(name: str, sizes: Sizes) -> nn.Linear | None:
    """The layer that an argument of this name projects by, if its name says which."""
    said = set(words(name))
    if not said & {"proj", "projection", "linear", "w"}:
        return None
    heads = sizes.heads * sizes.head_dim
    groups = (sizes.kv_heads or sizes.heads) * sizes.head_dim
    if said & {"q", "query"}:
        return nn.Linear(sizes.embed, heads)
    if said & {"k", "v", "key", "value"}:
        return nn.Linear(sizes.embed, groups)
    return nn.Linear(heads, sizes.embed) if said & {"o", "out", "output"} else None
