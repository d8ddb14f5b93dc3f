# SPDX-License-Identifier: MIT
"""scaled_dot_product_attention against float64 loops, all options mixed.

Judged by the budget of budget.py.
"""

import os
import random

import numpy as np
import pytest
import reference
import torch
from equal import assert_equal
from error_budget import BUDGETS

import multihead

TIMES = 10 if os.environ.get("MULTIHEAD_LONG") else 1


SMALL = dict(lengths=(9, 12), widths=(1, 3, 8, 16, 33), value_widths=(1, 5, 16))


def draw(seed: int, dtype: torch.dtype, sizes: dict = SMALL):
    """(q, k, v, keyword arguments) and the same as reference.Rules.

    sizes: the largest lengths of query and key, and the head widths.
    """
    r = random.Random(seed)
    torch.manual_seed(seed)
    B, G, group = r.randint(1, 3), r.randint(1, 3), r.choice((1, 1, 2, 3))
    longest_query, longest_key = sizes["lengths"]
    H, Lq, Lk = G * group, r.randint(1, longest_query), r.randint(1, longest_key)
    D, Dv = r.choice(sizes["widths"]), r.choice(sizes["value_widths"])
    size = r.choice((0.1, 1.0, 1.0, 4.0))
    q = (torch.randn(B, H, Lq, D) * size).to(dtype)
    k = (torch.randn(B, G, Lk, D) * size).to(dtype)
    v = torch.randn(B, G, Lk, Dv).to(dtype)
    kwargs, rules = {"enable_gqa": group > 1}, {"scale": D**-0.5}

    def maybe(probability=0.3):
        return r.random() < probability

    if maybe():
        kwargs["scale"] = rules["scale"] = r.choice((0.0, -0.5, 0.3, 2.0))
    if maybe():
        kwargs["is_causal"] = rules["is_causal"] = True
    if maybe():
        kwargs["causal_alignment"] = "bottom_right"
        rules["bottom_right"] = True
    elif maybe():
        offset = torch.randint(-Lq - 1, Lk + 2, r.choice(((), (B,))))
        kwargs["query_offset"] = offset.to(r.choice((torch.int64, torch.int32)))
        rules["offsets"] = offset.expand(B).numpy()
    if maybe():
        kwargs["window"] = rules["window"] = (r.randint(-1, 6), r.randint(-1, 6))
    if maybe():
        kwargs["softcap"] = rules["softcap"] = r.choice((0.5, 3.0, 30.0))
    if maybe():
        lengths = torch.randint(0, Lk + 1, (B,))
        kwargs["key_lengths"], rules["key_lengths"] = lengths, lengths.numpy()
    if maybe():
        keys = torch.rand(B, Lk) < r.choice((0.2, 0.7, 1.0))
        kwargs["key_mask"], rules["key_mask"] = keys, keys.numpy()
    if maybe():
        slopes = torch.rand(*r.choice(((H,), (B, H))))
        kwargs["alibi_slopes"] = slopes
        rules["slopes"] = slopes.double().expand(B, H).numpy()
    if maybe():
        sinks = torch.randn(H)
        kwargs["sinks"], rules["sinks"] = sinks, sinks.double().numpy()
    if maybe(0.5):
        shape = [r.choice((n, 1)) for n in (B, H, Lq, Lk)][r.choice((0, 0, 1, 2)) :]
        if maybe(0.5):
            mask = torch.rand(shape) < 0.7
            rules["keep"] = mask.expand(B, H, Lq, Lk).numpy()
        else:
            mask = torch.randn(shape, dtype=r.choice((dtype, torch.float32)))
            mask[torch.rand(shape) < 0.2] = float("-inf")
            rules["bias"] = mask.double().expand(B, H, Lq, Lk).numpy()
        kwargs["attn_mask"] = mask
    return (q, k, v), kwargs, reference.Rules(**rules)


@pytest.mark.parametrize("backend", ["auto", "exact"])
@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
def test_random_options(dtype, backend):
    budget, compared = BUDGETS[dtype], 0
    for seed in range(200 * TIMES):
        qkv, kwargs, rules = draw(seed, dtype)
        golden = reference.attention(*(x.double().numpy() for x in qkv), rules)
        with multihead.backend(backend):
            out, lse = multihead.scaled_dot_product_attention(
                *qkv, **kwargs, return_lse=True
            )
        assert out.dtype == dtype
        out, lse = out.double().numpy(), lse.double().numpy()
        error = np.abs(out - golden.out)
        assert (error <= budget.of_out(golden)).all(), (seed, kwargs, error.max())
        seen = np.isfinite(golden.logsumexp)
        assert (lse[~seen] == -np.inf).all(), (seed, kwargs)
        assert (out[~seen] == 0).all(), (seed, kwargs)
        error = np.abs(lse[seen] - golden.logsumexp[seen])
        assert (error <= budget.of_logsumexp(golden)[seen]).all(), (seed, kwargs)
        compared += seen.sum()
    assert compared > 2000  # the reference is not all empty rows


def test_three_dimensional_input_is_one_batch_row():
    q, k, v = torch.randn(4, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 3)
    arguments = dict(enable_gqa=True, window=(2, 1), return_lse=True)
    out, lse = multihead.scaled_dot_product_attention(q, k, v, **arguments)
    out4, lse4 = multihead.scaled_dot_product_attention(
        q[None], k[None], v[None], **arguments
    )
    assert torch.equal(out, out4[0]) and torch.equal(lse, lse4[0])


def test_keys_and_values_may_be_grouped_differently():
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 1, 7, 3)
    out = multihead.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, enable_gqa=True
    )
    torch.testing.assert_close(out, expected)


INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
INTEGERS += [torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("mode", ["auto", "exact", "fused"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_key_lengths_of_any_integers(dtype, mode):
    """Also those in which the lengths of keys and queries would overflow."""
    lengths = torch.tensor([3, 120])
    q, k = torch.randn(2, 2, 200, 8), torch.randn(2, 2, 300, 8, requires_grad=True)
    results = []
    for given in (lengths, lengths.to(dtype)):
        options = dict(
            key_lengths=given, is_causal=True, causal_alignment="bottom_right"
        )
        with multihead.backend(mode):
            out, lse = multihead.scaled_dot_product_attention(
                q, k, k, **options, return_lse=True
            )
            (gradient,) = torch.autograd.grad(out.square().sum(), k)
            summary = multihead.attention_summary(q, k, 2, **options)
        results.append((out, lse, gradient, summary))
    assert_equal(*results)


@pytest.mark.parametrize("mode", ["auto", "exact", "fused"])
def test_softcap_0_is_none(mode):
    """As in ONNX and FlashAttention."""
    q = torch.randn(2, 2, 5, 8, requires_grad=True)
    results = []
    for softcap in (None, 0.0, 0):
        with multihead.backend(mode):
            out = multihead.scaled_dot_product_attention(q, q, q, softcap=softcap)
            more = multihead.scaled_dot_product_attention(
                q, q, q, softcap=softcap, window=(2, 0), return_lse=True
            )
            summary = multihead.attention_summary(q, q, 2, softcap=softcap)
        (gradient,) = torch.autograd.grad(out.square().sum(), q)
        results.append((out, more, summary, gradient))
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])
    if mode == "exact":
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert torch.equal(results[1][0], expected)
