# SPDX-License-Identifier: MIT
"""Which tokens a process has, counted a second time, and whole calls cut for it."""

import torch

ORDERS = ("contiguous", "head_tail")


def rows_of(order, length, rank, world):
    """The positions that rank holds of a sequence, in the order of its rows."""
    pieces = world if order == "contiguous" else 2 * world
    if order == "contiguous":
        each = -(-length // world)
        return torch.arange(min(rank * each, length), min((rank + 1) * each, length))
    cuts = torch.arange(length).tensor_split(pieces)
    return torch.cat((cuts[rank], cuts[pieces - 1 - rank]))


def loss(out, lse, dout, dlse):
    """Of out and logsumexp; rows that see nothing have no gradient of the latter."""
    return (out * dout).sum() + (lse.masked_fill(lse.isinf(), 0.0) * dlse).sum()


def leaf(x):
    return x.detach().clone().requires_grad_()
