# SPDX-License-Identifier: MIT
"""Ring attention: results and gradients of 1, 2, 3 and 4 processes are one's.

What one process computes in float64 is the truth; it is tested against loops elsewhere.
Each number may be off by the error budget of its formula.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist
from error_budget import BUDGETS
from ranks import on_ranks
from rows import ORDERS, leaf, loss, rows_of
from torch.distributed.device_mesh import init_device_mesh
from whole_calls import (
    CASES,
    LQ,
    SUMMED,
    B,
    D,
    G,
    H,
    cut,
    expected_here,
    has_gradient,
    run,
    whole_call,
)

import multihead
from multihead.distributed import ring_attention, ring_varlen_attention

ops = torch.ops.multihead


def conditions(tensors, options, upstream):
    """The formulas of the results on absolute values, and the largest |score|."""
    plain = {x: y for x, y in options.items() if x != "alibi_slopes"}
    torch.manual_seed(3)
    state = torch.randint(torch.iinfo(torch.int64).max, (2,))
    q, k, v = tensors
    rules = options | dict(enable_gqa=True)
    lse = ops.fused_attention(q, k, v, **rules, dropout_state=state)[1]
    kept = ops.attention_weights(q, k, lse, False, **rules, dropout_state=state)
    p = ops.attention_weights(q, k, lse, False, **rules | dict(dropout_p=0.0))
    k, v = (x.repeat_interleave(H // G, 1).abs() for x in (k, v))
    q, (dout, dlse) = q.abs(), upstream
    # dP of what was dropped is 0, but Δ reaches it.
    steps = kept * (dout.abs() @ v.mT)
    steps = steps + p * (steps.sum(-1, keepdim=True) + dlse.abs().unsqueeze(-1))
    scale = abs(plain.get("scale") or D**-0.5)
    largest = (q @ k.mT * scale).amax().item() if q.numel() and k.numel() else 0.0
    if "attn_mask" in plain and plain["attn_mask"].is_floating_point():
        largest += plain["attn_mask"].abs().amax().item()
    if "alibi_slopes" in options:
        largest += options["alibi_slopes"].amax().item() * LQ
    groups = (B, G, H // G)
    found = {
        "out": kept @ v,
        "query": steps @ k * scale,
        "key": (steps.mT @ q * scale).unflatten(1, groups[1:]).sum(2),
        "value": (kept.mT @ dout.abs()).unflatten(1, groups[1:]).sum(2),
        "sinks": steps.sum((0, 2, 3)) + dlse.abs().sum((0, 2)),
        "alibi_slopes": steps.sum((0, 2, 3)) * LQ,
    }
    if has_gradient(plain, "attn_mask"):
        found["attn_mask"] = steps.sum_to_size(plain["attn_mask"].shape)
    return found, largest


def assert_as_one_process(name, dtype, order, rank, world):
    tensors, options, upstream = whole_call(name, dtype)
    golden = run(
        ops.scaled_dot_product_attention, tensors, options, upstream, backend="fused"
    )
    scales, largest = conditions(tensors, options, upstream)
    part, mine_options, mine_upstream, mine, keys = cut(
        tensors, options, upstream, order, rank, world
    )
    got = run(
        ops.ring_attention,
        [x.to(dtype) for x in part],
        {
            x: y.to(dtype) if torch.is_tensor(y) and y.is_floating_point() else y
            for x, y in mine_options.items()
        },
        (mine_upstream[0].to(dtype), mine_upstream[1]),
        group=dist.group.WORLD.group_name,
        order=order,
    )
    assert got.keys() == golden.keys()
    for result, x in got.items():
        wanted = golden[result]
        if result in SUMMED and x.shape == wanted.shape:
            dist.all_reduce(x)
        else:
            wanted = expected_here(result, wanted, mine, keys)
        assert x.shape == wanted.shape
        allowed = _allowed(dtype, result, scales, largest)
        if allowed.dim() == 4 or (allowed.dim() == 3 and result == "attn_mask"):
            if allowed.shape != wanted.shape:
                allowed = expected_here(result, allowed, mine, keys)
        excess = ((x - wanted).abs() - allowed).amax() if x.numel() else torch.tensor(0)
        assert excess <= 0, f"{name}: {result} is off by {excess:.3g} more than allowed"


def _allowed(dtype, result, scales, largest):
    budget = BUDGETS[dtype]
    if result == "logsumexp":
        unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
        return torch.tensor(16 * unit * (4 + largest))
    # In float64 the truth is off by as much.
    truth = 1 + (dtype == torch.float64)
    return truth * budget.allowed(scales[result], torch.tensor(largest))


@on_ranks(2, 4)
@pytest.mark.parametrize("order", ORDERS)
def test_float64(rank, world, order):
    for name in CASES:
        assert_as_one_process(name, torch.float64, order, rank, world)


@on_ranks(3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(rank, world, dtype, order):
    for name in CASES:
        assert_as_one_process(name, dtype, order, rank, world)


@on_ranks(1)
def test_of_one_process(rank, world):
    for name in CASES:
        assert_as_one_process(name, torch.float32, "head_tail", rank, world)


@on_ranks(2)
def test_lengths_as_processes_like(rank, world):
    """Contiguous tokens are those of process 0, then those of process 1."""
    torch.manual_seed(1)
    whole = [torch.randn(1, 2, 10, 4, dtype=torch.double) for _ in range(3)]
    part = [x[:, :, :7] if rank == 0 else x[:, :, 7:] for x in whole]
    out, _ = ops.ring_attention(
        *part, is_causal=True, group=dist.group.WORLD.group_name
    )
    expected = ops.fused_attention(*whole, is_causal=True)[0]
    expected = expected[:, :, :7] if rank == 0 else expected[:, :, 7:]
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)


@on_ranks(2)
def test_without_a_batch_and_under_autocast(rank, world):
    torch.manual_seed(2)
    x = torch.randn(2, 2, 6, 4)
    group = dist.group.WORLD.group_name
    expected, _ = ops.ring_attention(x, x, x, group=group)
    out, lse = ops.ring_attention(x[0], x[0], x[0], group=group, return_lse=True)
    assert torch.equal(out, expected[0]) and lse.shape == (2, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = ops.ring_attention(x, x, x, group=group)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ops.ring_attention(*[x.bfloat16()] * 3, group=group)[0])


@on_ranks(2)
def test_compiled(rank, world):
    group = dist.group.WORLD.group_name

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(query, key, value):
        out, _ = ops.ring_attention(query, key, value, is_causal=True, group=group)
        return out.sin().sum()

    torch.manual_seed(rank)
    given = [torch.randn(2, 2, 6, 4) for _ in range(3)]
    ours = [leaf(x) for x in given]
    step(*ours).backward()
    theirs = [leaf(x) for x in given]
    ops.ring_attention(*theirs, is_causal=True, group=group)[0].sin().sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x.grad, y.grad)


@on_ranks(2)
def test_python_functions(rank, world):
    """One operator call each, with a group, a mesh of one dimension, or all processes."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 8)
    name = dist.group.WORLD.group_name
    options = dict(is_causal=True, query_offset=torch.tensor(1), window=(2, 1))
    expected = ops.ring_attention(
        x, x, x, **options, group=name, order="head_tail", return_lse=True
    )
    mesh = init_device_mesh("cpu", (world,))
    options |= dict(query_offset=1, order="head_tail")
    for group in (None, dist.group.WORLD, mesh):
        got = ring_attention(x, x, x, **options, group=group, return_lse=True)
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(ring_attention(x, x, x, **options, group=group), expected[0])
    rows, starts = x[0].transpose(0, 1), torch.tensor([0, 5, 8])
    out, lse = ring_varlen_attention(rows, rows, rows, starts, return_lse=True)
    theirs = ops.ring_varlen_attention(rows, rows, rows, starts, starts, group=name)[0]
    assert torch.equal(out, theirs) and lse.shape == (2, 4)
    with pytest.raises(
        ValueError, match="group must be a mesh of one dimension, got 2"
    ):
        ring_attention(x, x, x, group=init_device_mesh("cpu", (2, 1)))
    with pytest.raises(
        TypeError, match="group must be a process group or a mesh, got s"
    ):
        ring_attention(x, x, x, group="0")
    with pytest.raises(
        TypeError, match="ring_attention: arguments must be .* got windo"
    ):
        ring_attention(x, x, x, windows=(1, 1))
    with multihead.backend("exact"), pytest.raises(RuntimeError, match='be "exact"'):
        ring_attention(x, x, x)


# --- Documents -----------------------------------------------------------------------

DOCUMENTS = {
    "many": ([5, 0, 12, 7, 1], {}),
    "one": ([20], dict(is_causal=True)),
    "short": ([3] * 6, dict(is_causal=True, window=(1, 0))),
    "other keys": ([5, 6, 2], dict(is_causal=True, causal_alignment="top_left")),
    "sinks": ([9, 8], dict(sinks=torch.ones(H, dtype=torch.double), dropout_p=0.3)),
    "lengths": ([6, 9], dict(key_lengths=torch.tensor([4, 9]), softcap=2.0)),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("order", ORDERS)
def test_documents(rank, world, order):
    for name, (queries, options) in DOCUMENTS.items():
        keys = [n + 2 for n in queries] if name == "other keys" else queries
        starts = [torch.tensor([0, *each]).cumsum(0) for each in (queries, keys)]
        torch.manual_seed(len(name))
        q = torch.randn(sum(queries), H, D, dtype=torch.double)
        k, v = torch.randn(2, sum(keys), G, D, dtype=torch.double)
        dout, dlse = torch.randn_like(q), torch.randn(H, len(q), dtype=torch.double)
        mine, own = (rows_of(order, len(x), rank, world) for x in (q, k))
        given = [leaf(x) for x in (q, k, v)]
        here = [leaf(x) for x in (q[mine], k[own], v[own])]

        def results(operator, tensors, upstream, **more):
            torch.manual_seed(4)
            results = operator(*tensors, *starts, **options, return_lse=True, **more)
            loss(*results, *upstream).backward()
            return [*results, *(x.grad for x in tensors)]

        whole = results(ops.varlen_attention, given, (dout, dlse), backend="fused")
        part = results(
            ops.ring_varlen_attention,
            here,
            (dout[mine], dlse[:, mine]),
            group=dist.group.WORLD.group_name,
            order=order,
        )
        out, lse, dq, dk, dv = whole
        expected = [out[mine], lse[:, mine], dq[mine], dk[own], dv[own]]
        for x, y in zip(part, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


# --- Parts ---------------------------------------------------------------------------


def test_parts_of_a_call_drop_what_the_whole_drops():
    """dropout_state says where a part begins: (b, h, i, j) are those of the whole."""
    torch.manual_seed(0)
    q, k = torch.randn(3, 4, 20, 8), torch.randn(3, 4, 40, 8)
    rules = dict(dropout_p=0.5)
    whole = torch.tensor([11, 12])
    zeros = torch.zeros(3, 4, 20)
    weights = ops.attention_weights(q, k, zeros, False, **rules, dropout_state=whole)
    for batch, head, query, key in ((1, 2, 3, 5), (0, 1, 0, 16), (2, 0, 17, 33)):
        part = torch.tensor([11, 12, batch, head, 4, query, key])
        at = (slice(batch, None), slice(head, None), slice(query, None))
        got = ops.attention_weights(
            q[at], k[at[:2]][:, :, key:], zeros[at], False, **rules, dropout_state=part
        )
        assert torch.equal(got == 0, weights[at][..., key:] == 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_merge(dtype):
    """Attention to some keys and to the others is attention to all."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 8, dtype=dtype) for _ in range(3))
    parts = [
        ops.fused_attention(q, k[:, :, at], v[:, :, at])
        for at in (slice(0, 5), slice(5, 9))
    ]
    out, lse = ops.merge_attention(*parts[0], *parts[1])
    expected = ops.fused_attention(q, k, v)
    u = 2.0**-7 if dtype == torch.bfloat16 else torch.finfo(dtype).eps * 8
    torch.testing.assert_close(out, expected[0], rtol=u, atol=u)
    u = torch.finfo(lse.dtype).eps * 8
    torch.testing.assert_close(lse, expected[1], rtol=u, atol=u)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for x, y in zip(ops.merge_attention(out, lse, *nothing), (out, lse), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(ops.merge_attention(*nothing, out, lse), (out, lse), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(ops.merge_attention(*nothing, *nothing), nothing, strict=True):
        assert torch.equal(x, y)


def test_merge_is_differentiable():
    torch.manual_seed(0)
    given = [
        torch.randn(shape, dtype=torch.double, requires_grad=True)
        for shape in ((2, 3, 4), (2, 3), (2, 3, 4), (2, 3))
    ]
    assert torch.autograd.gradcheck(ops.merge_attention, given)


def test_merge_refuses_other_shapes():
    x, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    with pytest.raises(RuntimeError, match=r"merge_attention: out and other_out .*, L"):
        ops.merge_attention(x, lse, x[:1], lse[:1])


# --- Errors --------------------------------------------------------------------------


def refused(rank, error, text, *tensors, **options):
    options = dict(group=dist.group.WORLD.group_name) | options
    with pytest.raises(error, match=text):
        ops.ring_attention(*tensors, **options)


@on_ranks(2)
def test_what_one_process_refuses_ends_the_call_of_all(rank, world):
    x = torch.randn(1, 2, 4, 8)
    wrong = x[..., :7] if rank == 1 else x
    text = "key must have the head width" if rank == 1 else "process 1 has refused"
    refused(rank, RuntimeError, text, x, wrong, x)
    text = "dropout_p must be" if rank == 0 else "process 0 has refused its arguments"
    refused(
        rank,
        (ValueError, RuntimeError),
        text,
        *[x] * 3,
        dropout_p=2.0 if rank == 0 else 0.5,
    )
    # And the group goes on.
    assert (
        ops.ring_attention(x, x, x, group=dist.group.WORLD.group_name)[0]
        .isfinite()
        .all()
    )


# What differs: on process 0, on process 1; how the error goes on.
DIFFERENT = {
    "is_causal": (True, False, "got true on process 0 and false"),
    "dropout_p": (0.5, 0.25, "got 0.5 on process 0 and 0.25"),
    "scale": (None, 2.0, "got none on process 0 and 2"),
    "softcap": (3.5, None, "got 3.5 on process 0 and none"),
    "order": (*ORDERS, 'got "contiguous" on process 0 and "head_tail"'),
    "causal_alignment": ("top_left", "bottom_right", 'got "top_left" .* and "bot'),
    "sinks": (torch.zeros(2), torch.ones(2), "got others"),
    "key_lengths": (torch.tensor([3]), torch.tensor([4]), "got others"),
    "window": ([1, 1], [2, 1], "got 1 on process 0 and 2"),
    "attn_mask": (None, torch.ones(4, 8), "got false on process 0 and true"),
    "key_mask": (None, torch.ones(1, 4).bool(), "got false on process 0 and true"),
}
NAMES = {
    "sinks": "the values of sinks",
    "key_lengths": "the values of key_lengths",
    "window": "the left side of window",
    "attn_mask": "whether there is an attn_mask",
    "key_mask": "whether there is a key_mask",
}


@on_ranks(2)
def test_rules_that_differ_are_refused_everywhere(rank, world):
    x = torch.randn(1, 2, 4, 8)
    for name, (*options, words) in DIFFERENT.items():
        words = f": {NAMES.get(name, name)} must be the same on all processes, {words}"
        refused(rank, RuntimeError, words, x, x, x, **{name: options[rank]})
    group = dist.group.WORLD.group_name
    attend = (ops.ring_attention, ops.ulysses_attention)[rank]
    with pytest.raises(RuntimeError, match="the method .* got the ring .* and Ulysses"):
        attend(x, x, x, group=group)


@on_ranks(2)
def test_shapes_that_differ_are_refused_everywhere(rank, world):
    text = "the number of query heads must be the same .* got 2 .* and 4 on process 1"
    x = torch.randn(1, 2 * (rank + 1), 4, 8)
    refused(rank, RuntimeError, text, x, x, x)
    x = torch.randn(1, 2, 4, 8, dtype=(torch.float32, torch.float64)[rank])
    refused(rank, RuntimeError, "the dtype of query .* Float .* Double", x, x, x)
    x = torch.randn(1, 2, 3 + 2 * rank, 8)
    text = 'process 0 must have 4 of the 8 queries of a sequence in the order "head_'
    refused(rank, RuntimeError, text, x, x, x, order="head_tail")
    mask = torch.zeros(3 + 2 * rank, 8 - rank)
    text = "attn_mask of process 1 must be broadcastable .*, 5, 8.*got sizes 1, 1, 5, 7"
    refused(rank, RuntimeError, text, x, x, x, attn_mask=mask)


@on_ranks(2)
def test_other_errors(rank, world):
    x = torch.randn(1, 2, 4, 8)
    refused(rank, ValueError, 'order must be "contiguous" or', x, x, x, order="ring")
    refused(rank, RuntimeError, "nowhere", x, x, x, group="nowhere")
    low = x.to(torch.float8_e5m2)
    refused(rank, RuntimeError, "query must be|takes|kernels", low, low, low)
    with pytest.raises(RuntimeError, match="key_mask must be bool .*got Float"):
        ops.ring_attention(x, x, x, key_mask=torch.ones(1, 4), group="0")


@on_ranks(2)
@pytest.mark.parametrize("name", ["ring_attention", "ulysses_attention"])
def test_transforms_are_refused(rank, world, name):
    """They would find a tangent of 0, or memory that is not there."""
    x = torch.randn(1, 2, 4, 8)
    attend, group = getattr(ops, name), dist.group.WORLD.group_name

    def out(query, **options):
        return attend(query, x, x, group=group, **options)[0]

    def of_sinks(sinks):
        return out(x, sinks=sinks).sum()

    text = f"{name}: tensors must be ordinary ones, one is in a transform of torch.func"
    for call in (
        lambda: torch.func.jvp(out, (x,), (x,)),
        lambda: torch.func.grad(lambda query: out(query).sum())(x),
        lambda: torch.vmap(out)(torch.stack((x, x))),
        lambda: torch.func.grad(of_sinks)(torch.zeros(2)),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()


@on_ranks(2)
def test_second_derivatives_are_refused(rank, world):
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    out, _ = ops.ring_attention(x, x, x, group=dist.group.WORLD.group_name)
    (slope,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="fused_ring_attention_backward is not impl"):
        slope.sum().backward()


@on_ranks(4, timeout=40, dies=(2,))
@pytest.mark.parametrize("name", ["ring_attention", "ulysses_attention"])
def test_a_process_that_dies_is_named(rank, world, name):
    """The others get an error when they wait for it, and nobody hangs."""
    x = torch.randn(1, 4, 64, 8)
    group = dist.group.WORLD.group_name
    attend = getattr(ops, name)
    attend(x, x, x, group=group)
    if rank == 2:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"{name}: .*process"):
        for _ in range(100):
            attend(x, x, x, group=group)
    assert time.monotonic() - start < 30


@on_ranks(4, timeout=40, dies=(1,))
@pytest.mark.parametrize("name", ["ring_attention", "ulysses_attention"])
def test_a_process_that_dies_before_backward_is_named(rank, world, name):
    x = torch.randn(1, 4, 64, 8, requires_grad=True)
    out, _ = getattr(ops, name)(x, x, x, group=dist.group.WORLD.group_name)
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"{name}: .*process"):
        out.sum().backward()
    assert time.monotonic() - start < 30


@on_ranks(2, timeout=40)
@pytest.mark.parametrize("name", ["ring_attention", "ulysses_attention"])
def test_a_process_without_backward_is_named(rank, world, name):
    """Who waits for it gives up after the timeout of the group."""
    x = torch.randn(1, 4, 64, 8, requires_grad=True)
    out, _ = getattr(ops, name)(x, x, x, group=dist.group.WORLD.group_name)
    if rank == 1:
        return
    with pytest.raises(RuntimeError, match=f"{name}: .*process"):
        out.sum().backward()


# --- Operators -----------------------------------------------------------------------


@on_ranks(1)
def test_opcheck(rank, world):
    group = dist.group.WORLD.group_name
    q, k, v = (torch.randn(2, 2, 5, 4) for _ in range(3))
    rules = dict(is_causal=True, group=group)
    learned = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, places = ops.fused_ring_attention(q, k, v, **rules)
    needs = [True] * 3 + [False] * 3
    given = (out, lse, q, k, v, out, lse, places, needs)
    rows, starts = torch.randn(5, 2, 4), torch.tensor([0, 2, 5])
    documents = (rows, rows, rows, starts, starts)
    for call in (
        (ops.ring_attention.default, learned, rules),
        (ops.fused_ring_attention.default, learned, rules),
        (ops.fused_ring_attention_backward.default, given, rules),
        (ops.ring_varlen_attention.default, documents, rules),
        (
            ops.tokens_to_heads.default,
            ([learned[0], q.double()], group, "contiguous", [5, 5]),
            {},
        ),
        (
            ops.heads_to_tokens.default,
            ([learned[0], q.double()], group, "contiguous", [5, 5]),
            {},
        ),
    ):
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(*call, test_utils=checks)
