# SPDX-License-Identifier: MIT
"""Triangles, as causal masks are made of."""

import torch
from torch import Tensor

_BLOCKS = 30.0  # what is added to scores to block them is more than that


def is_triangle(tensor: Tensor) -> bool:
    """Whether it holds one number below the diagonal, and another above."""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.is_complex():
        return False
    size = tensor.shape[-1]
    if size < 3 or tensor.numel() > 1 << 22:
        return False
    plane = tensor.detach().reshape(-1, size, size)[0]
    below = torch.ones(size, size, dtype=torch.bool).tril(-1)
    low, high = plane[below], plane[below.T]
    return bool((low == low[0]).all() and (high == high[0]).all() and low[0] != high[0])


def blocks_nothing(tensor: Tensor) -> bool:
    """Whether all above the diagonal is one number, which is too small to block."""
    size = tensor.shape[-1]
    if tensor.dim() < 2 or tensor.shape[-2] != size or size < 3:
        return False
    above = tensor[..., torch.ones(size, size, dtype=torch.bool).triu(1)]
    first = above.flatten()[0]
    return bool((above == first).all()) and bool((tensor.abs() < _BLOCKS).all())
