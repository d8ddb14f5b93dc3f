# SPDX-License-Identifier: MIT
"""The bits of a token do not depend on what is computed beside it.

Token by token, in chunks of any size and as prefill, alone and in any batch, through
KVCache, key_lengths, and ragged calls with rows or pages, by any number of threads.
"""

import random

import pytest
import torch
from sequences import Batch, in_pages, starts
from torch import Tensor

import multihead

attention = multihead.scaled_dot_product_attention
H, G, D, DV = 6, 2, 32, 24
# Beyond one split of keys, and no multiple of anything.
LENGTHS = (1117, 540, 77)
DTYPES = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16],
    ids=lambda x: str(x)[6:],
)


def rules_of(name: str) -> dict:
    slopes = 2.0 ** -torch.arange(1, H + 1, dtype=torch.float32)
    everything = {
        "window": {"window": (300, 0)},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": torch.linspace(-1, 2, H)},
        "alibi": {"alibi_slopes": slopes},
    }
    if name == "everything":
        return {k: v for rule in everything.values() for k, v in rule.items()}
    return everything.get(name, {})


RULES = pytest.mark.parametrize(
    "name", ["plain", "window", "softcap", "sinks", "alibi", "everything"]
)


@pytest.fixture(autouse=True)
def all_fused():
    """Every call of a test runs on the kernels."""
    before = torch.get_num_threads()
    multihead.reset_stats()
    yield
    torch.set_num_threads(before)
    stats = multihead.stats()
    assert stats.calls("fused") == stats.calls() > 0, stats


def sequences(dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """query (1, H, L, D), key (1, G, L, D), value (1, G, L, Dv) of each length."""
    torch.manual_seed(5)
    return [
        tuple(
            torch.randn(1, heads, length, width).to(dtype)
            for heads, width in ((H, D), (G, D), (G, DV))
        )
        for length in LENGTHS
    ]


def prefill(q, k, v, rules) -> Tensor:
    """(L, H, Dv)"""
    out = attention(q, k, v, is_causal=True, enable_gqa=True, **rules)
    return out[0].transpose(0, 1)


def chunks(length: int, seed: int, one_by_one: bool = False):
    """[begin, end) that cover `length` tokens."""
    rng, begin = random.Random(seed), 0
    while begin < length:
        size = 1 if one_by_one else rng.choice([1, 2, 3, 7, 15, 16, 17, 64, 200])
        yield begin, min(begin + size, length)
        begin += size


def new_cache(q, k, v, **options) -> multihead.KVCache:
    return multihead.KVCache(k.shape[0], G, D, DV, **(dict(dtype=k.dtype) | options))


def from_cache(q, cache, rules):
    out = attention(
        q,
        cache.key(),
        cache.value(),
        is_causal=True,
        causal_alignment="bottom_right",
        key_lengths=cache.lengths(),
        enable_gqa=True,
        **rules,
    )
    return out.transpose(1, 2)


@DTYPES
@RULES
def test_a_cache_alone(name, dtype):
    """Token by token and in chunks; a cache that grows and one that does not."""
    rules = rules_of(name)
    q, k, v = sequences(dtype)[0]
    expected = prefill(q, k, v, rules)
    for seed, options in enumerate(({}, {"max_length": 1200}, {"capacity": 100})):
        cache, outs = new_cache(q, k, v, **options), []
        for begin, end in chunks(q.shape[2], seed, one_by_one=seed == 0):
            cache.append(k[:, :, begin:end], v[:, :, begin:end])
            outs.append(from_cache(q[:, :, begin:end], cache, rules)[0])
        assert torch.equal(torch.cat(outs), expected)


@DTYPES
@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_a_cache_with_a_mask(kind, dtype):
    q, k, v = sequences(dtype)[0]
    length = q.shape[2]
    mask = torch.rand(length, length) < 0.7
    mask.fill_diagonal_(True)
    if kind == "bias":
        mask = torch.where(mask, torch.randn(length, length), -torch.inf).to(dtype)
    expected = prefill(q, k, v, {"attn_mask": mask})
    cache, outs = new_cache(q, k, v), []
    for begin, end in chunks(length, 3):
        cache.append(k[:, :, begin:end], v[:, :, begin:end])
        rows = {"attn_mask": mask[begin:end, :end]}
        outs.append(from_cache(q[:, :, begin:end], cache, rules=rows)[0])
    assert torch.equal(torch.cat(outs), expected)


@DTYPES
@RULES
def test_a_cache_of_rows_that_differ(name, dtype):
    """Rows of other lengths beside, each with its own number of new tokens."""
    rules, given = rules_of(name), sequences(dtype)
    expected = [prefill(*x, rules) for x in given]
    cache = multihead.KVCache(len(given), G, D, DV, dtype=dtype)
    steps = [list(chunks(x[0].shape[2], n)) for n, x in enumerate(given)]
    outs: list[list[Tensor]] = [[] for _ in given]
    for step in range(max(map(len, steps))):
        spans = [row[step] if step < len(row) else (0, 0) for row in steps]
        counts = [end - begin for begin, end in spans]
        padded = [
            torch.nn.utils.rnn.pad_sequence(
                [x[i][0, :, b:e].transpose(0, 1) for x, (b, e) in zip(given, spans)],
                batch_first=True,
            ).transpose(1, 2)
            for i in range(3)
        ]
        past = cache.lengths().clone()
        cache.append(*padded[1:], torch.tensor(counts))
        out = attention(
            padded[0],
            cache.key(),
            cache.value(),
            is_causal=True,
            query_offset=past,
            key_lengths=cache.lengths(),
            enable_gqa=True,
            **rules,
        ).transpose(1, 2)
        for row, count in enumerate(counts):
            outs[row].append(out[row, :count])
    for row, wanted in zip(outs, expected, strict=True):
        assert torch.equal(torch.cat(row), wanted)


@DTYPES
@RULES
def test_key_lengths_of_a_buffer(name, dtype):
    """A buffer of more keys than there are, NaN behind: what a static cache is."""
    rules = rules_of(name)
    q, k, v = sequences(dtype)[0]
    expected = prefill(q, k, v, rules)
    for begin, end in [(0, 1), (511, 512), (512, 513), (600, 607), (1000, 1117)]:
        buffers = []
        for x in (k, v):
            buffer = x.new_full((1, G, 1500, x.shape[3]), torch.nan)
            buffer[:, :, :end] = x[:, :, :end]
            buffers.append(buffer)
        out = attention(
            q[:, :, begin:end],
            *buffers,
            is_causal=True,
            causal_alignment="bottom_right",
            key_lengths=torch.tensor([end]),
            enable_gqa=True,
            **rules,
        )
        assert torch.equal(out[0].transpose(0, 1), expected[begin:end])


@DTYPES
@RULES
def test_ragged_and_in_pages(name, dtype):
    """Sequences that decode, extend and prefill in one call."""
    rules, given = rules_of(name), sequences(dtype)
    expected = [prefill(*x, rules) for x in given]
    for counts in ([1, 1, 1], [1, 540, 5], [16, 17, 77], [1117, 3, 1]):
        last = [
            x[0][0].transpose(0, 1)[-n:] for x, n in zip(given, counts, strict=True)
        ]
        rows = [torch.cat([x[i][0].transpose(0, 1) for x in given]) for i in (1, 2)]
        batch = Batch(counts, list(LENGTHS), (torch.cat(last), *rows), rules)
        wanted = torch.cat([x[-n:] for x, n in zip(expected, counts, strict=True)])
        ways = [(rows, {"cu_seqlens_k": starts(LENGTHS)})]
        ways += [in_pages(batch, page) for page in (16, 256)]
        for tensors, places in ways:
            out = multihead.varlen_attention(
                batch.tensors[0],
                *tensors,
                starts(counts),
                is_causal=True,
                **(rules | places),
            )
            assert torch.equal(out, wanted)


@DTYPES
@RULES
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5])
def test_threads(name, dtype, threads):
    rules = rules_of(name)
    q, k, v = sequences(dtype)[0]
    torch.set_num_threads(1)
    expected = prefill(q, k, v, rules)
    torch.set_num_threads(threads)
    assert torch.equal(prefill(q, k, v, rules), expected)
    cache, sizes = new_cache(q, k, v), [1000, 1, 15, 16, 1, 50, 34]
    outs = [
        (cache.append(kk, vv), from_cache(qq, cache, rules)[0])[1]
        for qq, kk, vv in zip(*(x.split(sizes, 2) for x in (q, k, v)), strict=True)
    ]
    assert torch.equal(torch.cat(outs), expected)
