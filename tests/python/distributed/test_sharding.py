# SPDX-License-Identifier: MIT
"""The operators on DTensors: results and gradients of one process, to the bit."""

import contextlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

import multihead
import multihead.distributed

ops = torch.ops.multihead
B, H, G, LQ, LK, D, DV = 3, 8, 4, 11, 13, 8, 6

# name: (options of the call, where their DTensors lie before it)
LENGTHS = torch.tensor([LK, 4, 9])
CASES = {
    "plain": {},
    "causal": dict(is_causal=True),
    "keep mask": dict(attn_mask=torch.arange(B * LQ * LK).view(B, 1, LQ, LK) % 4 > 0),
    "bias per head": dict(attn_mask=torch.linspace(-2, 2, H * LQ * LK).view(H, LQ, LK)),
    "bias of all": dict(attn_mask=torch.linspace(-2, 2, LQ * LK).view(LQ, LK)),
    "lengths and offsets": dict(
        key_lengths=LENGTHS, query_offset=torch.tensor([2, 0, 5]), is_causal=True
    ),
    "key mask": dict(key_mask=torch.arange(B * LK).view(B, LK) % 3 > 0),
    "alibi": dict(alibi_slopes=torch.linspace(0.1, 1, H), window=(5, 5)),
    "alibi by row": dict(alibi_slopes=torch.linspace(0.1, 1, B * H).view(B, H)),
    "sinks": dict(sinks=torch.linspace(-1, 1, H), softcap=5.0),
    "dropout": dict(dropout_p=0.3, is_causal=True),
}
FLOATING = ("attn_mask", "sinks", "alibi_slopes")
PLACES = {
    "heads": Shard(1),
    "rows": Shard(0),
    "copies": Replicate(),
    "tokens": Shard(2),
}


def tensors(dtype=torch.float32):
    torch.manual_seed(6)
    shapes = ((B, H, LQ, D), (B, G, LK, D), (B, G, LK, DV))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def learned(name, x):
    return name in FLOATING and x.is_floating_point()


def run(given, options):
    """Results and gradients, in one order."""
    leaves = [x.detach().requires_grad_() for x in given]
    options = {
        name: x.detach().requires_grad_()
        if torch.is_tensor(x) and learned(name, x)
        else x
        for name, x in options.items()
    }
    torch.manual_seed(2)  # of dropout
    out, lse = multihead.scaled_dot_product_attention(
        *leaves, **options, enable_gqa=True, return_lse=True
    )
    (out.sin().sum() + lse.sin().sum()).backward()
    wanted = [
        x for name, x in options.items() if torch.is_tensor(x) and learned(name, x)
    ]
    return [out.detach(), lse.detach(), *(x.grad for x in (*leaves, *wanted))]


def distributed(x, mesh, placements):
    return distribute_tensor(x, mesh, placements) if torch.is_tensor(x) else x


def assert_as_one(shared, plain, exact=()):
    """Equal bits; where several processes' shares are summed, equal within rounding."""
    for number, (x, y) in enumerate(zip(shared, plain, strict=True)):
        assert type(x) is DTensor and x.shape == y.shape
        summed = any(isinstance(each, Partial) for each in x.placements)
        whole = x.full_tensor()
        if summed and number >= 5:
            torch.testing.assert_close(whole, y, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(whole, y)


@on_ranks(2, 4)
@pytest.mark.parametrize("where", PLACES)
def test_bits_are_those_of_one_process(rank, world, where):
    mesh = init_device_mesh("cpu", (world,))
    given = tensors()
    for options in CASES.values():
        plain = run(given, options)
        multihead.reset_stats()
        places = [PLACES[where]]
        shared = run(
            [distributed(x, mesh, places) for x in given],
            {name: distributed(x, mesh, [Replicate()]) for name, x in options.items()},
        )
        assert_as_one(shared, plain)
        assert multihead.stats().calls("fused") == 1
        expected = PLACES[where] if where in ("heads", "rows") else Replicate()
        assert shared[0].placements == (expected,)
        assert shared[2].placements == (expected,)


@on_ranks(4)
def test_rows_and_heads_of_a_mesh(rank, world):
    mesh = init_device_mesh("cpu", (2, 2))
    given = tensors()
    for places in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Shard(1), Shard(0)]):
        for name in ("causal", "bias per head", "alibi by row", "sinks", "dropout"):
            plain = run(given, CASES[name])
            shared = run(
                [distributed(x, mesh, places) for x in given],
                {
                    option: distributed(x, mesh, [Replicate()] * 2)
                    for option, x in CASES[name].items()
                },
            )
            assert_as_one(shared, plain)
            assert shared[0].placements == tuple(places)


@on_ranks(4)
def test_heads_that_do_not_divide_are_gathered(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    x = torch.randn(2, 6, 5, 8, generator=torch.Generator().manual_seed(1))
    shared = distribute_tensor(x, mesh, [Shard(1)])
    out = multihead.scaled_dot_product_attention(shared, shared, shared)
    assert out.placements == (Replicate(),)
    assert torch.equal(out.to_local(), multihead.scaled_dot_product_attention(x, x, x))


@on_ranks(2, 4)
def test_one_row_is_gathered(rank, world):
    """Of which all processes but one would have nothing."""
    mesh = init_device_mesh("cpu", (world,))
    given = [x[:1] for x in tensors()]
    plain = run(given, CASES["causal"])
    places = [Shard(0)], [Replicate()], [Shard(2)]
    shared = [distributed(*x) for x in zip(given, [mesh] * 3, places, strict=True)]
    got = run(shared, CASES["causal"])
    assert_as_one(got, plain)
    assert got[0].placements == (Replicate(),)
    places = [Shard(0)], [Shard(1)], [Shard(0)]
    shared = [distributed(*x) for x in zip(given, [mesh] * 3, places, strict=True)]
    got = run(shared, CASES["causal"])
    assert_as_one(got, plain)
    assert got[0].placements == (Shard(1),)


@on_ranks(2)
def test_shares_that_are_to_be_summed(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    q, k, v = tensors(torch.float64)
    part = DTensor.from_local(q * (rank + 0.25) / 1.5, mesh, [Partial()])
    shared = [part, *(distribute_tensor(x, mesh, [Shard(1)]) for x in (k, v))]
    out = multihead.scaled_dot_product_attention(*shared, enable_gqa=True)
    plain = multihead.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert out.placements == (Shard(1),)
    torch.testing.assert_close(out.full_tensor(), plain, rtol=1e-13, atol=1e-14)


@on_ranks(2)
@pytest.mark.parametrize("installed", [True, False])
def test_inference_mode(rank, world, installed):
    """Where PyTorch hands on whole functions, they are shared out as elsewhere."""
    mesh = init_device_mesh("cpu", (world,))
    q, k, v = tensors()
    shared = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    rows = [x[0, :, :LQ].transpose(0, 1) for x in (q, k, k)]
    own = [distribute_tensor(x, mesh, [Shard(1)]) for x in rows]
    starts = torch.tensor([0, 5, LQ])
    where = multihead.installed() if installed else contextlib.nullcontext()

    def results(tensors, documents):
        yield multihead.scaled_dot_product_attention(*tensors, enable_gqa=True)
        rules = dict(enable_gqa=True, softcap=3.0, return_lse=True)
        yield from multihead.scaled_dot_product_attention(*tensors, **rules)
        yield multihead.varlen_attention(*documents, starts, starts)
        yield from multihead.attention_summary(*tensors[:2], 3, enable_gqa=True)
        if installed:
            yield F.scaled_dot_product_attention(*tensors, enable_gqa=True)

    with torch.inference_mode(), where:
        plain = list(results((q, k, v), rows))
        multihead.reset_stats()
        got = list(results(shared, own))
        assert multihead.stats().calls("fused") == 4 + installed
    for x, y in zip(got, plain, strict=True):
        assert not isinstance(x.placements[0], Replicate)
        assert torch.equal(x.full_tensor(), y)


@on_ranks(2)
def test_pytorchs_function(rank, world):
    """F.scaled_dot_product_attention, which has no rule on the CPU, with install()."""
    mesh = init_device_mesh("cpu", (world,))
    q, k, v = tensors()
    shared = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    with multihead.installed():
        plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        multihead.reset_stats()
        out = F.scaled_dot_product_attention(*shared, is_causal=True, enable_gqa=True)
        assert multihead.stats().calls("fused", "installed") == 1
    assert torch.equal(out.full_tensor(), plain)


@on_ranks(2)
def test_other_operators(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    q, k, _ = tensors()
    shared = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k)]
    plain = multihead.attention_summary(q, k, 3, enable_gqa=True)
    ours = multihead.attention_summary(*shared, 3, enable_gqa=True)
    for x, y in zip(ours, plain, strict=True):
        assert torch.equal(x.full_tensor(), y)
    rows = [torch.randn(9, heads, D) for heads in (H, G, G)]
    starts = torch.tensor([0, 4, 4, 9])
    dropped = [x.requires_grad_() for x in rows]
    parts = [distribute_tensor(x.detach(), mesh, [Shard(1)]) for x in rows]
    parts = [x.requires_grad_() for x in parts]
    for given in (dropped, parts):
        torch.manual_seed(4)
        out = multihead.varlen_attention(*given, starts, starts, dropout_p=0.5)
        out.sin().sum().backward()
    for x, y in zip(parts, dropped, strict=True):
        assert torch.equal(x.grad.full_tensor(), y.grad)


@on_ranks(2)
def test_averaged_weights(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    q, k, v = tensors(torch.float64)
    lse = ops.fused_attention(q, k, v, enable_gqa=True)[1]
    given = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, lse)]
    for average in (False, True):
        plain = ops.attention_weights(q, k, lse, average, enable_gqa=True)
        ours = ops.attention_weights(*given, average, enable_gqa=True)
        torch.testing.assert_close(ours.full_tensor(), plain, rtol=1e-14, atol=1e-16)


@on_ranks(2)
def test_errors(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    x = distribute_tensor(torch.randn(2, 4, 5, 8), mesh, [Shard(1)])
    with pytest.raises(TypeError, match="fused_attention: sinks must be a DTensor as"):
        multihead.scaled_dot_product_attention(x, x, x, sinks=torch.zeros(4))
    other = init_device_mesh("cpu", (world, 1))
    y = distribute_tensor(torch.randn(2, 4, 5, 8), other, [Shard(1), Replicate()])
    with pytest.raises(ValueError, match="must be on one mesh, key is on"):
        multihead.scaled_dot_product_attention(x, y, y)


@on_ranks(2)
def test_compiled(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    given = [distribute_tensor(x, mesh, [Shard(1)]) for x in tensors()]

    def step(query, key, value):
        out = multihead.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return out.sin().sum().full_tensor()

    results = []
    for function in (step, torch.compile(step, backend="aot_eager")):
        leaves = [x.detach().requires_grad_() for x in given]
        function(*leaves).backward()
        results.append([x.grad.full_tensor() for x in leaves])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


# One process, which has never imported multihead.distributed.
PROGRAM = """
import sys
import torch, multihead
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.randn(2, 4, 5, 8)
shared = distribute_tensor(x, init_device_mesh("cpu", (1,)), [Shard(1)])
if sys.argv[1] == "install":
    multihead.install()
    attention = torch.nn.functional.scaled_dot_product_attention
else:
    attention = multihead.scaled_dot_product_attention
with torch.inference_mode(sys.argv[2] == "inference"):
    out = attention(shared, shared, shared)
    print(out.placements, torch.equal(out.to_local(), attention(x, x, x)))
"""


@pytest.mark.parametrize(
    ("who", "mode"),
    [("install", "inference"), ("install", "training"), ("function", "inference")],
)
def test_nobody_has_to_register(who, mode):
    """install() does, where PyTorch's DTensors are in use, and so does a call with one."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, who, mode],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(Shard(dim=1),) True\n"
