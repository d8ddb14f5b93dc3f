# SPDX-License-Identifier: MIT
"""Ten steps of training on several processes, beside the same on one."""

import functools

import pytest
import torch
from models import LAYOUTS, Run, world_of
from ranks import on_ranks, run

STEPS = 10


def train(layout, dtype=torch.float64):
    """(losses, parameters) after ten steps."""
    training = Run(layout, dtype)
    losses = torch.stack([training.step(number) for number in range(STEPS)])
    return losses, training.values()


alone = functools.cache(train)


def error(got, golden):
    """The largest difference, of a loss or of any parameter."""
    differences = [(got[0] - golden[0]).abs().max()]
    differences += [(got[1][x] - golden[1][x]).abs().max() for x in golden[1]]
    return max(x.item() for x in differences)


@pytest.mark.parametrize(
    "layout", [x for x in LAYOUTS if x not in ("whole", "fsdp 1 x tp 2")]
)
def test_ten_steps(layout):
    """In float64 within 2^12 roundings of 1, on every process."""
    golden = alone("whole")
    assert golden[0][-1] < 0.9 * golden[0][0]  # it learns
    for got in run(train, world_of(layout), layout=layout):
        assert error(got, golden) < 2.0**-41


@pytest.mark.parametrize("layout", ["fsdp 2", "fsdp 2 x tp 2", "cp 4"])
def test_ten_steps_in_float32(layout):
    """At most four times as far from float64 as one process is: sums of other order."""
    golden = alone("whole")
    one = error(alone("whole", torch.float32), golden)
    for got in run(train, world_of(layout), layout=layout, dtype=torch.float32):
        assert error(got, golden) < 4 * one


@on_ranks(4)
def test_the_bound_sees_a_fault(world):
    """Of one bias that is added twice on the way, say: 1e-6 is far outside."""
    training = Run("fsdp 2 x tp 2")
    with torch.no_grad():
        training.model[1].attn.out_proj.bias.add_(1e-6)
    losses = torch.stack([training.step(number) for number in range(STEPS)])
    golden = alone("whole")
    assert error((losses, training.values()), golden) > 2.0**-30
