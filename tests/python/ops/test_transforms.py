# SPDX-License-Identifier: MIT
"""torch.compile, torch.export and torch.func see through the operators."""

import contextvars
import functools
import warnings

import calls
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import multihead

attention = multihead.scaled_dot_product_attention
MODES = pytest.mark.parametrize("mode", ["auto", "exact"])
DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
LAYERS = {
    "multi-head": lambda: multihead.MultiheadAttention(8, 4, batch_first=True),
    "grouped": lambda: multihead.GroupedQueryAttention(8, 4, 2, batch_first=True),
}
EACH_LAYER = pytest.mark.parametrize("layer", LAYERS)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    torch.manual_seed(0)


def layer_call(module, x, blocked):
    return module(x, x, x, attn_mask=blocked, average_attn_weights=False)


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def with_gradients(function, tensors):
    """Results, and gradients of the sum of their squares."""
    results = function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(x.square().sum() for x in results)
    return results, torch.autograd.grad(loss, tensors)


# --- torch.compile -------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, dynamic",
    [("none", True), ("decoding", True), ("everything", False)],
)
def test_compiled_function(name, dynamic):
    function, tensors = calls.differentiable(name)
    compiled = torch.compile(
        function, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    assert_close(with_gradients(compiled, tensors), with_gradients(function, tensors))


@MODES
@DYNAMIC
@EACH_LAYER
def test_compiled_layer(layer, dynamic, mode):
    module = LAYERS[layer]().double()
    compiled = torch.compile(
        module, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    with multihead.backend(mode):
        for length in (3, 5):
            x = torch.randn(2, length, 8, dtype=torch.float64, requires_grad=True)
            blocked = causal(length)
            assert_close(
                with_gradients(lambda x: layer_call(compiled, x, blocked), (x,)),
                with_gradients(lambda x: layer_call(module, x, blocked), (x,)),
            )


@pytest.mark.skipif(
    " " in torch.__file__,
    reason="inductor cannot link where the path of PyTorch itself has a space",
)
def test_inductor():
    inputs, options = calls.make("decoding", torch.float32)
    compiled = torch.compile(attention, fullgraph=True)
    assert_close(compiled(*inputs, **options), attention(*inputs, **options))


def test_dynamic_graph_serves_other_sizes():
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=graphs)
    options = dict(is_causal=True, window=(2, 0), return_lse=True)
    counts = set()
    for batch, length in ((2, 3), (3, 7), (5, 4)):
        q = torch.randn(batch, 4, length, 8)
        assert_close(compiled(q, q, q, **options), attention(q, q, q, **options))
        counts.add(graphs.frame_count)
    assert len(counts) == 1


def test_another_backend_is_another_graph():
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(attention, fullgraph=True, backend=graphs)
    q = torch.randn(2, 4, 3, 8)
    blocked = torch.zeros(3, 3, dtype=torch.bool)
    expected = {}
    for mode in ("auto", "exact", "auto", "exact"):
        with multihead.backend(mode):
            expected[mode] = attention(q, q, q, blocked)
            out = compiled(q, q, q, blocked)
            assert torch.equal(out, expected[mode])
    assert graphs.frame_count == 2
    with multihead.backend("fused"):
        assert torch.equal(compiled(q, q, q, blocked), expected["auto"])
        assert graphs.frame_count == 3
        with pytest.raises(Exception, match="cannot run this call: query, key and"):
            compiled(q[:1], q, q, blocked)


def test_backend_block_inside_a_graph():
    q = torch.randn(2, 4, 3, 8)

    def exactly(q):
        with multihead.backend("exact"):
            return attention(q, q, q)

    compiled = torch.compile(exactly, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q), exactly(q))
    assert torch.equal(exactly(q), nn.functional.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mode, error", [("auto", ValueError), ("exact", RuntimeError)])
def test_key_lengths_are_checked_inside_a_graph(mode, error, grad):
    """By the fused operator when it runs, by an assertion in the formula's graph."""
    q = torch.randn(2, 4, 3, 8, requires_grad=grad)
    compiled = torch.compile(
        lambda lengths: attention(q, q, q, key_lengths=lengths),
        fullgraph=True,
        backend="aot_eager",
    )
    lengths = torch.tensor([1, 3])
    with multihead.backend(mode):
        assert_close(compiled(lengths), attention(q, q, q, key_lengths=lengths))
        for wrong in ([1, 4], [-1, 3]):
            with pytest.raises(error, match="key_lengths must be between 0 and"):
                compiled(torch.tensor(wrong))


# --- torch.export --------------------------------------------------------------------


@MODES
@EACH_LAYER
def test_exported_layer(layer, mode):
    """One program for every batch size and length."""
    module = LAYERS[layer]().eval()

    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self, x):
            return self.attention(x, x, x, is_causal=True)

    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    with multihead.backend(mode):
        static = torch.export.export(Causal(), (torch.randn(2, 3, 8),))
        program = torch.export.export(
            Causal(),
            (torch.randn(2, 3, 8),),
            dynamic_shapes={"x": {0: batch, 1: length}},
        )
        x = torch.randn(2, 3, 8)
        assert_close(static.module()(x), Causal()(x))
        for sizes in ((2, 3), (4, 7)):
            x = torch.randn(*sizes, 8)
            assert_close(program.module()(x), Causal()(x))


def test_exported_function():
    class Decoding(nn.Module):
        def forward(self, query, key, lengths):
            return attention(
                query,
                key,
                key,
                is_causal=True,
                causal_alignment="bottom_right",
                key_lengths=lengths,
            )

    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    example = (torch.randn(2, 4, 1, 8), torch.randn(2, 4, 6, 8), torch.tensor([3, 6]))
    shapes = {"query": {0: batch}, "key": {0: batch, 2: length}, "lengths": {0: batch}}
    program = torch.export.export(Decoding(), example, dynamic_shapes=shapes).module()
    for size, keys in ((2, 6), (3, 11)):
        inputs = (
            torch.randn(size, 4, 1, 8),
            torch.randn(size, 4, keys, 8),
            torch.randint(1, keys, (size,)),
        )
        assert_close(program(*inputs), Decoding()(*inputs))
    with pytest.raises(ValueError, match="key_lengths must be between 0 and 11"):
        program(*inputs[:2], torch.full((3,), 12))


# --- torch.func ----------------------------------------------------------------------


def vmap(function, **options):
    """torch.vmap in which a fallback to a loop, of which PyTorch warns, is an error.
    That the weights are formed is said once per process, perhaps here."""
    mapped = torch.vmap(function, **options)

    @functools.wraps(function)
    def silently(*tensors):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".*forms all attention weights")
            return mapped(*tensors)

    return silently


@MODES
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(is_causal=True),
        dict(attn_mask=causal(3).logical_not()),
        dict(softcap=2.0, window=(1, 0), sinks=torch.ones(4), return_lse=True),
        dict(key_lengths=torch.tensor([2])),
    ],
    ids=lambda options: ", ".join(options) or "none",
)
def test_vmap_of_the_function(options, mode):
    q, k, v = torch.randn(3, 2, 4, 3, 8, dtype=torch.float64).unbind()
    if "key_lengths" in options:
        whole = options | dict(key_lengths=torch.tensor([2, 2]))
    else:
        whole = options
    with multihead.backend(mode):
        mapped = vmap(lambda *x: attention(*x, **options))(q, k, v)
        assert_close(mapped, attention(q, k, v, **whole))


@MODES
@EACH_LAYER
@pytest.mark.parametrize("need_weights", [False, True])
def test_vmap_of_layers(layer, need_weights, mode):
    """Each element of the mapped dimension is an unbatched call."""
    module = LAYERS[layer]().double()
    x = torch.randn(3, 4, 8, dtype=torch.float64)

    def one(x):
        out, weights = module(x, x, x, need_weights=need_weights, is_causal=True)
        return (out, weights) if need_weights else out

    with multihead.backend(mode):
        assert_close(vmap(one)(x), one(x))


def test_gradients_per_sample():
    """vmap of grad, over a module's parameters."""
    module = LAYERS["grouped"]().double()
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(3, 4, 8, dtype=torch.float64)

    def loss(parameters, x):
        out, _ = torch.func.functional_call(
            module, parameters, (x, x, x), dict(need_weights=False, is_causal=True)
        )
        return out.square().sum()

    grads = vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        expected = torch.func.grad(loss)(parameters, sample)
        assert_close({name: grad[i] for name, grad in grads.items()}, expected)


def test_forward_mode_and_hessian():
    function, (q, k, v) = calls.differentiable("causal")
    q, k, v = (x.detach() for x in (q, k, v))

    def loss(q):
        return function(q, k, v).square().sum()

    tangent = torch.randn_like(q)
    _, slope = torch.func.jvp(loss, (q,), (tangent,))
    assert_close(slope, (torch.func.grad(loss)(q) * tangent).sum())
    small = q[:1, :1, :2]

    def tiny(q):
        return function(q, k[:1, :1], v[:1, :1]).square().sum()

    expected = torch.autograd.functional.hessian(tiny, small)
    assert_close(torch.func.hessian(tiny)(small), expected)


def test_vmap_over_key_lengths():
    q, lengths = torch.randn(3, 1, 2, 4, 8), torch.tensor([[1], [2], [4]])

    def one(q, n):
        return multihead.scaled_dot_product_attention(q, q, q, key_lengths=n)

    expected = torch.stack([one(x, n) for x, n in zip(q, lengths, strict=True)])
    assert_close(torch.func.vmap(one)(q, lengths), expected)
    with pytest.raises(ValueError, match="key_lengths must be between 0 and 4, got 5"):
        torch.func.vmap(one)(q, torch.tensor([[1], [5], [4]]))


def test_make_fx_traces_a_masked_call():
    q, keep = torch.randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril()

    def masked(q):
        return multihead.scaled_dot_product_attention(q, q, q, attn_mask=keep)

    graph = torch.fx.experimental.proxy_tensor.make_fx(masked)(q)
    assert_close(graph(q + 1), masked(q + 1))


def test_open_blocks_are_left_in_any_order():
    """Two threads' blocks overlap; nothing stays behind for compiled code."""
    from multihead import functional

    first, second = multihead.backend("exact"), multihead.backend("auto")
    context = contextvars.copy_context()
    context.run(first.__enter__)
    second.__enter__()
    context.run(first.__exit__, None, None, None)
    assert functional._open_blocks == ["auto"]
    second.__exit__(None, None, None)
    assert functional._open_blocks == []
