# SPDX-License-Identifier: MIT
"""What a run finds around it: defaults of PyTorch, random generators, and no compiler."""

import contextlib
import functools
import random
import re
from collections.abc import Iterator

import torch

from ..calls.cases import Case
from ..sandbox.compilers import uncompiled


@functools.cache
def _hangs_hooks(source: str) -> bool:
    return re.search(r"\.(register_hook|retain_grad)\(", source) is not None


@contextlib.contextmanager
def settings(case: Case, seed: int, source: str = "") -> Iterator[None]:
    """Default dtype, gradients and seeds of a run. source: the text of the code, which
    may hang hooks on gradients, whoever asks for them."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    # Not 0 or 42, which the code itself may set, which is to be noticed.
    seed += 20_173_706
    # torch.manual_seed visits devices that nobody uses, 0.6 ms for each run.
    on_cuda = torch.cuda.is_initialized()
    (torch.manual_seed if on_cuda else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)
    try:
        grad = torch.set_grad_enabled(case.gradients or _hangs_hooks(source))
        with grad, uncompiled():
            yield
    finally:
        torch.set_default_dtype(default)
