# SPDX-License-Identifier: MIT
"""varlen_attention: what it refuses, and in which words."""

import re

import pytest
import torch
from sequences import in_pages, make

import multihead


def ints(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


# name: (the arguments that differ from a good call, exception, text)
BAD = {
    "begins late": (
        {"cu_seqlens_q": ints(1, 2, 5)},
        ValueError,
        "cu_seqlens_q must begin with 0, got 1",
    ),
    "descends": (
        {"cu_seqlens_q": ints(0, 4, 3, 5), "cu_seqlens_k": ints(0, 1, 2, 7)},
        ValueError,
        "cu_seqlens_q must ascend, got 4 before 3",
    ),
    "ends early": (
        {"cu_seqlens_q": ints(0, 2, 4)},
        ValueError,
        "cu_seqlens_q must end with the 5 rows of query, got 4",
    ),
    "keys end late": (
        {"cu_seqlens_k": ints(0, 2, 8)},
        ValueError,
        "cu_seqlens_k must end with the 7 rows of key, got 8",
    ),
    "floating point": (
        {"cu_seqlens_q": torch.tensor([0.0, 2, 5])},
        ValueError,
        "cu_seqlens_q must be int32 or int64, got Float",
    ),
    "bounds without numbers": (
        {"cu_seqlens_q": ints(0, 2, 5).to("meta")},
        ValueError,
        "cu_seqlens_q must be on the CPU, got one on meta",
    ),
    "lengths without numbers": (
        {"key_lengths": ints(2, 5).to("meta")},
        ValueError,
        "key_lengths must be on the CPU, got one on meta",
    ),
    "no bounds": (
        {"cu_seqlens_q": ints()},
        ValueError,
        "cu_seqlens_q must have the shape (N + 1,), N at least 0, got (0,)",
    ),
    "another number of sequences": (
        {"cu_seqlens_k": ints(0, 7)},
        ValueError,
        "cu_seqlens_k must have the shape of cu_seqlens_q, got (2,)",
    ),
    "no keys": (
        {"cu_seqlens_k": None},
        ValueError,
        "cu_seqlens_k must be given without block_table, got None",
    ),
    "long keys": (
        {"key_lengths": ints(3, 4)},
        ValueError,
        "key_lengths must be between 0 and the 2 rows of sequence 0, got 3",
    ),
    "negative keys": (
        {"key_lengths": ints(1, -1)},
        ValueError,
        "key_lengths must be between 0 and the 5 rows of sequence 1, got -1",
    ),
    "key lengths of another number": (
        {"key_lengths": ints(1)},
        ValueError,
        "key_lengths must have the shape (N,), got (1,)",
    ),
    "slopes": (
        {"alibi_slopes": torch.zeros(3)},
        ValueError,
        "alibi_slopes must have the shape (4,) or (2, 4), got (3,)",
    ),
    "sinks": (
        {"sinks": torch.zeros(3)},
        ValueError,
        "sinks must have the shape (4,), got (3,)",
    ),
    "window": (
        {"window": (-2, 0)},
        ValueError,
        "window must be two sizes of at least -1, got (-2, 0)",
    ),
    "window of one": (
        {"window": (1,)},
        ValueError,
        "window must be two sizes, got [1]",
    ),
    "alignment": (
        {"causal_alignment": "middle"},
        ValueError,
        'causal_alignment must be "top_left" or "bottom_right", got "middle"',
    ),
    "softcap": (
        {"softcap": -1.0},
        ValueError,
        "softcap must be finite and at least 0, got -1",
    ),
    "scale": ({"scale": float("inf")}, ValueError, "scale must be finite, got inf"),
    "dropout": (
        {"dropout_p": 2.0},
        RuntimeError,
        "dropout_p must be between 0 and 1, got 2",
    ),
    "rank": (
        {"query": torch.zeros(1, 5, 4, 16)},
        RuntimeError,
        "query must be (rows, heads, width), got (1, 5, 4, 16)",
    ),
    "heads": (
        {"query": torch.zeros(5, 3, 16)},
        RuntimeError,
        "key must have a number of heads that divides that of query, got 2 and 3",
    ),
    "width": (
        {"query": torch.zeros(5, 4, 8)},
        RuntimeError,
        "key must have the head width of query, got 16 and 8",
    ),
    "rows of values": (
        {"value": torch.zeros(8, 2, 16)},
        RuntimeError,
        "value must have the rows of key, got 8 and 7",
    ),
    "heads of values": (
        {"value": torch.zeros(7, 1, 16)},
        RuntimeError,
        "value must have the heads of key, got 1 and 2",
    ),
    "dtype": (
        {"key": torch.zeros(7, 2, 16).double()},
        RuntimeError,
        "key must have the dtype of query, got Double and Float",
    ),
    "integers": (
        {"query": torch.zeros(5, 4, 16, dtype=torch.int32)},
        RuntimeError,
        "query must be floating point, got Int",
    ),
    "device": (
        {"key": torch.zeros(7, 2, 16, device="meta")},
        RuntimeError,
        "key must be on the device of query, got meta and cpu",
    ),
    "sparse": (
        {"query": torch.zeros(5, 4, 16).to_sparse()},
        RuntimeError,
        "query must be a dense tensor, got Sparse",
    ),
    "a list": ({"query": [1.0]}, TypeError, "query must be a tensor, got list"),
    "bounds in a list": (
        {"cu_seqlens_q": [0, 2, 5]},
        TypeError,
        "cu_seqlens_q must be a tensor, got list",
    ),
}


def refused(arguments, kind, text):
    with pytest.raises(kind, match=re.escape(f"varlen_attention: {text}")):
        multihead.varlen_attention(**arguments)


def good():
    batch = make([2, 3], [2, 5])
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    return dict(zip(names, (*batch.tensors, *batch.bounds), strict=True))


@pytest.mark.parametrize("backend", ["auto", "exact"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_named(name, backend):
    more, kind, text = BAD[name]
    with multihead.backend(backend):
        refused(good() | more, kind, text)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", good())
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(name, layout):
    parts = [torch.zeros(n, 4, 16) for n in (2, 3)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    text = f"{name} must be a dense tensor, got a nested one: its sequences"
    if layout == torch.jagged:
        text = f"tensors must be plain ones, got {name}, a torch.nested"
    refused(good() | {name: nested}, TypeError, text)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_tensors_say_what_to_give():
    x = torch.nested.nested_tensor(
        [torch.zeros(n, 4, 16) for n in (2, 3)], layout=torch.jagged
    )
    with pytest.raises(TypeError, match=r"give values\(\) and offsets\(\)"):
        multihead.varlen_attention(x, x, x, x.offsets(), x.offsets())
    rows, bounds = x.values(), x.offsets()
    assert multihead.varlen_attention(rows, rows, rows, bounds, bounds).shape == (
        5,
        4,
        16,
    )


def pages():
    batch = make([2, 3], [2, 5])
    pools, places = in_pages(batch, 2)
    tensors = dict(zip(("query", "key", "value"), (batch.tensors[0], *pools)))
    return tensors | {"cu_seqlens_q": batch.bounds[0]} | places


PAGES = {
    "no lengths": (
        {"key_lengths": None},
        "key_lengths must be given with block_table, got None",
    ),
    "bounds too": (
        {"cu_seqlens_k": ints(0, 2, 7)},
        "cu_seqlens_k must be None with block_table, got both",
    ),
    "64 bits": (
        {"block_table": torch.zeros(2, 4, dtype=torch.int64)},
        "block_table must be int32, got Long",
    ),
    "another number of sequences": (
        {"block_table": torch.zeros(3, 4, dtype=torch.int32)},
        "block_table must have the shape (N, pages), got (3, 4)",
    ),
    "too long": (
        {"key_lengths": ints(2, 9)},
        "key_lengths must be between 0 and the 8 rows of sequence 1, got 9",
    ),
    "no such page": (
        {"block_table": ints(0, 1, 2, 3, 4, 5, 6, 7).view(2, 4)},
        "block_table must name pages from 0 to 5, got 6 for page 2 of sequence 1",
    ),
    "negative page": (
        {"block_table": torch.full((2, 4), -1, dtype=torch.int32)},
        "block_table must name pages from 0 to 5, got -1 for page 0 of sequence 0",
    ),
    "no pages": (
        {"key": torch.zeros(0, 2, 2, 16), "value": torch.zeros(0, 2, 2, 16)},
        "key must have the pages that block_table names, got 0 pages and 2 keys in "
        "sequence 0",
    ),
    "empty pages": (
        {"key": torch.zeros(6, 0, 2, 16), "value": torch.zeros(6, 0, 2, 16)},
        "key must have pages of at least 1 row, got 0",
    ),
}


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("backend", ["auto", "exact"])
@pytest.mark.parametrize("name", PAGES)
def test_bad_pages_are_named(name, backend, with_gradients):
    more, text = PAGES[name]
    arguments = pages() | more
    arguments["query"] = arguments["query"].requires_grad_(with_gradients)
    with multihead.backend(backend):
        refused(arguments, ValueError, text)


@pytest.mark.parametrize("backend", ["auto", "exact"])
def test_a_pool_without_pages_serves_sequences_without_keys(backend):
    """Before the first token, say; with gradients, too, which are none."""
    query = torch.randn(5, 4, 16, requires_grad=True)
    pool = torch.empty(0, 2, 2, 16, requires_grad=True)
    arguments = (query, pool, pool, ints(0, 2, 5))
    rules = dict(key_lengths=ints(0, 0), sinks=torch.zeros(4, requires_grad=True))
    for table in (ints(9, -1, 7, 8).view(2, 2), ints().view(2, 0)):
        with multihead.backend(backend):
            out = multihead.varlen_attention(*arguments, block_table=table, **rules)
            with torch.no_grad():
                alone = multihead.varlen_attention(
                    *arguments, block_table=table, **rules
                )
        assert not out.any() and not alone.any()
        for x in torch.autograd.grad(out.sum(), (query, pool, rules["sinks"])):
            assert not x.any()


def test_pages_want_a_fourth_dimension():
    text = "key must be (pages, page, heads, width) with block_table, got (7, 2, 16)"
    refused(pages() | {"key": torch.zeros(7, 2, 16)}, RuntimeError, text)


def test_the_operator_refuses_rules_that_it_lacks():
    arguments = (*good().values(), None)
    for name, value in (
        ("attn_mask", torch.zeros(2, 2)),
        ("key_mask", torch.ones(2, 2, dtype=torch.bool)),
        ("query_offset", torch.tensor(0)),
    ):
        with pytest.raises(ValueError, match="attn_mask, key_mask and query_offset"):
            torch.ops.multihead.fused_varlen_attention(*arguments, **{name: value})


def test_the_operator_refuses_gradients_of_pages():
    arguments = pages()
    query = arguments.pop("query").requires_grad_()
    keys, values = arguments.pop("key"), arguments.pop("value")
    with pytest.raises(NotImplementedError, match="block_table must be None where"):
        torch.ops.multihead.fused_varlen_attention(
            query,
            keys,
            values,
            arguments["cu_seqlens_q"],
            None,
            arguments["block_table"],
            key_lengths=arguments["key_lengths"],
        )


def test_backward_wants_what_forward_returned():
    query, key, value, *bounds = good().values()
    out, lse = torch.ops.multihead.fused_varlen_attention(
        query, key, value, *bounds, None, causal_alignment="bottom_right"
    )
    for name, bad in (("out", out[1:]), ("dout", out.double()), ("logsumexp", lse.T)):
        given = {"out": out, "dout": out, "logsumexp": lse} | {name: bad}
        with pytest.raises(
            RuntimeError, match=f"fused_varlen_attention_backward: {name} must be"
        ):
            torch.ops.multihead.fused_varlen_attention_backward(
                given["dout"],
                None,
                query,
                key,
                value,
                given["out"],
                given["logsumexp"],
                *bounds,
                [True] * 6,
            )


def test_fused_says_why_not():
    arguments = good()
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name].to("meta")
    with (
        multihead.backend("fused"),
        pytest.raises(RuntimeError, match="run on the CPU"),
    ):
        multihead.varlen_attention(**arguments)
