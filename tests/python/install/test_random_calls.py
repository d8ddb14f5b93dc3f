# SPDX-License-Identifier: MIT
"""Random calls of PyTorch's function and module, refused ones among them, under
install()."""

import os

import differential
import parity
import pytest
import torch
import torch.nn.functional as F
from test_differential import are_same, assert_right, attempt, shapes
from torch import nn

import multihead

CALLS = 4000 if os.environ.get("MULTIHEAD_LONG") else 480
CHUNKS = 12


def judge(call, note):
    """What came of a call, in a word."""
    theirs, their_error = attempt(F.scaled_dot_product_attention, call)
    multihead.reset_stats()
    with multihead.installed():
        results, error = attempt(F.scaled_dot_product_attention, call)
    is_ours = multihead.stats().calls("fused") > 0
    assert str(error) == str(their_error) and type(error) is type(their_error), note
    if error is not None:
        assert not is_ours, note
        return "refused"
    if not is_ours:
        assert are_same(results, theirs), note
        return "PyTorch's"
    assert shapes(results) == shapes(theirs), note
    if not (call.has_no_scores or results["out"].numel() == 0):
        assert_right(results, call, note)
    return "ours"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_calls(chunk):
    seeds = range(chunk, CALLS, CHUNKS)
    calls = {seed: differential.draw(seed) for seed in seeds}
    met = [judge(call, f"call {seed}") for seed, call in calls.items()]
    assert met.count("ours") > len(met) / 8
    assert {"ours", "PyTorch's", "refused"} == set(met)


# --- torch.nn.MultiheadAttention -----------------------------------------------------


def judge_module(c):
    """Shapes and strides are PyTorch's; values within the rounding of float64, whose
    losses are float32's. Dropout, and rows that see no key, are ours to differ in."""
    theirs = parity.run(nn.MultiheadAttention, c)
    multihead.reset_stats()
    ours = parity.run(nn.MultiheadAttention, c, multihead.installed())
    is_ours = multihead.stats().calls("fused") > 0
    assert multihead.stats().calls() == is_ours, c
    values = [x for x in theirs.values() if x is not None and x.is_floating_point()]
    if c.dropout and c.training or any(x.isnan().any() for x in values):
        return is_ours
    for name, b in theirs.items():
        a = ours[name]
        assert (a is None) == (b is None), (c, name)
        if b is not None:
            assert a.stride() == b.stride(), (c, name)
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    return is_ours


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_modules(chunk):
    seeds = range(chunk, CALLS, CHUNKS)
    met = [judge_module(parity.draw(seed, (torch.float64,))) for seed in seeds]
    assert any(met) and not all(met)  # weights that training forms stay PyTorch's
