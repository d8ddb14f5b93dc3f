# SPDX-License-Identifier: MIT
"""Products by oneDNN, tested also where MKL is as fast.

On an Intel processor that has AVX-512 the tests run with MULTIHEAD_LINEAR=always.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from torch import Tensor

import multihead  # noqa: F401  its operators

ALWAYS = {"MULTIHEAD_LINEAR": "always"}
with mock.patch.dict(os.environ, ALWAYS):
    WHY_NOT = torch.ops.multihead.why_not_linear()
needs_onednn = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tests of a file that imports it."""
    for name, value in ALWAYS.items():
        monkeypatch.setenv(name, value)


def assert_as_exact(ours: Tensor, pytorchs: Tensor, exact: Tensor) -> None:
    """At most four times PyTorch's error: oneDNN adds in sequence, MKL in blocks."""
    assert ours.dtype == pytorchs.dtype == torch.float32
    assert ours.shape == pytorchs.shape and ours.stride() == pytorchs.stride()
    error = (ours.double() - exact).abs().max()
    assert error <= 4 * (pytorchs.double() - exact).abs().max() + 1e-12
