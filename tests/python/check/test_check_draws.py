# SPDX-License-Identifier: MIT
"""The largest random tensors that a file makes before it is looked at."""

import pytest
import torch

from multihead.check.sandbox import draws

_LARGE = draws._LARGE


@pytest.mark.parametrize("name", ["normal_", "uniform_"])
def test_large_ones_repeat_their_first_numbers(name):
    with draws.large_ones_repeat():
        drawn = getattr(torch.empty(3 * _LARGE + 5), name)()
    first = drawn[:_LARGE]
    assert first.unique().numel() > _LARGE // 3
    assert torch.equal(drawn[_LARGE : 2 * _LARGE], first)
    assert torch.equal(drawn[3 * _LARGE :], first[:5])


def test_others_are_drawn_as_ever():
    torch.manual_seed(0)
    expected = torch.empty(64, 64).normal_(1.0, 2.0), torch.empty(9).uniform_()
    torch.manual_seed(0)
    with draws.large_ones_repeat():
        drawn = torch.empty(64, 64).normal_(1.0, 2.0), torch.empty(9).uniform_()
        torch.nn.init.normal_(torch.nn.Embedding(2, 3).weight)
    assert all(map(torch.equal, drawn, expected))
    assert "normal_" not in vars(torch.Tensor)


def test_what_stands_apart_in_memory_is_drawn_whole():
    with draws.large_ones_repeat():
        drawn = torch.empty(2, _LARGE).mT.normal_()
    assert not torch.equal(drawn[:, 0], drawn[:, 1])
