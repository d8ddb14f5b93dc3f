# SPDX-License-Identifier: MIT
"""varlen_attention: its values, its bits, its gradients; pages; empty sequences."""

import math
import random

import numpy as np
import pytest
import reference
import sequences
import torch
from equal import assert_equal
from error_budget import BUDGETS
from paths import fused_calls
from sequences import make, one_by_one, padded, paged, ragged
from torch.testing import assert_close

import multihead

DTYPES = pytest.mark.parametrize("dtype", BUDGETS, ids=str)
QUERIES, KEYS = [3, 0, 130, 1, 17, 600], [5, 4, 131, 900, 0, 600]


def every_rule(heads, count):
    torch.manual_seed(1)
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "top left": {"is_causal": True, "causal_alignment": "top_left"},
        "window": {"window": (40, 7)},
        "softcap": {"softcap": 2.0, "scale": 0.5},
        "slopes": {"alibi_slopes": torch.rand(heads)},
        "slopes of each": {"alibi_slopes": torch.rand(count, heads), "window": (64, 0)},
        "sinks": {"sinks": torch.randn(heads), "is_causal": True},
        "key lengths": {"key_lengths": torch.tensor([2, 4, 100, 513, 0, 600])},
    }


RULES = pytest.mark.parametrize("name", every_rule(4, 6))


def call_of(name, dtype=torch.float32, **more):
    return make(QUERIES, KEYS, dtype=dtype, **every_rule(4, len(KEYS))[name], **more)


# --- Values --------------------------------------------------------------------------


def draw(seed, dtype):
    """A random batch, and the reference's rules for each sequence."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    count, G, group = r.randint(0, 4), r.randint(1, 2), r.choice((1, 2, 3))
    H, D, Dv = G * group, r.choice((1, 3, 8, 33)), r.choice((1, 5, 16))
    queries = [r.randint(0, 9) for _ in range(count)]
    keys = [r.randint(0, 12) for _ in range(count)]
    rules, golden = {}, {"scale": D**-0.5, "bottom_right": True}

    def maybe(probability=0.3):
        return r.random() < probability

    if maybe():
        rules["scale"] = golden["scale"] = r.choice((0.0, -0.5, 2.0))
    if maybe(0.5):
        rules["is_causal"] = golden["is_causal"] = True
    if maybe():
        rules["causal_alignment"] = "top_left"
        golden["bottom_right"] = False
    if maybe():
        rules["window"] = golden["window"] = (r.randint(-1, 6), r.randint(-1, 6))
    if maybe():
        rules["softcap"] = golden["softcap"] = r.choice((0.5, 30.0))
    if maybe():
        rules["key_lengths"] = torch.tensor([r.randint(0, n) for n in keys]).long()
    if maybe():
        rules["alibi_slopes"] = torch.rand(*r.choice(((H,), (count, H))))
    if maybe():
        rules["sinks"] = torch.randn(H)
        golden["sinks"] = rules["sinks"].double().numpy()
    batch = make(queries, keys, (H, G), (D, Dv), dtype, **rules)
    goldens = []
    for n, (*tensors, own) in enumerate(batch.split()):
        slopes, lengths = own.get("alibi_slopes"), own.get("key_lengths")
        goldens.append(
            reference.attention(
                *(x.double().numpy() for x in tensors),
                reference.Rules(
                    **golden,
                    slopes=None
                    if slopes is None
                    else slopes.double().expand(1, H).numpy(),
                    key_lengths=np.array([keys[n] if lengths is None else lengths[0]]),
                ),
            )
        )
    return batch, goldens


def judge(budget, out, lse, batch, goldens, seed):
    rows = zip(out.split(batch.queries), lse.split(batch.queries, 1), strict=True)
    for (o, s), golden in zip(rows, goldens, strict=True):
        o, s = o.transpose(0, 1)[None].double().numpy(), s[None].double().numpy()
        assert (np.abs(o - golden.out) <= budget.of_out(golden)).all(), seed
        seen = np.isfinite(golden.logsumexp)
        assert (s[~seen] == -np.inf).all() and (o[~seen] == 0).all(), seed
        error = np.abs(s[seen] - golden.logsumexp[seen])
        assert (error <= budget.of_logsumexp(golden)[seen]).all(), seed


@DTYPES
def test_every_sequence_is_that_of_the_loops(dtype):
    rows = 0
    for seed in range(60):
        batch, goldens = draw(seed, dtype)
        ways = [ragged(batch), paged(batch, page=4)]
        with multihead.backend("exact"):
            ways += [ragged(batch), paged(batch, page=3)]
        for out, lse in ways:
            assert out.dtype == dtype
            judge(BUDGETS[dtype], out, lse, batch, goldens, seed)
        rows += sum(batch.queries)
    assert rows > 500  # the batches are not all empty


# --- Bits ----------------------------------------------------------------------------


@DTYPES
@RULES
def test_the_bits_are_those_of_each_sequence_alone(name, dtype):
    batch = call_of(name, dtype).with_gradients()
    gradients = [torch.randn_like(x) for x in ragged(batch)]
    expected = one_by_one(batch)
    wanted = torch.autograd.grad(expected, batch.leaves, gradients)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        multihead.reset_stats()
        results = ragged(batch)
        assert multihead.stats().calls("fused", "function") == 1
        assert_equal(results, expected)
        found = torch.autograd.grad(results, batch.leaves, gradients)
        assert_equal(found[:3], wanted[:3])
        # Sums over sequences, rounded as sums of one batch: in another order.
        assert_close(found[3:], wanted[3:])
    torch.set_num_threads(1)
    assert_equal(paged(batch, 16), expected)


@DTYPES
@pytest.mark.parametrize("rules", [{}, {"window": (700, 0), "softcap": 3.0}])
@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("most", [1, 2, 6, 70])
def test_the_bits_of_decoding(most, heads, rules, dtype):
    """Few queries against many keys, as a step of generation has them; at last beside a
    sequence that begins."""
    queries, keys = [1, most, 0, 1, most], [900, 1300, 40, 0, 70]
    batch = make(queries, keys, heads, (64, 48), dtype, is_causal=True, **rules)
    expected = one_by_one(batch)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert_equal(ragged(batch), expected)
        assert_equal(paged(batch, 16), expected)
    torch.set_num_threads(1)


@DTYPES
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_bits_are_those_of_a_padded_batch(dtype, dropout_p):
    batch = call_of("sinks", dtype, dropout_p=dropout_p)
    batch.rules["causal_alignment"] = "top_left"
    batch = batch.with_gradients()
    results = []
    for way in (ragged, padded):
        torch.manual_seed(3)
        out, lse = way(batch)
        torch.manual_seed(4)
        by = [torch.randn_like(out.contiguous()), torch.randn_like(lse.contiguous())]
        results.append((out, lse, *torch.autograd.grad([out, lse], batch.leaves, by)))
    for ours, theirs in zip(*results, strict=True):
        assert_equal(ours, theirs)


def test_a_sequence_does_not_depend_on_its_neighbours():
    batch = call_of("causal")
    alone = make([130], [131], is_causal=True)
    rows = [
        x.split(n) for x, n in zip(batch.tensors, (QUERIES, KEYS, KEYS), strict=True)
    ]
    alone.tensors = tuple(x[2] for x in rows)
    assert_equal(ragged(alone)[0], ragged(batch)[0].split(QUERIES)[2])


# --- Memory --------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 7, 16, 64, 1000])
@DTYPES
def test_pages_change_no_bit(page, dtype):
    batch = call_of("slopes of each", dtype)
    assert fused_calls(paged, batch, page) == ["varlen"]
    assert_equal(paged(batch, page), ragged(batch))


@DTYPES
def test_nothing_beyond_a_length_is_read(dtype):
    batch = call_of("key lengths", dtype)
    lengths = batch.rules["key_lengths"].tolist()
    expected = ragged(batch)
    for x in batch.tensors[1:]:
        for rows, length in zip(x.split(KEYS), lengths, strict=True):
            rows[length:] = math.nan
    batch = batch.with_gradients()
    results = ragged(batch)
    assert_equal(results, expected)
    for gradient in torch.autograd.grad(results[0].sum(), batch.tensors[1:]):
        assert gradient.isfinite().all()
        for rows, length in zip(gradient.split(KEYS), lengths, strict=True):
            assert (rows[length:] == 0).all()


def test_other_sequences_do_not_reach_a_row():
    """NaN in the neighbours, in keys, values, queries and gradients."""
    batch = call_of("causal").with_gradients()
    wanted, own = ragged(batch)[0], slice(3, 133)
    by = torch.randn_like(wanted)
    expected = torch.autograd.grad(wanted, batch.tensors, by)
    keys = slice(9, 140)
    with torch.no_grad():
        for x, kept in zip((*batch.tensors, by), (own, keys, keys, own), strict=True):
            x[: kept.start] = x[kept.stop :] = math.nan
    out = ragged(batch)[0]
    assert_equal(out[own], wanted[own])
    found = torch.autograd.grad(out, batch.tensors, by)
    for ours, theirs, kept in zip(found, expected, (own, keys, keys), strict=True):
        assert_equal(ours[kept], theirs[kept])


@pytest.mark.parametrize("layout", ["heads first", "packed", "wide", "backwards"])
def test_any_strides(layout):
    batch = make([3, 40], [50, 2], heads=(4, 4), is_causal=True)
    expected = ragged(batch)
    if layout == "heads first":
        lay = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in batch.tensors]
    elif layout == "packed":  # rows of a projection
        lay = [torch.stack([x, x, x], 1)[:, 1] for x in batch.tensors]
    elif layout == "wide":
        lay = [torch.cat([x, x * math.nan], -1)[..., :16] for x in batch.tensors]
    else:  # the last dimension is not dense
        lay = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in batch.tensors]
    batch.tensors = tuple(lay)
    batch = batch.with_gradients() if layout == "packed" else batch
    assert_equal(ragged(batch), expected)


def test_bounds_of_both_integer_types():
    batch = make([3, 4], [5, 6])
    expected = ragged(batch)[0]
    query, keys = batch.bounds
    out = multihead.varlen_attention(*batch.tensors, query.long(), keys.long())
    assert_equal(out, expected)


# --- Empty ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "exact"])
def test_no_sequences(backend):
    batch = make([], []).with_gradients()
    with multihead.backend(backend):
        out, lse = ragged(batch)
    assert out.shape == (0, 4, 16) and lse.shape == (4, 0)
    assert paged(batch, 4)[0].shape == (0, 4, 16)


@pytest.mark.parametrize("sinks", [None, torch.zeros(4)])
def test_no_keys(sinks):
    batch = make([2, 3], [0, 0], sinks=sinks).with_gradients()
    out, lse = ragged(batch)
    assert (out == 0).all()
    assert (lse == (-math.inf if sinks is None else 0)).all()
    assert (torch.autograd.grad(out.sum(), batch.tensors[0])[0] == 0).all()


def test_no_queries():
    batch = make([0, 0], [3, 4]).with_gradients()
    out, _ = ragged(batch)
    assert all(
        (x == 0).all() for x in torch.autograd.grad(out.sum(), batch.tensors[1:])
    )


# --- Gradients -----------------------------------------------------------------------


def differentiated(batch, **more):
    def function(*leaves):
        names = [n for n, x in batch.rules.items() if sequences.floats(x)]
        rules = batch.rules | dict(zip(names, leaves[3:], strict=True)) | more
        return multihead.varlen_attention(
            *leaves[:3], *batch.bounds, **rules, return_lse=True
        )

    return function


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_first_and_second_derivatives(dropout_p):
    torch.manual_seed(0)
    batch = make(
        [2, 0, 3],
        [3, 1, 4],
        (2, 1),
        (3, 2),
        torch.float64,
        is_causal=True,
        softcap=2.0,
        alibi_slopes=torch.rand(3, 2).double(),
        sinks=torch.randn(2).double(),
    ).with_gradients()
    attention = differentiated(batch, dropout_p=dropout_p)

    def function(*leaves):
        torch.manual_seed(5)  # the same dropout each time
        return attention(*leaves)

    assert torch.autograd.gradcheck(function, batch.leaves)
    assert torch.autograd.gradgradcheck(function, batch.leaves)
    reached = fused_calls(lambda: function(*batch.leaves)[0].sum().backward())
    assert reached == ["varlen", "varlen backward"]


@RULES
def test_gradients_are_those_of_the_definition(name):
    batch = call_of(name, torch.float64).with_gradients()
    function = differentiated(batch)
    with multihead.backend("exact"):
        expected, pull = torch.func.vjp(function, *batch.leaves)
    results = function(*batch.leaves)
    assert_close(results, expected)
    by = tuple(torch.randn_like(x) for x in results)
    found = torch.autograd.grad(results, batch.leaves, by)
    assert_close(found, pull(by))


def test_gradients_through_pages():
    batch = call_of("causal")
    pools, places = sequences.in_pages(batch, 16, filler=0.0)
    pools = [x.requires_grad_() for x in pools]

    def function():
        return multihead.varlen_attention(
            batch.tensors[0], *pools, batch.bounds[0], is_causal=True, **places
        )

    assert fused_calls(function) == ["varlen"]
    found = torch.autograd.grad(function().sum(), pools)
    batch = batch.with_gradients()
    expected = torch.autograd.grad(ragged(batch)[0].sum(), batch.tensors[1:])
    table = places["block_table"]
    for pool, rows in zip(found, expected, strict=True):
        for n, keys in enumerate(rows.split(KEYS)):
            for i in range(-(-KEYS[n] // 16)):
                part = keys[i * 16 : (i + 1) * 16]
                assert_equal(pool[table[n, i], : len(part)], part)


# --- Hosts ---------------------------------------------------------------------------


def test_compiled_code_has_one_operator():
    batch = call_of("causal").with_gradients()
    expected = ragged(batch)
    wanted = torch.autograd.grad(expected[0].sum(), batch.leaves)
    compiled = torch.compile(ragged, backend="aot_eager", fullgraph=True)
    results = compiled(batch)
    assert_equal(results, expected)
    assert_equal(torch.autograd.grad(results[0].sum(), batch.leaves), wanted)


def test_torch_func_takes_the_definition():
    batch = call_of("causal", torch.float64)

    def loss(query):
        return multihead.varlen_attention(
            query, *batch.tensors[1:], *batch.bounds, is_causal=True
        ).sum()

    multihead.reset_stats()
    gradient = torch.func.grad(loss)(batch.tensors[0])
    assert multihead.stats().calls("definition", "function") == 1
    batch = batch.with_gradients()
    expected = torch.autograd.grad(ragged(batch)[0].sum(), batch.tensors[0])[0]
    assert_close(gradient, expected)


def test_autocast_casts_as_it_does_elsewhere():
    batch = make([3, 4], [5, 6])
    with torch.autocast("cpu", torch.bfloat16):
        out = ragged(batch)[0]
    batch.tensors = tuple(x.bfloat16() for x in batch.tensors)
    assert_equal(out, ragged(batch)[0])


def test_dropout_has_the_right_mean():
    batch = make([400, 3], [64, 64], (2, 2), (8, 8))
    torch.manual_seed(0)
    mean = torch.stack([ragged(batch, dropout_p=0.5)[0] for _ in range(200)]).mean(0)
    assert (mean - ragged(batch)[0]).abs().mean() < 0.02
