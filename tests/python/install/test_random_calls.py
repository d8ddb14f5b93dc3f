# SPDX-License-Identifier: MIT
"""Random calls of PyTorch's function, refused ones among them, under install()."""

import os

import differential
import pytest
import torch.nn.functional as F
from test_differential import are_same, assert_right, attempt, shapes

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
