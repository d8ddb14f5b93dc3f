# SPDX-License-Identifier: MIT
"""Dropout inside the fused operators, in functions and modules."""

import dataclasses
import itertools
import math

import pytest
import reference
import torch
from error_budget import BUDGETS
from paths import fused_calls
from test_fused import limit_of, within
from torch.nn import functional as F
from torch.testing import assert_close

import multihead
from multihead import GroupedQueryAttention, MultiheadAttention

attention = multihead.scaled_dot_product_attention
ops = torch.ops.multihead
B, H, G, LQ, LK, D = 2, 4, 2, 40, 72, 16
STATE = torch.tensor([1234, 5])
DTYPES = pytest.mark.parametrize("dtype", BUDGETS, ids=str)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def qkv(dtype=torch.float32):
    return (
        torch.randn(B, H, LQ, D, dtype=dtype),
        torch.randn(B, G, LK, D, dtype=dtype),
        torch.randn(B, G, LK, D, dtype=dtype),
    )


def dropped(p, state=STATE):
    return dict(dropout_p=p, dropout_state=state, enable_gqa=True)


def kept_by(p, state=STATE, sizes=(B, H, LQ, LK)):
    """Which weights a state keeps, bool (B, H, Lq, Lk). With scores of 0 no weight
    is 0 by itself."""
    batch, heads, queries, keys = sizes
    q, k = torch.zeros(batch, heads, queries, 1), torch.zeros(batch, heads, keys, 1)
    lse = torch.zeros(batch, heads, queries)
    return ops.attention_weights(q, k, lse, False, **dropped(p, state)) != 0


# --- The operators -------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(
    "rules",
    [{}, dict(is_causal=True), dict(window=(20, 9), softcap=2.0)],
    ids=str,
)
def test_values(dtype, rules):
    """Kept weights grow by 1/(1 - p); the output is their sum of values."""
    p, (q, k, v), budget = 0.3, qkv(dtype), BUDGETS[dtype]
    parsed = reference.Rules(scale=D**-0.5, **rules)
    golden = reference.attention(*(x.double().numpy() for x in (q, k, v)), parsed)
    out, lse = ops.fused_attention(q, k, v, **dropped(p), **rules)
    per_head, mean = (
        ops.attention_weights(q, k, lse, average, **dropped(p), **rules)
        for average in (False, True)
    )
    weights = golden.weights * kept_by(p).numpy() / (1 - p)
    limit = limit_of(budget, golden, weights)
    assert within(per_head, weights, limit)
    assert within(mean, weights.mean(1), limit.mean(1))
    values = v.double().repeat_interleave(H // G, 1).numpy()
    golden = dataclasses.replace(golden, out_scale=weights @ abs(values))
    assert within(out, weights @ values, budget.of_out(golden))
    assert torch.equal(lse, ops.fused_attention(q, k, v, **rules, enable_gqa=True)[1])


@DTYPES
def test_none_and_all(dtype):
    q, k, v = qkv(dtype)
    plain, lse = ops.fused_attention(q, k, v, enable_gqa=True)
    for state in (None, STATE):
        out, _ = ops.fused_attention(q, k, v, **dropped(0.0, state))
        assert torch.equal(out, plain)
    out, lse_of_all = ops.fused_attention(q, k, v, **dropped(1.0))
    assert (out == 0).all() and torch.equal(lse_of_all, lse)
    for average in (False, True):
        weights = ops.attention_weights(q, k, lse, average, **dropped(1.0))
        assert (weights == 0).all()
    assert (attention(q, k, v, dropout_p=1.0, enable_gqa=True) == 0).all()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_rate_and_independence(p):
    """Rates within five standard deviations: of all weights, and of pairs."""
    sizes = (4, 6, 96, 160)
    kept = kept_by(p, sizes=sizes)
    other_seed = kept_by(p, torch.tensor([1235, 5]), sizes)
    other_offset = kept_by(p, torch.tensor([1234, 6]), sizes)
    pairs = {
        "seed": (kept, other_seed),
        "offset": (kept, other_offset),
        "batch": (kept[1:], kept[:-1]),
        "head": (kept[:, 1:], kept[:, :-1]),
        "query": (kept[:, :, 1:], kept[:, :, :-1]),
        "key": (kept[..., 1:], kept[..., :-1]),
        "eight keys": (kept[..., 8:], kept[..., :-8]),
        "query and key": (kept[:, :, :96, :96], kept[..., :96].transpose(-1, -2)),
    }

    def expect(rate, of, name):
        deviation = math.sqrt(rate * (1 - rate) * of.numel())
        assert abs(int(of.sum()) - rate * of.numel()) < 5 * deviation, name

    expect(1 - p, kept, "all")
    below = torch.ones(96, 96, dtype=torch.bool).tril(-1)
    for name, (a, b) in pairs.items():
        both = a & b
        expect(
            (1 - p) ** 2, both[..., below] if name == "query and key" else both, name
        )


def test_probability_counts_in_steps_of_two_to_the_minus_16():
    """Smaller ones drop nothing, yet scale."""
    assert kept_by(2.0**-18).all()
    assert not kept_by(2.0**-13, sizes=(4, 8, 64, 64)).all()
    assert not kept_by(1 - 2.0**-18).any()


def test_state_decides_alone():
    """Not dtype, lengths, other heads' groups, masks, nor how often it is used."""
    kept = kept_by(0.4)
    assert torch.equal(kept_by(0.4), kept)
    strided = torch.stack([STATE, STATE], -1)[:, 0]
    assert torch.equal(kept_by(0.4, strided), kept)
    for rows, keys in itertools.product((1, 7, LQ), (1, 5, LK)):
        part = kept_by(0.4, sizes=(B, H, rows, keys))
        assert torch.equal(part, kept[:, :, :rows, :keys])
    q, k, v = qkv(torch.float64)
    _, lse = ops.fused_attention(q, k, v, enable_gqa=True)
    weights = ops.attention_weights(q, k, lse, False, **dropped(0.4))
    assert torch.equal(weights != 0, kept)
    rules = dict(is_causal=True, causal_alignment="bottom_right")
    _, lse = ops.fused_attention(q, k, v, **rules, enable_gqa=True)
    weights = ops.attention_weights(q, k, lse, False, **dropped(0.4), **rules)
    seen = torch.ones(LQ, LK, dtype=torch.bool).tril(LK - LQ)
    assert torch.equal(weights != 0, kept & seen)


def test_large_states():
    """All 128 bits count."""
    states = [(0, 0), (1, 0), (0, 1), (2**40, 0), (0, 2**41), (2**63 - 1, 2**63 - 1)]
    masks = [kept_by(0.5, torch.tensor(state)) for state in states]
    for a, b in itertools.combinations(masks, 2):
        assert not torch.equal(a, b)


# --- torch's generator ---------------------------------------------------------------


def test_manual_seed_repeats_and_calls_differ():
    q, k, v = qkv()

    def call():
        return attention(q, k, v, dropout_p=0.5, enable_gqa=True)

    assert fused_calls(call) == ["attention"]
    torch.manual_seed(7)
    first, second = call(), call()
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(call(), first) and torch.equal(call(), second)
    state = torch.get_rng_state()
    call()
    assert not torch.equal(torch.get_rng_state(), state)
    state = torch.get_rng_state()
    attention(q, k, v, enable_gqa=True)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was dropped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_expectation_is_the_output_without_dropout(dtype):
    q, k, v = (x[:, :, :8] for x in qkv(dtype))
    samples = torch.stack(
        [attention(q, k, v, dropout_p=0.4, enable_gqa=True) for _ in range(400)]
    )
    plain = attention(q, k, v, enable_gqa=True)
    deviation = samples.std(0) / math.sqrt(len(samples))
    # Of about a thousand numbers none is 5 deviations away.
    assert ((samples.mean(0) - plain).abs() < 5 * deviation).all()


# --- Modules -------------------------------------------------------------------------


E = H * D
MODULES = {
    "packed": lambda **o: MultiheadAttention(E, H, **o),
    "appended": lambda **o: MultiheadAttention(
        E, H, add_bias_kv=True, add_zero_attn=True, **o
    ),
    "grouped": lambda **o: GroupedQueryAttention(E, H, G, **o),
}
EACH_MODULE = pytest.mark.parametrize("module", MODULES)


def values_of(module, value):
    """(B, H, Lk', D): the values that the heads of a sequence-first module sum."""
    if isinstance(module, GroupedQueryAttention):
        rows = module.v_proj(value)
    else:
        rows = F.linear(
            value, module.in_proj_weight.chunk(3)[2], module.in_proj_bias.chunk(3)[2]
        )
        if module.bias_v is not None:
            rows = torch.cat([rows, module.bias_v.expand(1, B, E)])
        if module.add_zero_attn:
            rows = torch.cat([rows, torch.zeros(1, B, E)])
    heads = rows.unflatten(-1, (-1, D)).permute(1, 2, 0, 3)
    return heads.repeat_interleave(H // heads.size(1), 1)


@EACH_MODULE
def test_modules_return_the_weights_that_they_used(module):
    module = MODULES[module](dropout=0.3)
    query, key, value = torch.randn(LQ, B, E), *torch.randn(2, LK, B, E)
    options = dict(average_attn_weights=False, is_causal=True)
    with torch.no_grad():
        reached = fused_calls(module, query, key, value, **options)
        assert reached == ["attention", "weights"]
        torch.manual_seed(3)
        out, weights = module(query, key, value, **options)
        rows = (weights @ values_of(module, value)).permute(2, 0, 1, 3).flatten(2)
        assert_close(out, module.out_proj(rows))
        torch.manual_seed(3)
        again, mean = module(query, key, value, is_causal=True)
        assert torch.equal(again, out)
        assert_close(mean, weights.mean(1))
        torch.manual_seed(3)
        again, none = module(query, key, value, is_causal=True, need_weights=False)
        assert none is None and torch.equal(again, out)
        whole = module.eval()(query, key, value, **options)[1]
    kept = weights != 0
    assert_close(weights[kept], whole[kept] / 0.7)
    assert (whole[~kept] != 0).any()


@EACH_MODULE
def test_modules_drop_in_training_only(module):
    module = MODULES[module](dropout=0.5)
    x = torch.randn(LQ, B, E)
    with torch.no_grad():
        first, second = module(x, x, x)[0], module(x, x, x)[0]
        assert not torch.equal(first, second)
        module.eval()
        state = torch.get_rng_state()
        first, second = module(x, x, x)[0], module(x, x, x)[0]
        assert torch.equal(first, second)
        assert torch.equal(torch.get_rng_state(), state)
