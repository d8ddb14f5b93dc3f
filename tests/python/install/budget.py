# SPDX-License-Identifier: MIT
"""What PyTorch's functions give under install(), judged beside what they give without.

Both are compared with the same call in float64. Ours may be twice as far from that as
PyTorch's is, plus a few roundings of the largest value, because PyTorch's error may
happen to be 0 for a small tensor.
"""

import torch
from torch import Tensor

import multihead

ROUNDINGS = 8


def assert_as_good(
    ours, theirs, exact, roundings: float = ROUNDINGS, computed_in=None
) -> None:
    """ours, theirs, exact: tensors, or tuples and dicts of them, that correspond.
    computed_in: the dtype whose roundings count; by default that of the results, which
    are float32 under autocast though they were computed in bfloat16."""
    if isinstance(exact, dict):
        assert ours.keys() == theirs.keys() == exact.keys()
        ours, theirs, exact = (tuple(x.values()) for x in (ours, theirs, exact))
    if isinstance(exact, tuple):
        assert len(ours) == len(theirs) == len(exact)
        for parts in zip(ours, theirs, exact):
            assert_as_good(*parts, roundings, computed_in)
        return
    if exact is None:
        assert ours is None and theirs is None
        return
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    unit = torch.finfo(computed_in or ours.dtype).eps * largest(exact)
    limit = 2 * largest(theirs.double() - exact) + roundings * unit
    assert largest(ours.double() - exact) <= limit


def largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def ways(source: str | None = "installed") -> dict[str, int]:
    """Calls since reset_stats() by reason, those of the kernels as "fused"."""
    return {
        count.reason or count.way: count.calls
        for count in multihead.stats()
        if source in (None, count.source)
    }
