# SPDX-License-Identifier: MIT
"""Where tensors keep their numbers: a view is a tensor of its own, but shows the same."""

from torch import Tensor

Place = tuple[int, int]

# Operations that show the same numbers: all of them, or some.
SHOWS_ALL = {"view", "_unsafe_view", "_reshape_alias", "reshape", "expand", "permute"}
SHOWS_ALL |= {"transpose", "t", "unsqueeze", "squeeze", "clone", "_to_copy"}
SHOWS_ALL |= {"contiguous", "detach", "alias"}
CUTS = {"slice", "select", "split", "split_with_sizes", "unbind", "chunk", "narrow"}


def storage(tensor: Tensor) -> int:
    """What tensors that show the same memory have in common."""
    return tensor.untyped_storage()._cdata


def place(tensor: Tensor) -> Place:
    """Where it begins: parts of a fused tensor are told apart by it."""
    return storage(tensor), tensor.storage_offset()
