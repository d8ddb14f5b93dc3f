# SPDX-License-Identifier: MIT
"""The fused path of scaled_dot_product_attention: who takes it, what it gives.

Values are judged against float64 loops by budget.py.
"""

import dataclasses
import itertools
import math
import os

import calls
import numpy as np
import pytest
import reference
import torch
from error_budget import BUDGETS, Budget
from paths import fused_calls
from test_definition import SMALL, draw
from torch.nn import functional as F
from torch.testing import assert_close

import multihead

TIMES = 10 if os.environ.get("MULTIHEAD_LONG") else 1
# Lengths and head widths around the seams of tiles, not divisible by any lanes.
LARGE = dict(
    lengths=(40, 80), widths=(64, 65, 96, 128, 257), value_widths=(1, 64, 80, 129)
)
attention = multihead.scaled_dot_product_attention
ops = torch.ops.multihead
CALLS = pytest.mark.parametrize("name", calls.OPTIONS)
DTYPES = pytest.mark.parametrize("dtype", BUDGETS, ids=str)


# --- Which path ----------------------------------------------------------------------


@CALLS
@pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("mode", ["auto", "fused", "exact"])
def test_backend_decides(name, mode, return_lse):
    inputs, options = calls.make(name, torch.float32)
    options["return_lse"] = return_lse
    if name == "bias, causal" and mode == "exact" and not return_lse:
        del options["is_causal"]  # PyTorch refuses both at once
    with multihead.backend(mode):
        reached = fused_calls(attention, *inputs, **options)
    assert reached == ([] if mode == "exact" else ["attention"])


@DTYPES
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_every_dtype_and_rank_is_fused(dtype, batched, dropout_p):
    q = torch.randn(2, 4, 3, 8, dtype=dtype)
    q = q if batched else q[0]
    assert fused_calls(attention, q, q, q, dropout_p=dropout_p) == ["attention"]


@CALLS
def test_training_takes_the_kernels(name):
    inputs, options = calls.make(name, torch.float32, grad=True)

    def step():
        attention(*inputs, **options).sum().backward()

    assert fused_calls(step) == ["attention", "backward"]
    with torch.no_grad():
        assert fused_calls(attention, *inputs, **options) == ["attention"]
    with torch.inference_mode():
        assert fused_calls(attention, *inputs, **options) == ["attention"]


@pytest.mark.parametrize("option", ["attn_mask", "alibi_slopes", "sinks"])
def test_the_gradient_of_an_option_alone(option):
    inputs, _ = calls.make("none", torch.float32)
    shape = (calls.LQ, calls.LK) if option == "attn_mask" else (calls.H,)
    wanted = torch.randn(shape, requires_grad=True)

    def step():
        attention(*inputs, **{option: wanted}).square().sum().backward()

    assert fused_calls(step) == ["attention", "backward"]
    assert (wanted.grad != 0).any()


# --- Values --------------------------------------------------------------------------


def within(value: torch.Tensor, golden: np.ndarray, budget: np.ndarray) -> bool:
    return bool((np.abs(value.double().numpy() - golden) <= budget).all())


def limit_of(budget: Budget, golden: reference.Result, scale: np.ndarray):
    """The budget for a result of that condition scale. exp has the floor of the
    arithmetic, though bfloat16 reaches lower."""
    floored = dataclasses.replace(budget, tiny=max(budget.tiny, 1e-37))
    return floored.of_out(dataclasses.replace(golden, out_scale=scale))


def entropy_of(weights: np.ndarray) -> np.ndarray:
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


def check_forward(golden, budget, out, lse):
    assert within(out, golden.out, budget.of_out(golden))
    seen = np.isfinite(golden.logsumexp)
    assert (lse.numpy()[~seen] == -np.inf).all()
    limit = budget.of_logsumexp(golden)[seen]
    assert within(lse[torch.tensor(seen)], golden.logsumexp[seen], limit)
    return seen.sum()


def check_weights(golden, budget, per_head, mean):
    limit = limit_of(budget, golden, golden.weights)
    assert within(per_head, golden.weights, limit)
    assert within(mean, golden.weights.mean(1), limit.mean(1))


def check_summary(golden, budget, largest, keys, entropy):
    """budget: of the arithmetic; these results are not stored in 16 bits."""
    limit = limit_of(budget, golden, golden.weights).max(-1, keepdims=True)
    ranked = -np.sort(-golden.weights, axis=-1)[..., : largest.size(-1)]
    assert within(largest[..., : ranked.shape[-1]], ranked, limit)
    found = np.take_along_axis(golden.weights, keys.clamp(min=0).numpy(), -1)
    assert within(largest, np.where(keys.numpy() < 0, 0, found), limit)
    expected = entropy_of(golden.weights)
    # d(w ln w) = (ln w + 1) dw
    limit = limit_of(budget, golden, expected + golden.weights.sum(-1))
    assert within(entropy, expected, limit)


@pytest.mark.parametrize(
    "sizes, count", [(SMALL, 200), (LARGE, 60)], ids=["small", "large"]
)
@DTYPES
def test_random_options(dtype, sizes, count):
    """Output, logsumexp, both forms of the weights, and the summary of one call."""
    budget, seen_rows = BUDGETS[dtype], 0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for seed in range(1000, 1000 + count * TIMES):
        (q, k, v), options, rules = draw(seed, dtype, sizes)
        golden = reference.attention(*(x.double().numpy() for x in (q, k, v)), rules)
        out, lse = ops.fused_attention(q, k, v, **options)
        assert (out.dtype, lse.dtype) == (dtype, wide)
        try:
            seen_rows += check_forward(golden, budget, out, lse)
            per_head, mean = (
                ops.attention_weights(q, k, lse, average, **options)
                for average in (False, True)
            )
            assert per_head.dtype == mean.dtype == dtype
            check_weights(golden, budget, per_head, mean)
            summary = ops.fused_attention_summary(q, k, lse, 3, **options)
            check_summary(golden, BUDGETS[wide], *summary)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {options}") from error
    assert seen_rows > 10 * count * TIMES  # the reference is not all empty rows


@pytest.mark.parametrize("name", ["groups", "everything", "keep mask", "slopes"])
def test_three_dimensional_operators(name):
    """(H, L, D) is one batch row; masks then have three dimensions at most."""
    (q, k, v), options = calls.make(name, torch.float32)
    for option in ("query_offset", "key_lengths", "key_mask", "alibi_slopes"):
        if option in options and options[option].size(0) == calls.B:
            options[option] = options[option][:1]
    if name == "keep mask":
        options["attn_mask"] = options["attn_mask"][0]
    out, lse = ops.fused_attention(q[0], k[0], v[0], **options)
    whole, whole_lse = ops.fused_attention(q[:1], k[:1], v[:1], **options)
    assert torch.equal(out, whole[0]) and torch.equal(lse, whole_lse[0])
    for average in (False, True):
        weights = ops.attention_weights(q[0], k[0], lse, average, **options)
        batch = ops.attention_weights(q[:1], k[:1], whole_lse, average, **options)
        assert torch.equal(weights, batch[0])
    summary = ops.fused_attention_summary(q[0], k[0], lse, 2, **options)
    batch = ops.fused_attention_summary(q[:1], k[:1], whole_lse, 2, **options)
    assert all(torch.equal(a, b[0]) for a, b in zip(summary, batch, strict=True))


# --- Masks ---------------------------------------------------------------------------


B, H, LQ, LK, D = 2, 4, 9, 37, 16
SHAPES = [
    shape[rank:]
    for rank in (0, 1, 2)
    for shape in itertools.product(*((n, 1) for n in (B, H, LQ, LK)))
    if all(n == 1 for n in shape[:rank])
]


def everything_of(q, k, v, mask, **options):
    """All results that a mask takes part in."""
    options |= dict(attn_mask=mask, enable_gqa=True)
    out, lse = ops.fused_attention(q, k, v, **options)
    return (
        out,
        lse,
        ops.attention_weights(q, k, lse, False, **options),
        ops.attention_weights(q, k, lse, True, **options),
        *ops.fused_attention_summary(q, k, lse, 4, **options),
    )


def same_bits(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def masks_in_memory(mask):
    """Equal masks in other memory."""
    yield mask.expand(B, H, LQ, LK)  # strides 0
    yield torch.stack([mask, mask], -1)[..., 1]  # last stride 2, misaligned
    wide = torch.cat([mask, mask, mask], -1)
    yield wide[..., mask.size(-1) : 2 * mask.size(-1)]  # a slice
    if mask.dim() > 1:
        yield mask.transpose(-1, -2).contiguous().transpose(-1, -2)


def qkv(dtype=torch.float32, groups=2, batch=B):
    torch.manual_seed(0)
    return (
        torch.randn(batch, H, LQ, D).to(dtype),
        torch.randn(batch, groups, LK, D).to(dtype),
        torch.randn(batch, groups, LK, D).to(dtype),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["keep", "bias"])
def test_shape_and_memory_of_masks_do_not_matter(kind, shape):
    q, k, v = qkv()
    keep = torch.rand(shape) < 0.6
    mask = keep if kind == "keep" else torch.randn(shape).masked_fill(~keep, -torch.inf)
    dense = mask.expand(B, H, LQ, LK).contiguous()
    expected = everything_of(q, k, v, dense)
    if kind == "keep":
        bias = torch.zeros(dense.shape).masked_fill(~dense, -torch.inf)
        assert_close(everything_of(q, k, v, bias)[0], expected[0])
    blocked = ~(dense if kind == "keep" else dense > -torch.inf)
    assert (expected[2][blocked] == 0).all()
    for view in masks_in_memory(mask):
        assert same_bits(everything_of(q, k, v, view), expected)


@DTYPES
@pytest.mark.parametrize("of_mask", BUDGETS, ids=str)
def test_float_masks_of_another_dtype(dtype, of_mask):
    """Are used in the precision of the arithmetic, not in that of query."""
    q, k, v = qkv(dtype)
    mask = torch.randn(H, LQ, LK, dtype=of_mask)
    mask[:, :, 3] = -torch.inf
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = everything_of(q, k, v, mask.to(wide))
    assert same_bits(everything_of(q, k, v, mask), expected)
    # Not cast to all its (H, LQ, LK) when it is one row for all.
    row = mask[:1, :1].expand(H, LQ, LK)
    dense = everything_of(q, k, v, row.to(wide).contiguous())
    assert same_bits(everything_of(q, k, v, row), dense)


@DTYPES
@pytest.mark.parametrize("options", [{}, dict(softcap=2.0), dict(scale=-3.0)], ids=str)
def test_the_lowest_finite_mask_does_not_block(dtype, options):
    """A row full of finfo.min averages the values, as PyTorch's formula does."""
    # The lowest float16 does not outweigh scores.
    of_mask = torch.float32 if dtype == torch.float16 else dtype
    q, k, v = qkv(dtype, groups=H)
    mask = torch.zeros(LQ, LK, dtype=of_mask)
    mask[2] = torch.finfo(of_mask).min
    mask[4, 1:] = torch.finfo(of_mask).min
    results = everything_of(q, k, v, mask, **options)
    out, _, weights, mean, largest, _, entropy = results
    assert_close(out[:, :, 2], v.double().mean(2).to(dtype))
    assert torch.equal(out[:, :, 4], v[:, :, 0])
    for x in (weights[:, :, 2], mean[:, 2], largest[:, :, 2]):
        assert_close(x, torch.full_like(x, 1 / LK))
    assert_close(entropy[:, :, 2], torch.full_like(entropy[:, :, 2], math.log(LK)))
    if dtype.itemsize > 2 and "softcap" not in options:
        theirs = F.scaled_dot_product_attention(q, k, v, mask, **options)
        assert_close(out, theirs)


@DTYPES
@pytest.mark.parametrize("kind", ["keep", "bias"])
def test_rows_without_keys(dtype, kind):
    q, k, v = qkv(dtype)
    keep = torch.ones(LQ, LK, dtype=torch.bool)
    keep[[0, 5]] = False
    zeros = torch.zeros(LQ, LK, dtype=dtype)
    mask = keep if kind == "keep" else zeros.masked_fill(~keep, -torch.inf)
    out, lse, weights, mean, largest, keys, entropy = everything_of(q, k, v, mask)
    rows = (slice(None), slice(None), [0, 5])
    for x in (out, weights, largest, entropy):
        assert (x[rows] == 0).all()
    assert (mean[:, [0, 5]] == 0).all()
    assert (lse[rows] == -torch.inf).all()
    assert (keys[rows] == -1).all()
    assert (out[:, :, 1:5] != 0).all() and lse[:, :, 1:5].isfinite().all()


# --- Sizes of zero -------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2])
def test_sizes_of_zero(group):
    """All 64 combinations: the shapes and values of the formula."""
    sizes = itertools.product((0, 2), (0, 4), (0, 3), (0, 5), (0, 8), (0, 6))
    for batch, heads, queries, keys, width, value_width in sizes:
        q = torch.randn(batch, heads, queries, width)
        k = torch.randn(batch, heads // group, keys, width)
        v = torch.randn(batch, heads // group, keys, value_width)
        for options in ({}, dict(is_causal=True), dict(window=(1, 1), softcap=2.0)):
            options |= dict(enable_gqa=True)
            with multihead.backend("exact"):
                expected = attention(q, k, v, **options, return_lse=True)
            with multihead.backend("fused"):
                out, lse = attention(q, k, v, **options, return_lse=True)
            assert (out.shape, lse.shape) == (expected[0].shape, expected[1].shape)
            assert_close((out, lse), expected)
            for average in (False, True):
                weights = ops.attention_weights(q, k, lse, average, **options)
                heads_of = () if average else (heads,)
                assert weights.shape == (batch, *heads_of, queries, keys)
            summary = ops.fused_attention_summary(q, k, lse, 2, **options)
            assert [x.shape for x in summary] == [
                (batch, heads, queries, 2),
                (batch, heads, queries, 2),
                (batch, heads, queries),
            ]
            if keys == 0:
                assert (summary[0] == 0).all() and (summary[1] == -1).all()
