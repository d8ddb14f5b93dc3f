# SPDX-License-Identifier: MIT
"""context_parallel: programs over a sequence in pieces, as they are."""

import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from layers import CLOSE, layer
from ranks import on_ranks
from rows import ORDERS, leaf, rows_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import multihead
from multihead.distributed import (
    AttentionParallel,
    context_parallel,
    context_parallel_unshard,
    token_positions,
)

ops = torch.ops.multihead
LENGTH = 22  # divides by nothing but 2


class Operators(TorchDispatchMode):
    """Which ways of this package are gone within a block."""

    WAYS = ("fused_ring_attention", "tokens_to_heads", "fused_attention")

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2]
        if name in self.WAYS:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


RING = {"fused_ring_attention"}
ULYSSES = {"tokens_to_heads", "fused_attention"}


def tokens(heads, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return torch.randn(2, heads, LENGTH, 8, dtype=dtype)


def backward_of(function, *tensors):
    given = [leaf(x) for x in tensors]
    out = function(*given)
    out.sin().sum().backward()
    return [out.detach(), *(x.grad for x in given)]


@on_ranks(2, 4)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_pytorchs_function(rank, world, order, method):
    whole = [tokens(4, seed) for seed in range(3)]
    mine = rows_of(order, LENGTH, rank, world)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    golden = backward_of(attend, *whole)
    with context_parallel(order=order, method=method), Operators() as seen:
        got = backward_of(attend, *(x[:, :, mine] for x in whole))
    assert seen.names == (RING if method == "ring" else ULYSSES)
    for x, y in zip(got, golden, strict=True):
        torch.testing.assert_close(x, y[:, :, mine], **CLOSE)
    again = backward_of(attend, *whole)  # the block has ended
    assert all(torch.equal(x, y) for x, y in zip(again, golden, strict=True))


@on_ranks(1, 2, 4)
def test_auto_is_ulysses_where_that_sends_no_more(rank, world):
    def way(heads, groups, **options):
        q, k = tokens(heads), tokens(groups)
        with context_parallel(), Operators() as seen:
            F.scaled_dot_product_attention(q, k, k, enable_gqa=True, **options)
        return seen.names

    assert way(4, 4) == (RING if world == 1 else ULYSSES)
    assert way(8, 4) == (ULYSSES if world == 4 else RING)
    assert way(16, 4) == RING  # 20 > world · 4
    assert way(4, 2) == RING  # 2 heads for 4 processes; 6 > 2 · 2
    assert way(3, 3) == RING
    keep = torch.ones(LENGTH, world * LENGTH, dtype=torch.bool)
    assert way(4, 4, attn_mask=keep) == RING


@on_ranks(2)
def test_functions_and_their_options(rank, world):
    """Ours, with every kind of argument that goes with tokens."""
    q, k = tokens(8, 1), tokens(4, 2)
    mine = rows_of("head_tail", LENGTH, rank, world)
    keep = torch.arange(2 * LENGTH).view(2, LENGTH) % 5 > 0
    bias = torch.linspace(-2, 2, LENGTH * LENGTH).double().view(LENGTH, LENGTH)
    rules = dict(enable_gqa=True, window=(9, 3), sinks=torch.ones(8).double())
    golden = multihead.scaled_dot_product_attention(
        q, k, k, bias, key_mask=keep, **rules
    )
    with context_parallel():
        got = multihead.scaled_dot_product_attention(
            q[:, :, mine],
            k[:, :, mine],
            k[:, :, mine],
            bias[mine],
            key_mask=keep[:, mine],
            **rules,
        )
    torch.testing.assert_close(got, golden[:, :, mine], **CLOSE)
    starts = torch.tensor([0, 5, LENGTH])
    rows = [x[0].transpose(0, 1) for x in (q, k, k)]
    golden = multihead.varlen_attention(*rows, starts, starts, is_causal=True)
    with context_parallel():
        got = multihead.varlen_attention(
            *(x[mine] for x in rows), starts, is_causal=True
        )
    torch.testing.assert_close(got, golden[mine], **CLOSE)


def _modules():
    torch.manual_seed(5)
    options = dict(batch_first=True, dtype=torch.float64)
    return {
        "packed": (layer("packed"), dict(is_causal=True, need_weights=False)),
        "grouped": (layer("grouped"), dict(is_causal=True, need_weights=False)),
        "PyTorch's": (
            nn.MultiheadAttention(16, 4, **options),
            dict(need_weights=False),
        ),
        "PyTorch's encoder": (
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, **options),
            {},
        ),
    }


@on_ranks(2, 4)
@pytest.mark.parametrize(
    "kind", ["packed", "grouped", "PyTorch's", "PyTorch's encoder"]
)
@pytest.mark.parametrize("training", [True, False])
def test_modules(rank, world, kind, training):
    module, options = _modules()[kind]
    module.train(training)
    blocked = torch.arange(3 * LENGTH).view(3, LENGTH) % 7 == 6
    torch.manual_seed(1)
    x = torch.randn(3, LENGTH, 16, dtype=torch.float64)
    mine = rows_of("head_tail", LENGTH, rank, world)

    def results(x, blocked):
        with torch.set_grad_enabled(training):
            if kind == "PyTorch's encoder":
                out = module(x, src_key_padding_mask=blocked)
            else:
                out, _ = module(x, x, x, key_padding_mask=blocked, **options)
        if not training:
            return [out]
        module.zero_grad()
        out.sin().sum().backward()
        return [out.detach(), *(x.grad for x in module.parameters())]

    golden = results(x, blocked)
    with context_parallel(), Operators() as seen:
        got = results(x[:, mine], blocked[:, mine])
    assert seen.names in (RING, ULYSSES)
    for gradient in got[1:]:
        dist.all_reduce(gradient)
    torch.testing.assert_close(got[0], golden[0][:, mine], **CLOSE)
    for ours, theirs in zip(got[1:], golden[1:], strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@on_ranks(4)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_dropout_beside_tensor_parallel(rank, world, method):
    """Heads on one dimension of the mesh, tokens on the other: one process's numbers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "tokens"))
    options = dict(is_causal=True, need_weights=False)
    torch.manual_seed(6)
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    mine = rows_of("head_tail", LENGTH, mesh["tokens"].get_local_rank(), 2)
    one = layer("packed", dropout=0.4)
    torch.manual_seed(9)
    golden = one(x, x, x, **options)[0]
    shared = nn.ModuleDict({"attn": layer("packed", dropout=0.4)})
    parallelize_module(shared, mesh["heads"], {"attn": AttentionParallel()})
    torch.manual_seed(9)
    with context_parallel(mesh["tokens"], method=method):
        x = x[:, mine]
        got = shared["attn"](x, x, x, **options)[0]
    torch.testing.assert_close(got, golden[:, mine], **CLOSE)


@on_ranks(2, 3)
@pytest.mark.parametrize("order", ORDERS)
def test_buffers(rank, world, order):
    """Cut within the block, whole after it, whatever happens there."""
    x = torch.arange(3 * LENGTH).view(3, LENGTH)
    y, kept = torch.arange(LENGTH, dtype=torch.bfloat16), x.clone()
    mine = rows_of(order, LENGTH, rank, world)
    assert torch.equal(token_positions(LENGTH, order=order), mine)
    dims = dict(buffers=[x, y], buffer_seq_dims=[-1, 0])
    with context_parallel(**dims, order=order):
        assert torch.equal(x, kept[:, mine]) and torch.equal(y, mine.bfloat16())
        whole = context_parallel_unshard(None, [x, y], [1, 0], order=order)
    assert torch.equal(x, kept) and torch.equal(whole[0], kept)
    assert torch.equal(whole[1], y) and y.dtype == whole[1].dtype
    with pytest.raises(KeyError), context_parallel(**dims, order=order):
        raise KeyError
    assert torch.equal(x, kept) and len(y) == LENGTH
    with context_parallel(**dims, no_restore_buffers={y}, order=order):
        pass
    assert torch.equal(x, kept) and len(y) == len(mine)


@on_ranks(2)
def test_compiled_graphs_know_their_context(rank, world):
    """A graph from without is none within; within it is the ring's."""

    @torch.compile(backend="aot_eager")
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    whole = [tokens(4, seed) for seed in range(3)]
    mine = rows_of("head_tail", LENGTH, rank, world)
    golden = backward_of(attend, *whole)
    part = [x[:, :, mine] for x in whole]
    for _ in range(2):
        with context_parallel():
            got = backward_of(attend, *part)
        for x, y in zip(got, golden, strict=True):
            torch.testing.assert_close(x, y[:, :, mine], **CLOSE)
        alone = backward_of(attend, *whole)
        assert all(torch.equal(x, y) for x, y in zip(alone, golden, strict=True))
    with (
        context_parallel(method="ulysses"),
        pytest.raises(Exception, match="ulysses_attention: it cannot be part of a gr"),
    ):
        torch._dynamo.reset()
        attend(*part)


@on_ranks(2)
def test_activations_that_are_computed_again(rank, world):
    whole = [tokens(4, seed) for seed in range(3)]
    mine = rows_of("head_tail", LENGTH, rank, world)

    def attend(q, k, v):
        return checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False)

    golden = backward_of(attend, *whole)
    with context_parallel():
        got = backward_of(attend, *(x[:, :, mine] for x in whole))
    for x, y in zip(got, golden, strict=True):
        torch.testing.assert_close(x, y[:, :, mine], **CLOSE)


@on_ranks(2)
def test_other_threads_stay_as_they_are(rank, world):
    x = tokens(4)
    golden = multihead.scaled_dot_product_attention(x, x, x)
    found = []

    def attend():
        found.append(multihead.scaled_dot_product_attention(x, x, x))

    with context_parallel():
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
    assert torch.equal(found[0], golden)


@on_ranks(2)
def test_calls_from_torchscript_where_the_library_is_installed(rank, world):
    @torch.jit.script
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    whole = [tokens(4, seed) for seed in range(3)]
    mine = rows_of("head_tail", LENGTH, rank, world)
    golden = attend(*whole)
    with multihead.installed(), context_parallel():
        got = attend(*(x[:, :, mine] for x in whole))
    torch.testing.assert_close(got, golden[:, :, mine], **CLOSE)


def refused(words, function, *args, error=RuntimeError, **options):
    with pytest.raises(error, match=words):
        function(*args, **options)


@on_ranks(2)
def test_calls_that_are_refused(rank, world):
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    x, heads = (x, x, x), tokens(4)
    module, quiet = layer("packed"), dict(need_weights=False)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    has_no = "context_parallel has no "
    with context_parallel():
        refused(has_no + "weights", module, *x)
        refused(has_no + "attn_mask of a lay", module, *x, attn_mask=mask, **quiet)
        refused(has_no + "bias_k", layer("packed", add_bias_kv=True), *x, **quiet)
        zeros = layer("packed", add_zero_attn=True)
        refused(has_no + "add_zero_attn", zeros, *x, **quiet)
        pytorchs = nn.MultiheadAttention(16, 4, dtype=torch.float64)
        refused(has_no + "weights", pytorchs, *x)
        summary = multihead.attention_summary
        refused(has_no + "attention_summary", summary, heads, heads, 2)
        cannot = "context_parallel cannot run this call: "
        attend = multihead.scaled_dot_product_attention
        with multihead.backend("exact"):
            refused(cannot + "backend .exact. asks", attend, heads, heads, heads)
        five = heads.unsqueeze(0)
        refused(cannot + ".* 5-D", F.scaled_dot_product_attention, five, five, five)
        padding = torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)
        refused("must not require a", module, *x, key_padding_mask=padding, **quiet)
    refused("leave_context_parallel: calls must follow", ops.leave_context_parallel)


@on_ranks(2)
def test_arguments_that_are_refused(rank, world):
    x = torch.randn(2, 6, 16)

    def entered(**options):
        with context_parallel(**options):
            pass

    value, dims = dict(error=ValueError), dict(buffers=[x], buffer_seq_dims=[1])
    refused('order must be "contiguous" or "head_t', entered, order="zigzag", **value)
    refused('method must be "auto", "ring" or "u', entered, method="rings", **value)
    refused("as many as buffers, 1, got 0", entered, buffers=[x], **value)
    wrong = dims | dict(buffer_seq_dims=[3])
    refused("dimensions of buffers, got 3 for shape", entered, **wrong, **value)
    others = {torch.zeros(1)}
    refused("some of buffers", entered, **dims, no_restore_buffers=others, **value)
    wrong = dims | dict(buffers=[nn.Parameter(x)])
    refused("not be differentiated", entered, **wrong, **value)
    unshard = context_parallel_unshard
    refused("be as many as buffers, 1, got 2", unshard, None, [x], [1, 1], **value)
    given = (None, [x[:, : 4 - rank]], [1])
    refused("process 0 must have 3 of the 7 tokens", unshard, *given, **value)
    refused("length must be at least 0, got -1", token_positions, -1, **value)
    refused("length must be an int, got 'x'", token_positions, "x", error=TypeError)


def test_positions_of_other_processes():
    for order in ORDERS:
        for length in (0, 1, 5, 22):
            for world in (1, 2, 3):
                for rank in range(world):
                    got = ops.token_positions(length, rank, world, order)
                    assert torch.equal(got, rows_of(order, length, rank, world))
    with pytest.raises(ValueError, match="rank must be between 0 and 1, got 2"):
        ops.token_positions(4, 2, 2, "contiguous")
    with pytest.raises(ValueError, match="processes must be at least 1, got 0"):
        ops.token_positions(4, 0, 0, "contiguous")


# One process: calls within and without, and whether their graphs came from the disk.
PROCESS = """
import sys
import torch, multihead
import torch.distributed as dist
from torch._dynamo.utils import counters
from multihead.distributed import context_parallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.randn(1, 2, 5, 8)
attention = torch.compile(multihead.scaled_dot_product_attention)
for when in sys.argv[1:]:
    counters.clear()
    if when == "within":
        with context_parallel():
            attention(x, x, x)
    else:
        attention(x, x, x)
    print(when, counters["aot_autograd"]["autograd_cache_hit"])
dist.destroy_process_group()
"""


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", os.environ.get("CXX", "c++")))),
    reason="inductor needs a C++ compiler",
)
def test_graphs_on_disk_know_their_context(tmp_path):
    """What torch.compile has kept of a call from without is not taken within."""

    def run(*states):
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, *states],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]

    assert run("without", "within") == ["without 0", "within 0"]
    assert run("within", "without") == ["within 1", "without 1"]
