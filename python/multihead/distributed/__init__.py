# SPDX-License-Identifier: MIT
"""Attention on PyTorch's own distributed engine. Import it by name: ``import multihead``
does not, because torch.distributed.tensor takes a second."""

from ._context import context_parallel, context_parallel_unshard, token_positions
from ._parallel import AttentionParallel
from ._sequences import (
    ring_attention,
    ring_varlen_attention,
    ulysses_attention,
    ulysses_varlen_attention,
)
from ._sharding import register

__all__ = [
    "AttentionParallel",
    "context_parallel",
    "context_parallel_unshard",
    "register",
    "ring_attention",
    "ring_varlen_attention",
    "token_positions",
    "ulysses_attention",
    "ulysses_varlen_attention",
]

register()
