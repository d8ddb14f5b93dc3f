# SPDX-License-Identifier: MIT
"""The axes of two tensors that were multiplied, one by one, and then summed along one of
them: a product of matrices that is written out, as (q * k).sum(-1)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Axes:
    """items: those that both have; first and second: those that one of them has alone;
    summed: the one that is summed along."""

    items: list[int]
    first: list[int]
    second: list[int]
    summed: int

    @property
    def count(self) -> int:
        return len(self.items) + len(self.first) + len(self.second) + 1

    def folded(self, tensor: Tensor, rows: list[int], columns: list[int]) -> Tensor:
        """(items, rows, columns) of a tensor with all axes."""
        sizes = [
            math.prod(tensor.shape[a] for a in axes)
            for axes in (self.items, rows, columns)
        ]
        order = [*self.items, *rows, *columns]
        left = [a for a in range(self.count) if a not in order]
        return tensor.permute(*order, *left).reshape(sizes)


def of_product(shape: torch.Size, axis: int, *operands: Tensor) -> Axes:
    """shape: that of the product. operands: with all axes, as whole() gives them."""
    first, second = operands
    others = [a for a in range(len(shape)) if a != axis]
    of_first = [a for a in others if second.shape[a] == 1 < first.shape[a]]
    of_second = [a for a in others if first.shape[a] == 1 < second.shape[a]]
    items = [a for a in others if a not in of_first + of_second]
    return Axes(items, of_first, of_second, axis)


def whole(
    tensor: Tensor, shape: torch.Size, axis: int, like: Tensor | None = None
) -> Tensor:
    """The tensor with all axes of a shape; of one, but the given one, along which it, or
    `like`, of the same shape, is only expanded, one number is left."""
    like = tensor if like is None else like
    rest = len(shape) - tensor.dim()
    tensor = tensor.reshape(*[1] * rest, *tensor.shape)
    for place, stride in enumerate([1] * rest + list(like.stride())):
        if stride == 0 and place != axis and tensor.shape[place] > 1:
            tensor = tensor.narrow(place, 0, 1)
    return tensor


def summed_axis(args: tuple, axes: int) -> int | None:
    """The only axis along which a tensor of so many is summed."""
    named = args[1] if len(args) > 1 else None
    return named[0] % axes if axes and named and len(named) == 1 else None
