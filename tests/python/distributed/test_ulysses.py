# SPDX-License-Identifier: MIT
"""Ulysses: results and gradients of 1, 2 and 4 processes have the bits of one's."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from rows import ORDERS, leaf, loss, rows_of
from torch.distributed.device_mesh import init_device_mesh
from whole_calls import CASES, SUMMED, cut, expected_here, run, whole_call

import multihead
from multihead.distributed import ulysses_attention, ulysses_varlen_attention

ops = torch.ops.multihead
TAKEN = [name for name, call in CASES.items() if "attn_mask" not in call[2]]


def as_dtype(x, dtype):
    return x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x


def assert_bits_of_one_process(name, dtype, order, rank, world):
    tensors, options, upstream = whole_call(name, dtype, groups=max(2, world))
    tensors = [x.to(dtype) for x in tensors]
    options = {x: as_dtype(y, dtype) for x, y in options.items()}
    upstream = upstream[0].to(dtype), upstream[1]
    golden = run(
        ops.scaled_dot_product_attention, tensors, options, upstream, backend="fused"
    )
    part, options, upstream, mine, keys = cut(
        tensors, options, upstream, order, rank, world
    )
    group = dist.group.WORLD.group_name
    got = run(ops.ulysses_attention, part, options, upstream, group=group, order=order)
    assert got.keys() == golden.keys()
    for result, x in got.items():
        if result in SUMMED:
            dist.all_reduce(x)  # the other processes' shares are 0
            assert torch.equal(x, golden[result]), f"{name}: {result}"
            continue
        wanted = expected_here(result, golden[result], mine, keys)
        assert torch.equal(x, wanted), f"{name}: {result}"


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_bits(rank, world, dtype, order):
    for name in TAKEN:
        assert_bits_of_one_process(name, dtype, order, rank, world)


@on_ranks(2)
@pytest.mark.parametrize("order", ORDERS)
def test_documents(rank, world, order):
    torch.manual_seed(0)
    starts = torch.tensor([0, 5, 5, 17, 24, 25])
    q, k, v, dout = (torch.randn(25, heads, 8) for heads in (4, 2, 2, 4))
    dlse = torch.randn(4, 25)
    rules = dict(is_causal=True, window=(7, 0), dropout_p=0.3, sinks=torch.ones(4))
    mine = rows_of(order, 25, rank, world)

    def results(operator, tensors, upstream, **more):
        torch.manual_seed(4)
        given = [leaf(x) for x in tensors]
        out, lse = operator(*given, starts, return_lse=True, **rules, **more)
        loss(out, lse, *upstream).backward()
        return [out, lse.T, *(x.grad for x in given)]

    def fused(*arguments, **options):
        return ops.varlen_attention(*arguments, starts, backend="fused", **options)

    golden = results(fused, (q, k, v), (dout, dlse))
    here = [x[mine] for x in (q, k, v)]
    got = results(
        ulysses_varlen_attention, here, (dout[mine], dlse[:, mine]), order=order
    )
    for x, y in zip(got, golden, strict=True):
        assert torch.equal(x, y[mine])


@on_ranks(2)
def test_lengths_as_processes_like(rank, world):
    torch.manual_seed(1)
    whole = [torch.randn(1, 2, 10, 4) for _ in range(3)]
    part = [x[:, :, :7] if rank == 0 else x[:, :, 7:] for x in whole]
    out = ulysses_attention(*part, is_causal=True)
    expected = ops.fused_attention(*whole, is_causal=True)[0]
    assert torch.equal(out, expected[:, :, :7] if rank == 0 else expected[:, :, 7:])


@on_ranks(2)
def test_second_derivatives(rank, world):
    """Those of the definition, through both exchanges."""
    torch.manual_seed(2)
    whole = [torch.randn(1, 2, 6, 4, dtype=torch.double) for _ in range(3)]

    def second(tensors, operator):
        given = [leaf(x) for x in tensors]
        (slope,) = torch.autograd.grad(
            operator(*given).sin().sum(), given[0], create_graph=True
        )
        slope.square().sum().backward()
        return [x.grad for x in given]

    golden = second(whole, lambda *x: ops.fused_attention(*x)[0])
    rows = slice(3 * rank, 3 * rank + 3)
    got = second([x[:, :, rows] for x in whole], ulysses_attention)
    for x, y in zip(got, golden, strict=True):
        torch.testing.assert_close(x, y[:, :, rows], rtol=1e-12, atol=1e-13)


@on_ranks(2)
@pytest.mark.parametrize("learned", ["other inputs", "logsumexp of one"])
def test_processes_that_need_other_gradients(rank, world, learned):
    """Backward exchanges the same on all of them: nothing is taken for something else."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.double)
    rows = slice(3 * rank, 3 * rank + 3)

    def results(tensors, operator, used):
        given = [leaf(x) for x in tensors]
        if learned == "other inputs" and operator is ulysses_attention:
            given = [x.requires_grad_(n == rank) for n, x in enumerate(given)]
        out, lse = operator(*given, return_lse=True)
        loss = out.sin().sum()
        if learned == "logsumexp of one":
            loss = loss + lse[..., used].sin().sum()
        loss.backward()
        return [x.grad for x in given if x.requires_grad]

    golden = results((q, k, v), multihead.scaled_dot_product_attention, slice(3, 6))
    golden = [x[:, :, rows] for x in golden]
    if learned == "other inputs":
        golden = [golden[rank]]
    part = [x[:, :, rows] for x in (q, k, v)]
    got = results(part, ulysses_attention, slice(0, 3 * rank))
    for x, y in zip(got, golden, strict=True):
        assert torch.equal(x, y)


@on_ranks(2)
def test_without_a_batch_and_under_autocast(rank, world):
    torch.manual_seed(2)
    x = torch.randn(2, 2, 6, 4)
    expected = ulysses_attention(x, x, x)
    out, lse = ulysses_attention(x[0], x[0], x[0], return_lse=True)
    assert torch.equal(out, expected[0]) and lse.shape == (2, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ulysses_attention(x, x, x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ulysses_attention(*[x.bfloat16()] * 3))


@on_ranks(2)
def test_calls_that_are_refused(rank, world):
    """On every process, whichever makes the mistake."""
    x = torch.randn(1, 2, 6, 4)
    with pytest.raises(
        RuntimeError,
        match=r"heads of query and of key must be multiples of .*, 2, got 2 and 1",
    ):
        ulysses_attention(x, x[:, :1], x[:, :1], enable_gqa=True)
    with pytest.raises(RuntimeError, match="attn_mask must be None, got one"):
        ulysses_attention(x, x, x, torch.ones(6, 12, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="ulysses_attention: is_causal must be the"):
        ulysses_attention(x, x, x, is_causal=rank == 0)
    heads = x if rank == 0 else x.new_zeros(1, 3, 6, 4)
    theirs = "multiples of" if rank == 1 else "process 1 has refused its arguments"
    with pytest.raises(RuntimeError, match=f"ulysses_attention: .*{theirs}"):
        ulysses_attention(heads, heads, heads)
    with pytest.raises(ValueError, match="group must be a mesh of one dimension"):
        ulysses_attention(x, x, x, group=init_device_mesh("cpu", (2, 1)))
    with pytest.raises(ValueError, match='order must be "contiguous" or "head_tail"'):
        ulysses_attention(x, x, x, order="zigzag")
    torch.testing.assert_close(ulysses_attention(x, x, x).shape, x.shape)
