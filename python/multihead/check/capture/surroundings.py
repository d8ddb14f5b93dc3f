# SPDX-License-Identifier: MIT
"""What a run finds around it: defaults of PyTorch, and random generators."""

import contextlib
import random
from collections.abc import Iterator

import torch

from ..calls.cases import Case


@contextlib.contextmanager
def settings(case: Case, seed: int) -> Iterator[None]:
    """Default dtype, gradients and seeds of a run."""
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
        with torch.set_grad_enabled(case.gradients):
            yield
    finally:
        torch.set_default_dtype(default)
