# SPDX-License-Identifier: MIT
"""From padded batches to rows one after the other, and back: FlashAttention's names."""

import torch
from torch import Tensor

__all__ = ["index_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of input (total, ...), by integers."""
    return input[indices]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of hidden_states (B, L, ...) that a mask keeps, one after the other.

    Args:
        hidden_states: (B, L, ...).
        attention_mask: (B, L), integers or bool; 1 or True: kept.
        unused_mask: the same; 1: kept as well, but not counted in the last result.

    Returns:
        The rows (total, ...), their indices in (B * L), the bounds int32 (B + 1,), the
        longest length, and how many rows of each sequence attention_mask keeps, (B,).
    """
    used = attention_mask.sum(-1, dtype=torch.int32)
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    bounds = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return hidden_states.flatten(0, 1)[indices], indices, bounds, longest, used


def pad_input(
    hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int
) -> Tensor:
    """The reverse: rows (total, ...) to (batch, seqlen, ...), 0 where there is none."""
    rest = hidden_states.shape[1:]
    padded = hidden_states.new_zeros(batch * seqlen, *rest)
    return padded.index_put((indices,), hidden_states).view(batch, seqlen, *rest)
