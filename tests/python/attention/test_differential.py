# SPDX-License-Identifier: MIT
"""scaled_dot_product_attention against PyTorch's, call by call, errors included."""

import math
import os

import differential
import pytest
import torch
import torch.nn.functional as F
from error_budget import BUDGETS

import multihead

CALLS = 2000 if os.environ.get("MULTIHEAD_LONG") else 240
CHUNKS = 12
# What PyTorch refuses and the definition has; docs/parity.md, the function.
BEYOND = (
    "Explicit attn_mask should not be set when is_causal=True",
    "Expected attn_mask dtype to be bool or float or to match query dtype",
    # bfloat16 under float32
    "Expected query, key, and value to have the same dtype",
    "Dimension specified as -2 but tensor has no dimensions",
    "expected to be in range of [-1, 0], but got -2",
)


def attempt(function, call):
    """(results, None) or (None, the error)."""
    try:
        return differential.run(function, call), None
    except Exception as error:
        return None, error


def ours(call, name):
    with multihead.backend(name):
        return attempt(multihead.scaled_dot_product_attention, call)


def out_of_range(options):
    """The type of error that an argument outside its domain gives, or None."""
    if not 0.0 <= options.get("dropout_p", 0.0) <= 1.0:
        return RuntimeError
    return None if math.isfinite(options.get("scale", 1.0)) else ValueError


def are_same(results, expected):
    """Bits, dtypes, shapes, and the strides of the output."""

    def same(a, b):
        if a is None or b is None:
            return a is b
        same_kind = (a.dtype, a.shape) == (b.dtype, b.shape)
        return same_kind and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)

    return (
        results.keys() == expected.keys()
        and all(same(results[name], expected[name]) for name in expected)
        and results["out"].stride() == expected["out"].stride()
    )


def shapes(results):
    """By name; PyTorch has no gradient for a mask where there is nothing to mask."""
    return {
        k: x.shape for k, x in results.items() if x is not None and k != "attn_mask"
    }


def assert_right(results, call, note):
    """Within the error that the dtype allows."""
    expected, conditions, largest = differential.golden(call)
    for name, a in results.items():
        b = expected[name]
        assert a.shape == b.shape, (note, name)
        error = (a.double() - b).abs()
        # A mask may have a dtype of its own. What is subnormal in float32 is left out
        # of products of bfloat16.
        dtypes = {call.tensors[0].dtype, a.dtype}
        limits = [BUDGETS[dtype].allowed(conditions[name], largest) for dtype in dtypes]
        allowed = torch.stack(limits).amax(0).clamp_min(2.0**-125)
        assert (error <= allowed).all(), (note, name, (error / allowed).max())


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_calls(chunk):
    seeds = range(chunk, CALLS, CHUNKS)
    met = [judge(differential.draw(seed), f"call {seed}") for seed in seeds]
    assert met.count("agrees") > len(met) / 3


def judge(call, note):
    """What came of a call, in a word or two."""
    refusal = out_of_range(call.options)
    if refusal:
        for name in ("exact", "auto"):
            assert type(ours(call, name)[1]) is refusal, (note, name)
        return "out of range"

    theirs, their_error = attempt(F.scaled_dot_product_attention, call)
    exact, exact_error = ours(call, "exact")
    assert type(exact_error) is type(their_error), (note, exact_error, their_error)
    if theirs is not None:
        assert are_same(exact, theirs), note

    results, error = ours(call, "auto")
    if their_error is not None and error is not None:
        assert isinstance(error, (RuntimeError, IndexError)), (note, error)
        return "both refuse"
    if error is not None:
        assert call.has_no_elements and type(error) is RuntimeError, (note, error)
        return "does not fit"
    if their_error is not None:
        assert any(text in str(their_error) for text in BEYOND), (note, their_error)
    if call.has_no_scores or results["out"].numel() == 0:
        assert theirs is None or shapes(results) == shapes(theirs), note
        assert not any(x is not None and x.any() for x in results.values()), note
    elif theirs is None or not are_same(results, theirs):
        # Of other ranks, or broadcast, the call is PyTorch's, and so is the result.
        assert_right(results, call, note)
    return "beyond PyTorch" if theirs is None else "agrees"
