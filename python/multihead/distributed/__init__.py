# SPDX-License-Identifier: MIT
"""Attention on PyTorch's own distributed engine. Import it by name: ``import multihead``
does not, because torch.distributed.tensor takes a second."""

from ._parallel import AttentionParallel
from ._ring import ring_attention, ring_varlen_attention
from ._sharding import register

__all__ = ["AttentionParallel", "register", "ring_attention", "ring_varlen_attention"]

register()
