# SPDX-License-Identifier: MIT
"""The fused operators in graphs: torch.compile, torch.export, autocast, torch.func.

Graphs without a gradient hold the fused operators, and their values are those of
the same calls outside, to the bit.
"""

import io

import calls
import pytest
import torch
from equal import assert_equal
from error_budget import BUDGETS
from paths import fused_calls
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.testing import assert_close

import multihead

attention = multihead.scaled_dot_product_attention
ops = torch.ops.multihead
DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
LAYERS = {
    "multi-head": lambda **o: multihead.MultiheadAttention(8, 4, batch_first=True, **o),
    "grouped": lambda **o: multihead.GroupedQueryAttention(
        8, 4, 2, batch_first=True, **o
    ),
}
EACH_LAYER = pytest.mark.parametrize("layer", LAYERS)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    torch.manual_seed(0)


class Graphs:
    """A backend that runs graphs of ATen operations as they are, and keeps them."""

    def __init__(self):
        self.all = []
        self.backend = aot_autograd(fw_compiler=self._keep)

    def _keep(self, graph, example_inputs):
        self.all.append(graph)
        return make_boxed_func(graph.forward)

    def compile(self, function, dynamic=False):
        return torch.compile(
            function, fullgraph=True, dynamic=dynamic, backend=self.backend
        )

    @property
    def fused(self):
        """Of each graph, what it calls of ours."""
        return [operators_of(graph.graph) for graph in self.all]


def operators_of(graph):
    targets = (node.target for node in graph.nodes if node.op == "call_function")
    return [
        target._opname
        for target in targets
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "multihead"
    ]


# --- torch.compile -------------------------------------------------------------------


@DYNAMIC
@pytest.mark.parametrize("name", ["none", "decoding", "keep mask", "everything"])
def test_compiled_function(name, dynamic):
    graphs, (inputs, options) = Graphs(), calls.make(name, torch.float32)
    options["return_lse"] = True
    out, lse = graphs.compile(attention, dynamic)(*inputs, **options)
    assert graphs.fused == [["fused_attention"]]
    expected, expected_lse = attention(*inputs, **options)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert out.stride() == expected.stride()


@DYNAMIC
@EACH_LAYER
@pytest.mark.parametrize("need_weights", [False, True])
@torch.no_grad()
def test_compiled_layer(layer, need_weights, dynamic):
    graphs, module = Graphs(), LAYERS[layer](dropout=0.5).eval()
    compiled = graphs.compile(module, dynamic)
    x = torch.randn(2, 5, 8)
    options = dict(need_weights=need_weights, is_causal=True)
    out, weights = compiled(x, x, x, **options)
    fused = ["fused_attention"] + ["attention_weights"] * need_weights
    assert graphs.fused == [fused]
    expected, expected_weights = module(x, x, x, **options)
    assert torch.equal(out, expected)
    assert (weights is None) != need_weights
    if need_weights:
        assert torch.equal(weights, expected_weights)
    if dynamic:
        x = torch.randn(3, 9, 8)
        assert_close(compiled(x, x, x, **options), module(x, x, x, **options))
        assert len(graphs.all) == 1


def test_one_dynamic_graph_for_all_sizes():
    graphs = Graphs()
    compiled = graphs.compile(attention, dynamic=True)
    options = dict(window=(2, 0), enable_gqa=True)
    # Sizes that are equal in the first call would be taken for one size.
    for batch, queries, keys in ((3, 5, 7), (2, 9, 6), (5, 3, 3)):
        q, k = torch.randn(batch, 4, queries, 8), torch.randn(batch, 2, keys, 8)
        assert torch.equal(compiled(q, k, k, **options), attention(q, k, k, **options))
    assert graphs.fused == [["fused_attention"]]


def test_a_gradient_is_another_graph():
    graphs, q = Graphs(), torch.randn(2, 4, 5, 8)
    compiled = graphs.compile(lambda q: attention(q, q, q, is_causal=True))
    expected = compiled(q)
    wanted = q.clone().requires_grad_()
    out = compiled(wanted)
    assert_close(out, expected)
    out.sum().backward()
    assert wanted.grad.isfinite().all()
    backward = ["fused_attention_backward"]
    assert graphs.fused == [["fused_attention"], ["fused_attention"], backward]


@EACH_LAYER
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("with_weights", [False, True], ids=["out", "out and weights"])
def test_compiled_training(layer, p, with_weights):
    """Weights that no loss uses are computed in no graph."""
    module, x = LAYERS[layer](dropout=p), torch.randn(2, 5, 8, requires_grad=True)

    def loss(x):
        out, weights = module(x, x, x)
        return out.square().sum() + (weights.square().sum() if with_weights else 0)

    def gradients(function):
        torch.manual_seed(1)
        return torch.autograd.grad(function(x), [x, *module.parameters()])

    graphs = Graphs()
    # Traced, the definition repeats grouped keys: another order of sums.
    same = assert_close if with_weights else assert_equal
    same(gradients(graphs.compile(loss)), gradients(loss))
    forward, backward = graphs.fused
    # The definition takes what dropout did from weights of no scores.
    again = ["attention_weights"] if with_weights and p else []
    assert forward == ["fused_attention", *["attention_weights"] * with_weights]
    assert backward == [*again, "fused_attention_backward"]


@DYNAMIC
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_compiled_dropout_stays_random(mode, dynamic):
    q = torch.randn(2, 4, 5, 8)

    def drop(q):
        return attention(q, q, q, dropout_p=0.5)

    compiled = torch.compile(drop, fullgraph=True, dynamic=dynamic, backend=mode)
    torch.manual_seed(1)
    first, second = compiled(q), compiled(q)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(compiled(q), first) and torch.equal(compiled(q), second)
    torch.manual_seed(1)
    assert torch.equal(drop(q), first)


@EACH_LAYER
@torch.no_grad()
def test_compiled_training_layer_drops(layer):
    graphs, module = Graphs(), LAYERS[layer](dropout=0.5).train()
    compiled, x = graphs.compile(module), torch.randn(2, 5, 8)
    torch.manual_seed(1)
    results = compiled(x, x, x)
    assert graphs.fused == [["fused_attention", "attention_weights"]]
    torch.manual_seed(1)
    assert_equal(results, module(x, x, x))
    assert not torch.equal(compiled(x, x, x)[0], results[0])


# --- torch.export --------------------------------------------------------------------


class Causal(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.attention = LAYERS[layer](dropout=0.5).eval()

    def forward(self, x):
        return self.attention(x, x, x, is_causal=True)


@DYNAMIC
@EACH_LAYER
@torch.no_grad()
def test_exported_layer(layer, dynamic):
    module, example = Causal(layer), (torch.randn(2, 3, 8),)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    shapes = {"x": {0: batch, 1: length}} if dynamic else None
    program = torch.export.export(module, example, dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    lowered = program.run_decompositions()
    assert operators_of(lowered.graph) == ["fused_attention", "attention_weights"]
    for sizes in ((2, 3), (4, 7)) if dynamic else ((2, 3),):
        x = torch.randn(*sizes, 8)
        expected = module(x)
        for each in (program, loaded, lowered):
            run = each.module()
            assert fused_calls(run, x) == ["attention", "weights"]
            assert_equal(run(x), expected)


def test_exported_dropout_stays_random():
    class Dropping(nn.Module):
        def forward(self, q):
            return attention(q, q, q, dropout_p=0.5)

    q = torch.randn(2, 4, 5, 8)
    lowered = torch.export.export(Dropping(), (q,)).run_decompositions()
    run = lowered.module()
    torch.manual_seed(1)
    first, second = run(q), run(q)
    torch.manual_seed(1)
    assert torch.equal(run(q), first) and not torch.equal(first, second)


# --- Autocast ------------------------------------------------------------------------


AUTOCAST = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@AUTOCAST
@pytest.mark.parametrize("name", ["bias", "keep mask", "everything"])
def test_autocast_of_the_operators(name, dtype):
    """query, key and value are cast; masks, slopes, sinks and logsumexp are not."""
    (q, k, v), options = calls.make(name, torch.float32)
    low = [x.to(dtype) for x in (q, k, v)]
    expected, lse = ops.fused_attention(*low, **options)
    with torch.autocast("cpu", dtype):
        out, ours = ops.fused_attention(q, k, v, **options)
        assert fused_calls(attention, q, k, v, **options) == ["attention"]
        assert torch.equal(attention(q, k, v, **options), expected)
        weights = ops.attention_weights(q, k, lse, False, **options)
        summary = ops.fused_attention_summary(q, k, lse, 2, **options)
    assert out.dtype == dtype and ours.dtype == torch.float32
    assert torch.equal(out, expected) and torch.equal(ours, lse)
    assert torch.equal(weights, ops.attention_weights(*low[:2], lse, False, **options))
    expected = ops.fused_attention_summary(*low[:2], lse, 2, **options)
    assert_equal(summary, expected)


@AUTOCAST
def test_autocast_leaves_float64_alone(dtype):
    (q, k, v), options = calls.make("everything", torch.float64)
    expected = ops.fused_attention(q, k, v, **options)
    with torch.autocast("cpu", dtype):
        assert_equal(ops.fused_attention(q, k, v, **options), expected)
        assert attention(q, k, v, **options).dtype == torch.float64


@AUTOCAST
@EACH_LAYER
@torch.no_grad()
def test_autocast_of_layers(layer, dtype):
    module = LAYERS[layer]()
    x, mask = torch.randn(2, 5, 8), torch.randn(5, 5)
    theirs = nn.MultiheadAttention(8, 4, batch_first=True)
    with torch.autocast("cpu", dtype):
        assert fused_calls(module, x, x, x) == ["attention", "weights"]
        results = module(x, x, x, attn_mask=mask)
        assert [y.dtype for y in results] == [y.dtype for y in theirs(x, x, x)]
        double = LAYERS[layer]().double()(*[x.double()] * 3)
        assert [y.dtype for y in double] == [torch.float64] * 2
    low = module.to(dtype)(*[x.to(dtype)] * 3, attn_mask=mask)
    assert_equal(results, low)


# --- Without values, without history -------------------------------------------------


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
def test_meta_tensors(dtype, batched):
    q, k, v = (torch.randn(2, n, 5, w).to(dtype) for n, w in ((4, 8), (2, 8), (2, 6)))
    q, k, v = (x if batched else x[0] for x in (q, k, v))
    _, lse = ops.fused_attention(q, k, v, enable_gqa=True)
    for operator, leading in (
        (ops.fused_attention, (q, k, v)),
        (ops.attention_weights, (q, k, lse, True)),
        (ops.attention_weights, (q, k, lse, False)),
        (ops.fused_attention_summary, (q, k, lse, 3)),
    ):
        real = operator(*leading, enable_gqa=True)
        moved = [x.to("meta") if torch.is_tensor(x) else x for x in leading]
        meta = operator(*moved, enable_gqa=True)
        pairs = zip(*((x if isinstance(x, tuple) else (x,)) for x in (real, meta)))
        for a, b in pairs:
            assert b.is_meta
            assert (b.shape, b.dtype, b.stride()) == (a.shape, a.dtype, a.stride())


@EACH_LAYER
def test_inference_mode(layer):
    module, x = LAYERS[layer](), torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = module(x, x, x)
    with torch.inference_mode():
        results = module(x, x, x)
    assert all(y.is_inference() for y in results)
    assert_equal(results, expected)


# --- torch.func ----------------------------------------------------------------------


def transforms(function):
    """Calls of function(q) under a transform, and the same without."""
    q = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    step = torch.randn_like(q[0])
    with torch.no_grad():
        expected = torch.stack([function(x) for x in q])
        below, above = function(q[0] - 1e-6 * step), function(q[0] + 1e-6 * step)
    slope = (above - below) / 2e-6
    yield lambda: torch.vmap(function)(q), expected
    yield lambda: torch.func.jvp(function, (q[0],), (step,))[1], slope

    def along_step():
        return (torch.func.grad(lambda x: function(x).sum())(q[0]) * step).sum()

    yield along_step, slope.sum()


@pytest.mark.parametrize("options", [{}, dict(is_causal=True, softcap=2.0)], ids=str)
def test_transforms_take_the_formula(options):
    def function(q):
        return attention(q, q, q, **options)

    for call, expected in transforms(function):
        assert fused_calls(call) == []
        assert_close(call(), expected)
        with (
            multihead.backend("fused"),
            pytest.raises(RuntimeError, match="a transform of torch.func"),
        ):
            call()
