# SPDX-License-Identifier: MIT
"""The operators of libmultihead_diagnosis: who never checks never loads it."""

import functools
from typing import Any

import torch

from .. import _library


@functools.cache
def operators() -> Any:
    """torch.ops.multihead, the operators of diagnosis/ops.cpp among them."""
    _library.load("libmultihead_diagnosis.so")
    return torch.ops.multihead
