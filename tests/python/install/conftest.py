# SPDX-License-Identifier: MIT
"""Around every test of this room: nothing is counted before, nor installed after it."""

import pytest
import torch

import multihead


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    multihead.reset_stats()
    yield
    assert not multihead.is_installed()
