# SPDX-License-Identifier: MIT
"""Attention on PyTorch's own distributed engine. Import it by name: ``import multihead``
does not, because torch.distributed.tensor takes a second."""

from ._parallel import AttentionParallel

__all__ = ["AttentionParallel"]
