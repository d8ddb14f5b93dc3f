# SPDX-License-Identifier: MIT
"""The kernels in the ring of PyTorch's context_parallel, which hands results around:
backward gets an output and a logsumexp that are merged from all processes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._context_parallel._attention as ring
from ranks import on_ranks
from rows import leaf, rows_of

import multihead

ops = torch.ops.multihead
NEEDS = [True, True, True, False, False, False]


def forward(query, key, value, is_causal, **rules):
    return ops.fused_attention(query, key, value, is_causal=is_causal, **rules)


def backward(query, key, value, out, logsumexp, is_causal, dout, **rules):
    given = (dout, None, query, key, value, out, logsumexp, NEEDS)
    return ops.fused_attention_backward(
        *given, is_causal=is_causal, is_part=True, **rules
    )[:3]


@on_ranks(2, 4)
@pytest.mark.parametrize("way", ["allgather", "alltoall"])
@pytest.mark.parametrize(
    ("order", "is_causal"),
    [("head_tail", True), ("contiguous", True), ("contiguous", False)],
)
def test_results_and_gradients_are_those_of_one_process(
    rank, world, way, order, is_causal
):
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 4, 32, 8)
    rules = dict(is_causal=is_causal, softcap=5.0)
    whole = [leaf(x) for x in (q, k, v)]
    golden = multihead.scaled_dot_product_attention(*whole, **rules)
    golden.backward(dout)
    mine = rows_of(order, 32, rank, world)
    part = [x[:, :, mine] for x in (q, k, v)]
    before = ring._cp_options.enable_load_balance, ring._cp_options.rotate_method
    try:
        ring._cp_options.enable_load_balance = order == "head_tail"
        ring.set_rotate_method(way)
        where = (dist.group.WORLD, 2)
        out, lse = ring._templated_ring_attention(*where, forward, *part, **rules)
        gradients = ring._templated_ring_attention_backward(
            *where, backward, dout[:, :, mine], "dout", *part, out, lse, **rules
        )
    finally:
        ring._cp_options.enable_load_balance, ring._cp_options.rotate_method = before
    close = dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, golden[:, :, mine], **close)
    for x, y in zip(gradients, whole, strict=True):
        torch.testing.assert_close(x, y.grad[:, :, mine], **close)
