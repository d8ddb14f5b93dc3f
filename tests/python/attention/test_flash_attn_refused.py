# SPDX-License-Identifier: MIT
"""What multihead.flash_attn refuses, and that the cache is then what it was."""

import math
import re

import pytest
import torch
from equal import assert_equal

from multihead.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

B, H, G, D, ROOM = 2, 4, 2, 16, 24
ONE = torch.ones(B, 1, G, D)
Q = torch.ones(B, 1, H, D)
COS = torch.ones(ROOM, 4)
INTEGERS = "must be int32 or int64 (2,) on the CPU, got"


def two(*numbers):
    return torch.tensor(numbers)


def appending(**more):
    return dict(k=ONE, v=ONE, cache_seqlens=3) | more


def rotating(cos=COS, sin=COS, **more):
    return appending(rotary_cos=cos, rotary_sin=sin, **more)


BAD = {
    "no room": (
        appending(cache_seqlens=ROOM),
        "cache_seqlens must be from 0 to 23, to leave place for 1 more among 24, got 24",
    ),
    "negative with keys": (
        appending(cache_seqlens=-1),
        "cache_seqlens must be from 0 to 23, to leave place for 1 more among 24, got -1",
    ),
    "more keys than the cache has": (
        appending(k=ONE.expand(-1, 25, -1, -1), v=ONE.expand(-1, 25, -1, -1)),
        "k must have at most the 24 keys of the cache, got 25",
    ),
    "no lengths": (dict(k=ONE, v=ONE), "k, v and cache_seqlens must be given together"),
    "keys alone": (
        dict(k=ONE, cache_seqlens=3),
        "k, v and cache_seqlens must be given together",
    ),
    "new values of another width": (
        appending(v=ONE[..., :4]),
        "v must be torch.float32 (2, 1, 2, 16), got torch.float32 (2, 1, 2, 4)",
    ),
    "new keys of another dtype": (
        appending(k=ONE.double()),
        "k must be torch.float32 (2, 1, 2, 16), got torch.float64 (2, 1, 2, 16)",
    ),
    "new keys of one dimension": (
        appending(k=ONE.flatten()),
        "k must be torch.float32 (2, 0, 2, 16), got torch.float32 (64,)",
    ),
    "another batch": (
        dict(q=torch.ones(3, 1, H, D), cache_seqlens=3),
        "k_cache must have the batch size of q without cache_batch_idx, got 2 and 3",
    ),
    "no keys at all": (
        dict(k_cache=ONE[:, :0], v_cache=ONE[:, :0]),
        "k_cache must have keys, got the shape (2, 0, 2, 16)",
    ),
    "another width": (
        appending(q=Q[..., :8]),
        "k_cache must have the head width of q, got 16 and 8",
    ),
    "heads that do not divide": (
        appending(q=Q[:, :, :3]),
        "q must have a multiple of the 2 heads of k_cache, got 3",
    ),
    "queries of another dtype": (
        appending(q=Q.double()),
        "k_cache must be torch.float64 with four dimensions, got torch.float32 "
        "(2, 24, 2, 16) on cpu",
    ),
    "queries of three dimensions": (
        dict(q=Q[0]),
        "q must be floating point with four dimensions, got torch.float32 (1, 4, 16) on",
    ),
    "values of another length": (
        appending(v_cache=torch.ones(2, 9, G, D)),
        "v_cache must have the shape of k_cache, (2, 24, 2, 16), or another width, got "
        "(2, 9, 2, 16)",
    ),
    "negative": (dict(cache_seqlens=-1), "cache_seqlens must be from 0 to 24, got -1"),
    "too long": (
        dict(cache_seqlens=two(3, 25)),
        "cache_seqlens must be from 0 to 24, got 25",
    ),
    "lengths of another batch": (
        dict(cache_seqlens=two(1, 2, 3)),
        f"cache_seqlens {INTEGERS} torch.int64 (3,) on cpu",
    ),
    "lengths of one number": (
        dict(cache_seqlens=two(1)[0]),
        f"cache_seqlens {INTEGERS} torch.int64 () on cpu",
    ),
    "lengths in floating point": (
        dict(cache_seqlens=two(7.9, 20.2)),
        f"cache_seqlens {INTEGERS} torch.float32 (2,) on cpu",
    ),
    "lengths of bool": (
        dict(cache_seqlens=two(True, True)),
        f"cache_seqlens {INTEGERS} torch.bool (2,) on cpu",
    ),
    "a length that is none": (dict(cache_seqlens=7.0), f"cache_seqlens {INTEGERS} 7.0"),
    "True as a length": (dict(cache_seqlens=True), f"cache_seqlens {INTEGERS} True"),
    "no such row": (
        appending(cache_batch_idx=two(0, 2)),
        "cache_batch_idx must be from 0 to 1, got 2",
    ),
    "a row that 32 bits would wrap": (
        appending(cache_batch_idx=two(2**32, 1)),
        f"cache_batch_idx must be from 0 to 1, got {2**32}",
    ),
    "a negative row": (
        appending(cache_batch_idx=two(-1, 0), cache_leftpad=two(0, 0)),
        "cache_batch_idx must be from 0 to 1, got -1",
    ),
    "rows in floating point": (
        appending(cache_batch_idx=two(0.9, 1.2)),
        f"cache_batch_idx {INTEGERS} torch.float32 (2,) on cpu",
    ),
    "too few rows": (
        appending(cache_batch_idx=two(0)),
        f"cache_batch_idx {INTEGERS} torch.int64 (1,) on cpu",
    ),
    "one padding for all": (appending(cache_leftpad=3), f"cache_leftpad {INTEGERS} 3"),
    "too few paddings": (
        appending(cache_leftpad=two(3)),
        f"cache_leftpad {INTEGERS} torch.int64 (1,) on cpu",
    ),
    "paddings in floating point": (
        appending(cache_leftpad=two(2.5, 0.0)),
        f"cache_leftpad {INTEGERS} torch.float32 (2,) on cpu",
    ),
    "a negative padding": (
        appending(cache_leftpad=two(-3, 0)),
        "cache_leftpad must be from 0 to 24, got -3",
    ),
    "rows and pages": (
        dict(
            cache_seqlens=3,
            cache_batch_idx=two(0, 1),
            block_table=torch.zeros(2, 1, dtype=torch.int32),
        ),
        "cache_batch_idx and cache_leftpad must be None with block_table, got one",
    ),
    "pages of one sequence": (
        appending(block_table=torch.zeros(2, dtype=torch.int32)),
        "block_table must be int32 (2, pages) on the CPU, got torch.int32 (2,) on cpu",
    ),
    "pages in 64 bits": (
        appending(block_table=two([0], [1])),
        "block_table must be int32 (2, pages) on the CPU, got torch.int64 (2, 1) on cpu",
    ),
    "rotary too short": (
        rotating(COS[:5], COS[:5], cache_seqlens=5),
        "rotary_cos must have a row for position 5, got 5",
    ),
    "rotary too short for the queries": (
        rotating(COS[:5], COS[:5], q=Q.expand(-1, 3, -1, -1), causal=True),
        "rotary_cos must have a row for position 5, got 5",
    ),
    "rotary without keys": (
        dict(rotary_cos=COS, rotary_sin=COS, cache_seqlens=3),
        "rotary_cos must be None without k and v, got a tensor",
    ),
    "cosines alone": (
        rotating(sin=None),
        "rotary_cos and rotary_sin must be given together, got one",
    ),
    "sines of another shape": (
        rotating(sin=COS[:, :1]),
        "rotary_sin must be torch.float32 (24, 4), as rotary_cos, got torch.float32 "
        "(24, 1) on cpu",
    ),
    "cosines too wide": (
        rotating(torch.ones(ROOM, 9), torch.ones(ROOM, 9)),
        "rotary_cos must be floating point (positions, at most 8), got torch.float32 "
        "(24, 9) on cpu",
    ),
    "cosines of one dimension": (
        rotating(COS[0], COS[0]),
        "rotary_cos must be floating point (positions, at most 8), got torch.float32 "
        "(4,) on cpu",
    ),
    "softcap": (appending(softcap=math.nan), "softcap must be finite, got nan"),
    "scale": (
        appending(softmax_scale=math.inf),
        "softmax_scale must be finite, got inf",
    ),
    "window": (
        appending(window_size=None),
        "window_size must be two integers, got None",
    ),
}
# What the function beneath says, before anything is written.
BENEATH = {
    "no such page": (
        appending(block_table=two([0], [2]).int()),
        "block_table must name pages from 0 to 1, got 2 for page 0 of sequence 1",
    ),
    "no pages": (
        dict(k_cache=ONE[:0], v_cache=ONE[:0], block_table=two([0], [0]).int()),
        "k_cache must have the pages that block_table names, got 0 pages and 1 keys in",
    ),
    "slopes": (
        appending(alibi_slopes=torch.ones(3)),
        "alibi_slopes must have the shape (4,) or (2, 4), got (3,)",
    ),
    "slopes beside padding": (
        dict(cache_leftpad=two(1, 2), alibi_slopes=torch.ones(3)),
        "alibi_slopes must have the shape (4,) or (2, 4), got (3,)",
    ),
    "a window of huge numbers": (
        dict(window_size=(2**70, 1)),
        "window_size must be (left, right), got (1180591620717411303424, 1)",
    ),
}


@pytest.mark.parametrize("name", [*BAD, *BENEATH])
def test_a_refused_call_leaves_the_cache(name):
    more, text = (BAD | BENEATH)[name]
    text = f"flash_attn_with_kvcache: {text}"
    k_cache, v_cache = torch.zeros(2, B, ROOM, G, D)
    with pytest.raises((ValueError, RuntimeError, TypeError), match=re.escape(text)):
        flash_attn_with_kvcache(**dict(q=Q, k_cache=k_cache, v_cache=v_cache) | more)
    assert (k_cache == 0).all() and (v_cache == 0).all()


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_cache_that_cannot_be_written_leaves_the_other(name):
    with torch.inference_mode():
        inference = torch.zeros(B, ROOM, G, D)
    one_row = torch.zeros(1, ROOM, G, D).expand(B, -1, -1, -1)
    for cache, text in (
        (inference, "must not be an inference tensor"),
        (one_row, "must have its own memory for each number"),
    ):
        other = torch.zeros(B, ROOM, G, D)
        both = (cache, other) if name == "k" else (other, cache)
        with pytest.raises(ValueError, match=f"{name}_cache {text}"):
            flash_attn_with_kvcache(Q, *both, ONE, ONE, cache_seqlens=3)
        assert (other == 0).all() and (cache == 0).all()


def test_inference_tensors_are_written_in_inference_mode():
    with torch.inference_mode():
        caches = torch.zeros(2, B, ROOM, G, D)
        flash_attn_with_kvcache(Q, *caches, ONE, ONE, cache_seqlens=3)
        assert (caches[:, :, 3] == 1).all() and caches.sum() == 2 * ONE.sum()


@pytest.mark.parametrize("batch", [1, B])
def test_new_keys_may_come_out_of_the_caches(batch):
    k_cache, v_cache = torch.rand(2, batch, ROOM, G, D)
    before = k_cache.clone(), v_cache.clone()
    k, v = k_cache[:, 2:4], k_cache[:, 8:10]
    flash_attn_with_kvcache(Q[:batch], k_cache, v_cache, k, v, cache_seqlens=3)
    k, v = before[0][:, 2:4].clone(), before[0][:, 8:10]
    before[0][:, 3:5], before[1][:, 3:5] = k, v
    assert_equal((k_cache, v_cache), before)


KV = torch.ones(B, 3, G, D)
# name: (the arguments that differ, exception, text); for sequences one after the other q
# is (2, H, D) of two sequences and k and v are (6, G, D).
ANY = {
    "softcap": (dict(softcap=math.nan), ValueError, "softcap must be finite, got nan"),
    "no softcap": (dict(softcap=None), TypeError, "softcap must be a number, got None"),
    "scale": (
        dict(softmax_scale="1"),
        TypeError,
        "softmax_scale must be a number or None, got '1'",
    ),
    "dropout": (
        dict(dropout_p=1.5),
        RuntimeError,
        "dropout_p must be between 0 and 1, got 1.5",
    ),
    "slopes": (
        dict(alibi_slopes=torch.ones(3)),
        ValueError,
        "alibi_slopes must have the shape (4,) or (2, 4), got (3,)",
    ),
    "slopes elsewhere": (
        dict(alibi_slopes=torch.ones(4, device="meta")),
        RuntimeError,
        "alibi_slopes must be on the device of q, got meta and cpu",
    ),
    "no query": (dict(q=None), TypeError, "q must be a tensor, got None"),
    "values of a list": (dict(v=[1.0]), TypeError, "v must be a tensor, got list"),
    "dtype": (
        dict(k=KV.double()),
        RuntimeError,
        "k must have the dtype of q, got Double and Float",
    ),
    "width": (
        dict(k=KV[..., :4]),
        RuntimeError,
        "k must have the head width of q, got 4 and 16",
    ),
}
BATCH = {
    "rank": (dict(q=Q[0]), ValueError, "q must have 4 dimensions, got 3"),
    "length": (
        dict(v=KV[:, :2]),
        RuntimeError,
        "v must have the length of k, got 2 and 3",
    ),
}
PAGES = torch.ones(5, 2, G, D)
TABLE = two([0, 1], [2, 3]).int()


def paged(table=TABLE, ends=(3, 4), pages=PAGES):
    return dict(k=pages, v=pages, block_table=table, cu_seqlens_k=two(0, *ends))


ROWS = {
    "rank": (
        dict(q=Q),
        RuntimeError,
        "q must be (rows, heads, width), got (2, 1, 4, 16)",
    ),
    "bounds of keys": (
        dict(cu_seqlens_k=two(0, 3, 7)),
        ValueError,
        "cu_seqlens_k must end with the 6 rows of k, got 7",
    ),
    "no bounds": (
        dict(cu_seqlens_k=None),
        TypeError,
        "cu_seqlens_k must be a tensor, got None",
    ),
    "no such page": (
        paged(TABLE + 3),
        ValueError,
        "block_table must name pages from 0 to 4, got 5 for page 0 of sequence 1",
    ),
    "keys beyond the pages": (
        paged(ends=(5, 6)),
        ValueError,
        "cu_seqlens_k.diff() must be between 0 and the 4 rows of sequence 0, got 5",
    ),
    "no pages": (
        paged(pages=PAGES[:0]),
        ValueError,
        "k must have the pages that block_table names, got 0 pages and 3 keys in",
    ),
}


@pytest.mark.parametrize("name", ANY | BATCH)
def test_errors_name_the_function_and_its_arguments(name):
    more, kind, text = (ANY | BATCH)[name]
    text = re.escape(f"flash_attn_func: {text}")
    with pytest.raises(kind, match=f"^{text}$"):
        flash_attn_func(**dict(q=Q, k=KV, v=KV) | more)


@pytest.mark.parametrize("name", ANY | ROWS)
def test_errors_of_sequences_name_the_function_and_its_arguments(name):
    more, kind, text = (ANY | ROWS)[name]
    if name in ANY:  # the same without the dimension of the batch
        more = {
            x: y.flatten(0, 1) if isinstance(y, torch.Tensor) and y.dim() == 4 else y
            for x, y in more.items()
        }
    good = dict(q=Q[:, 0], k=KV.flatten(0, 1), v=KV.flatten(0, 1))
    good |= dict(cu_seqlens_q=two(0, 1, 2), cu_seqlens_k=two(0, 3, 6))
    text = re.escape(f"flash_attn_varlen_func: {text}")
    with pytest.raises(kind, match=f"^{text}"):
        flash_attn_varlen_func(**good | dict(max_seqlen_q=1, max_seqlen_k=3) | more)


def test_errors_of_packed_tensors():
    slopes = dict(alibi_slopes=torch.ones(3))
    bounds = (two(0, 1, 2), 1)
    kv = torch.stack([KV, KV], 2)
    for call, text in (
        (
            lambda: flash_attn_qkvpacked_func(Q),
            "flash_attn_qkvpacked_func: qkv must have 5 dimensions, and 3 in dimension "
            "2, got the shape (2, 1, 4, 16)",
        ),
        (
            lambda: flash_attn_kvpacked_func(Q, KV),
            "flash_attn_kvpacked_func: kv must have 5 dimensions, and 2 in dimension 2, "
            "got the shape (2, 3, 2, 16)",
        ),
        (
            lambda: flash_attn_kvpacked_func(Q, kv, **slopes),
            "flash_attn_kvpacked_func: alibi_slopes must have the shape",
        ),
        (
            lambda: flash_attn_varlen_qkvpacked_func(Q, *bounds),
            "flash_attn_varlen_qkvpacked_func: qkv must have 4 dimensions, and 3 in "
            "dimension 1, got the shape (2, 1, 4, 16)",
        ),
        (
            lambda: flash_attn_varlen_kvpacked_func(
                Q[:, 0], kv.flatten(0, 1), bounds[0], two(0, 3, 7), 1, 3
            ),
            "flash_attn_varlen_kvpacked_func: cu_seqlens_k must end with the 6 rows of k",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            call()
