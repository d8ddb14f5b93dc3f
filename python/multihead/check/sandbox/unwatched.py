# SPDX-License-Identifier: MIT
"""What is done beside a run of the code under test: nobody who watches that sees it."""

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """What is done inside are no calls of the code's: none of them is noted."""
    watcher = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(watcher)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """For calls that only try what the code takes: they are not recorded, and draw none
    of the numbers of those that follow."""
    with _disable_current_modes(), unwatched(), torch.no_grad():
        with torch.random.fork_rng(devices=[]):
            yield
