# SPDX-License-Identifier: MIT
"""multihead.flash_attn: FlashAttention 2's functions, sentence by sentence of their
documentation, beside formulas in float64 that are written here."""

import math
import subprocess
import sys

import pytest
import torch
from equal import assert_equal
from sequences import make, starts
from torch.testing import assert_close

import multihead
from multihead.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from multihead.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

B, H, G, D = 2, 4, 2, 16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def rows(length, heads=H, dtype=torch.float64, batch=B):
    return torch.randn(batch, length, heads, D).to(dtype)


def formula(q, k, v, seen=None, bias=0.0, scale=None, softcap=0.0):
    """out and lse of (B, L, H, D) in ATen operations; seen, bias: (B, H, Lq, Lk)."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        s = softcap * (s / softcap).tanh()
    s = s + bias
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    lse = s.logsumexp(-1)
    weights = (s - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def distance(lq, lk):
    """i + seqlen_k - seqlen_q - j."""
    return torch.arange(lq)[:, None] + lk - lq - torch.arange(lk)


def judge(results, expected):
    out, lse, probabilities = results
    assert probabilities is None  # "for testing only": not formed
    assert_close(out, expected[0])
    assert_close(lse, expected[1])


# --- flash_attn_func -----------------------------------------------------------------


@pytest.mark.parametrize("lq, lk", [(2, 5), (5, 2), (40, 40), (1, 9)])
def test_causal_is_aligned_to_the_bottom_right(lq, lk):
    q, k, v = rows(lq), rows(lk, G), rows(lk, G)
    seen = distance(lq, lk) >= 0
    if (lq, lk) == (2, 5):
        assert seen.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    if (lq, lk) == (5, 2):
        assert seen.int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
    multihead.reset_stats()
    results = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert multihead.stats().calls("fused", "function") == 1
    judge(results, formula(q, k, v, seen))
    assert (results[0][:, ~seen.any(-1)] == 0).all()  # "the output will be zero"


@pytest.mark.parametrize("window", [(3, 0), (0, 4), (2, 5), (-1, 1), (7, -1)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows(window, causal):
    q, k, v = rows(9), rows(14, G), rows(14, G)
    left, right = window
    far = distance(9, 14)
    seen = torch.ones_like(far, dtype=torch.bool)
    if left >= 0:
        seen &= far <= left
    if right >= 0:
        seen &= -far <= right
    if causal:
        seen &= far >= 0
    results = flash_attn_func(
        q, k, v, causal=causal, window_size=window, return_attn_probs=True
    )
    judge(results, formula(q, k, v, seen))


@pytest.mark.parametrize("window", [(-5, 1), (3, -9), (-2, -3)])
def test_any_negative_side_of_a_window_is_no_limit(window):
    q, k, v = rows(9), rows(14, G), rows(14, G)
    same = tuple(max(side, -1) for side in window)
    expected = flash_attn_func(q, k, v, window_size=same)
    assert_equal(flash_attn_func(q, k, v, window_size=window), expected)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=14, window_size=list(window))
    assert_close(out, expected)


@pytest.mark.parametrize("per_sequence", [False, True])
def test_slopes_softcap_and_scale(per_sequence):
    q, k, v = rows(9), rows(14, G), rows(14, G)
    slopes = torch.rand(B, H) if per_sequence else torch.rand(H)
    bias = -slopes.expand(B, H)[..., None, None] * distance(9, 14).abs()
    results = flash_attn_func(
        q, k, v, 0.0, 0.4, softcap=3.0, alibi_slopes=slopes, return_attn_probs=True
    )
    judge(results, formula(q, k, v, None, bias, 0.4, 3.0))


def test_results_lie_as_the_arguments_do():
    q = rows(9, dtype=torch.bfloat16)
    out = flash_attn_func(q, q, q, deterministic=True)
    assert out.is_contiguous() and out.dtype == torch.bfloat16
    assert flash_attn_func(q, q, q, return_attn_probs=True)[1].dtype == torch.float32


def test_gradients():
    q, k, v = (x.requires_grad_() for x in (rows(9), rows(14, G), rows(14, G)))
    by = torch.randn_like(q)
    found = torch.autograd.grad(flash_attn_func(q, k, v, causal=True), (q, k, v), by)
    expected = formula(q, k, v, distance(9, 14) >= 0)[0]
    assert_close(found, torch.autograd.grad(expected, (q, k, v), by))


def test_dropout_comes_from_the_generator():
    q = rows(9)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(flash_attn_func(q, q, q, 0.5))
    assert_equal(*results)
    assert not torch.equal(results[0], flash_attn_func(q, q, q, 0.5))
    assert not torch.equal(results[0], flash_attn_func(q, q, q))


# --- Sequences -----------------------------------------------------------------------


def test_sequences_are_those_of_flash_attn_func():
    batch = make([3, 40, 0], [5, 40, 2], (H, G), (D, D))
    slopes = torch.rand(3, H)
    rules = dict(causal=True, window_size=(9, 0), softcap=5.0)
    out, lse, none = flash_attn_varlen_func(
        *batch.tensors,
        *batch.bounds,
        40,
        40,
        alibi_slopes=slopes,
        return_attn_probs=True,
        **rules,
    )
    assert none is None and lse.shape == (H, 43)
    for n, (*tensors, _) in enumerate(batch.split()):
        own, own_lse, _ = flash_attn_func(
            *(x.transpose(1, 2) for x in tensors),
            alibi_slopes=slopes[n],
            return_attn_probs=True,
            **rules,
        )
        assert_equal(out.split(batch.queries)[n], own[0])
        assert_equal(lse.split(batch.queries, 1)[n], own_lse[0])


def test_sequences_compile_with_lengths_that_vary():
    def attend(x, bounds):
        rules = dict(causal=True, softmax_scale=0.5, softcap=3.0, window_size=(7, -1))
        return flash_attn_varlen_func(x, x, x, bounds, bounds, 9, 9, **rules)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (9, 12):
        x, bounds = rows(length)[0], starts([4, length - 4])
        assert_equal(compiled(x, bounds), attend(x, bounds))


def test_sequences_in_pages():
    batch = make([3, 20], [5, 20], (H, G), (D, D))
    expected = flash_attn_varlen_func(
        *batch.tensors, *batch.bounds, 20, 20, causal=True
    )
    table = torch.tensor([[2, 0, 0], [3, 1, 4]], dtype=torch.int32)
    pools = [torch.full((5, 8, G, D), math.nan) for _ in range(2)]
    for pool, x in zip(pools, batch.tensors[1:], strict=True):
        pool[2, :5] = x[:5]
        pool[[3, 1]] = x[5:21].unflatten(0, (2, 8))
        pool[4, :4] = x[21:]
    out = flash_attn_varlen_func(
        batch.tensors[0], *pools, *batch.bounds, 20, 20, causal=True, block_table=table
    )
    assert_equal(out, expected)


def test_packed_forms():
    qkv = torch.randn(B, 9, 3, H, D)
    expected = flash_attn_func(*qkv.unbind(2), 0.0, 0.3, True)
    assert_equal(flash_attn_qkvpacked_func(qkv, 0.0, 0.3, True), expected)
    kv = qkv[:, :, 1:]
    given = dict(softmax_scale=0.3, causal=True)
    assert_equal(flash_attn_kvpacked_func(qkv[:, :, 0], kv, **given), expected)
    bounds = starts([9, 9])
    flat = qkv.flatten(0, 1)
    out = flash_attn_varlen_qkvpacked_func(flat, bounds, 9, **given)
    assert_equal(out.unflatten(0, (B, 9)), expected)
    out = flash_attn_varlen_kvpacked_func(
        flat[:, 0], flat[:, 1:], bounds, bounds, 9, 9, **given
    )
    assert_equal(out.unflatten(0, (B, 9)), expected)


# --- The cache -----------------------------------------------------------------------

ROOM = 24


def caches(batch=B):
    """What was never written is NaN."""
    return [torch.full((batch, ROOM, G, D), math.nan).double() for _ in range(2)]


def filled(lengths, order=None):
    k, v = caches(len(order or lengths) + (order is not None))
    for n, length in enumerate(lengths):
        row = order[n] if order else n
        k[row, :length], v[row, :length] = torch.randn(2, length, G, D).double()
    return k, v


def visible(lengths, lq, causal):
    """(B, 1, Lq, ROOM)."""
    at = torch.arange(ROOM)
    n = torch.tensor(lengths)[:, None, None, None]
    last = n - lq + torch.arange(lq)[:, None]
    return (at < n) & ((at <= last) | (not causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("given", ["tensor", "int", "none"])
def test_reading_a_cache(causal, given):
    lengths = {"tensor": [7, 20], "int": [7, 7], "none": [ROOM, ROOM]}[given]
    k_cache, v_cache = filled(lengths)
    q = rows(3)
    seqlens = {"tensor": torch.tensor([7, 20], dtype=torch.int32), "int": 7}.get(given)
    results = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=seqlens,
        causal=causal,
        num_splits=1,
        return_softmax_lse=True,
    )
    expected = formula(
        q, k_cache.nan_to_num(), v_cache.nan_to_num(), visible(lengths, 3, causal)
    )
    assert_close(results, expected)


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("paged", [False, True])
def test_new_keys_are_written_in_place(new, paged):
    lengths = [7, 20]
    k_cache, v_cache = filled(lengths)
    q, k, v = rows(new), rows(new, G), rows(new, G)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    for n, length in enumerate(lengths):
        expected_k[n, length : length + new] = k[n]
        expected_v[n, length : length + new] = v[n]
    stored, places = (k_cache, v_cache), {}
    if paged:  # pages of 8, in another order
        order = torch.tensor([4, 0, 5, 2, 1, 3])
        stored = [x.reshape(-1, 8, G, D)[order].clone() for x in stored]
        table = order.argsort().view(B, -1).int()
        places = {"block_table": table}
    out = flash_attn_with_kvcache(
        q,
        *stored,
        k,
        v,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        causal=True,
        **places,
    )
    if paged:
        stored = [x[table.long()].flatten(1, 2) for x in stored]
    # The new ones, and nothing else.
    assert_equal(tuple(stored), (expected_k, expected_v))
    seen = visible([n + new for n in lengths], new, True)
    expected, _ = formula(q, expected_k.nan_to_num(), expected_v.nan_to_num(), seen)
    assert_close(out, expected)


def test_rows_of_the_cache():
    """cache_batch_idx names them; the others stay."""
    order = [2, 0]
    k_cache, v_cache = filled([7, 20], order)
    before = k_cache.clone()
    q, k, v = rows(1), rows(1, G), rows(1, G)
    out = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=torch.tensor([7, 20], dtype=torch.int32),
        cache_batch_idx=torch.tensor(order, dtype=torch.int32),
    )
    before[2, 7], before[0, 20] = k[:, 0]
    assert_equal(k_cache, before)
    keys, values = (x[order].nan_to_num() for x in (k_cache, v_cache))
    assert_close(out, formula(q, keys, values, visible([8, 21], 1, False))[0])


def test_left_padding():
    k_cache, v_cache = filled([7, 20])
    k_cache[0, :3] = v_cache[0, :3] = math.nan
    q, pad = rows(3), torch.tensor([3, 0], dtype=torch.int32)
    results = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=torch.tensor([7, 20], dtype=torch.int32),
        cache_leftpad=pad,
        causal=True,
        window_size=(5, 0),
        return_softmax_lse=True,
    )
    seen = visible([7, 20], 3, True) & (torch.arange(ROOM) >= pad[:, None, None, None])
    last = torch.tensor([7, 20])[:, None, None, None] - 3 + torch.arange(3)[:, None]
    seen &= torch.arange(ROOM) >= last - 5
    keys, values = k_cache.nan_to_num(), v_cache.nan_to_num()
    assert_close(results, formula(q, keys, values, seen))


@pytest.mark.parametrize("slopes", [None, (H,), (B, H)])
def test_left_padding_of_rows_is_that_of_their_copies(slopes):
    """In place, one row after the other."""
    order = [2, 0]
    lengths, pad = torch.tensor([7, 20]), torch.tensor([9, 4])  # the first sees none
    k_cache, v_cache = filled([7, 20], order)
    v_cache[0, :4] = math.nan
    q = rows(3)
    slopes = slopes and torch.rand(slopes)
    given = dict(
        cache_seqlens=lengths, cache_leftpad=pad, causal=True, alibi_slopes=slopes
    )
    results, expected = (
        flash_attn_with_kvcache(q, *tensors, return_softmax_lse=True, **given, **more)
        for tensors, more in (
            ((k_cache, v_cache), {"cache_batch_idx": torch.tensor(order)}),
            ((k_cache[order], v_cache[order]), {}),
        )
    )
    assert_equal(results, expected)
    assert (results[0][0] == 0).all() and (results[0][1] != 0).all()


@pytest.mark.parametrize("row", [False, True])
def test_left_padding_does_not_copy_the_cache(row):
    """64 MiB of keys, of which 4 are seen."""
    caches = torch.zeros(2, 1, 2**18, 1, 64)
    q, zero = torch.randn(1, 1, 1, 64), torch.tensor([0])
    given = dict(cache_seqlens=4, cache_leftpad=zero)
    with torch.profiler.profile(profile_memory=True) as profile:
        flash_attn_with_kvcache(
            q, *caches, cache_batch_idx=zero if row else None, **given
        )
    allocated = sum(max(event.cpu_memory_usage, 0) for event in profile.events())
    assert 0 < allocated < 2**20


def turned(x, position, cos, sin, interleaved):
    """One vector x, rotated pair by pair."""
    x, width = x.clone(), 2 * cos.shape[1]
    for n in range(width // 2):
        i, j = (2 * n, 2 * n + 1) if interleaved else (n, n + width // 2)
        a, b, c, s = x[i].clone(), x[j].clone(), cos[position, n], sin[position, n]
        x[i], x[j] = a * c - b * s, a * s + b * c
    return x


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("moves", ["causal", "window", "neither"])
def test_rotary(interleaved, moves):
    """q moves with the keys where causal or local, else it stands at cache_seqlens."""
    lengths, new = [7, 18], 3
    k_cache, v_cache = filled(lengths)
    q, k, v = rows(new), rows(new, G), rows(new, G)
    angles = torch.rand(ROOM, 4).double() * 6
    cos, sin = angles.cos(), angles.sin()
    rules = {"causal": {"causal": True}, "window": {"window_size": (50, 50)}}
    turned_q, turned_k = q.clone(), k.clone()
    for n, length in enumerate(lengths):
        for i in range(new):
            at = length + (i if moves != "neither" else 0)
            for h in range(H):
                turned_q[n, i, h] = turned(q[n, i, h], at, cos, sin, interleaved)
            for h in range(G):
                turned_k[n, i, h] = turned(
                    k[n, i, h], length + i, cos, sin, interleaved
                )
    expected = k_cache.clone(), v_cache.clone()
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    given = dict(cache_seqlens=seqlens, **rules.get(moves, {}))
    wanted = flash_attn_with_kvcache(turned_q, *expected, turned_k, v, **given)
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, rotary_interleaved=interleaved, **given
    )
    assert_close(k_cache, expected[0], equal_nan=True)
    assert_close(out, wanted)


def test_no_new_keys_rotate_the_queries():
    k_cache, v_cache = filled([7, 20])
    before = k_cache.clone()
    q, none = rows(2), rows(0, G)
    sin = torch.rand(22, 4).double()
    cos = sin.cos()
    given = dict(cache_seqlens=torch.tensor([7, 20]), causal=True)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, none, none, cos, sin, **given)
    for n, length in enumerate([7, 20]):
        for i in range(2):
            for h in range(H):
                q[n, i, h] = turned(q[n, i, h], length + i, cos, sin, True)
    assert_close(out, flash_attn_with_kvcache(q, k_cache, v_cache, **given))
    assert_equal(k_cache, before)


def test_a_cache_has_no_derivative():
    k_cache, v_cache = filled([7, 20])
    q = rows(1).requires_grad_()
    assert not flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=5
    ).requires_grad


# --- The package ---------------------------------------------------------------------


def test_the_package_and_its_modules_stand_for_flash_attn():
    code = (
        "import sys, multihead.flash_attn\n"
        'sys.modules["flash_attn"] = multihead.flash_attn\n'
        "import flash_attn\n"
        "from flash_attn import flash_attn_func, flash_attn_varlen_func\n"
        "from flash_attn import flash_attn_with_kvcache, flash_attn_qkvpacked_func\n"
        "from flash_attn.flash_attn_interface import flash_attn_func as same\n"
        "from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input\n"
        "assert same is flash_attn_func\n"
        'assert flash_attn.__version__ == "2.8.3"\n'
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("unused", [False, True])
def test_padding(unused):
    """Rows that the mask keeps, there and back; the rest is 0."""
    x = rows(4, batch=3).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
    more = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]) if unused else None
    kept, indices, bounds, longest, used = unpad_input(x, mask, more)
    assert indices.tolist() == [0, 1, *([2] if unused else []), 8, 10, 11]
    assert bounds.tolist() == ([0, 3, 3, 6] if unused else [0, 2, 2, 5])
    assert bounds.dtype == torch.int32 and longest == 3 and used.tolist() == [2, 0, 3]
    assert_equal(kept, x.flatten(0, 1)[indices])
    assert_equal(index_first_axis(x.flatten(0, 1), indices), kept)
    seen = (mask if more is None else mask + more)[..., None, None]
    padded = pad_input(kept, indices, 3, 4)
    assert_equal(padded, x * seen)
    (gradient,) = torch.autograd.grad(padded.sum(), x)
    assert_equal(gradient, seen.expand_as(x).double())
