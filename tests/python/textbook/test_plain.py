# SPDX-License-Identifier: MIT
"""The plain forms of examples/learn/attention.py: near the exact forms and PyTorch.

They are other operations in another order, so bits differ; TOLERANCE is what is promised
where PyTorch itself changes bits.
"""

import ast
import contextlib
import functools
import importlib.util
import pathlib
import types

import pytest
import torch
from test_textbook import TOLERANCE, copy_weights, redraw, reference, seed_all
from torch import nn

from multihead import textbook

ROOT = pathlib.Path(__file__).resolve().parents[3]
FILE = ROOT / "examples/learn/attention.py"
SEEDS = 50
# N, H, Lq, Lk, d: sizes that differ, and N = H.
SHAPES = [(3, 2, 4, 4, 4), (2, 4, 5, 7, 3), (2, 2, 3, 6, 8), (1, 8, 1, 9, 2)]


def plain_forms():
    spec = importlib.util.spec_from_file_location("plain_attention", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plain = plain_forms()


def close(ours, expected):
    kind = TOLERANCE[expected.dtype]
    return torch.allclose(ours, expected, **kind, equal_nan=True)


@contextlib.contextmanager
def given(weights):
    """The layers that a plain form makes get these matrices, in this order."""
    left = list(weights)

    def linear(*sizes, bias):
        layer = nn.Linear(*sizes, bias=bias, device="meta")
        assert layer.weight.shape == left[0].shape
        del layer.weight  # a parameter; what takes its place may be a part of one
        layer.weight = left.pop(0)
        return layer

    plain.nn, usual = types.SimpleNamespace(Linear=linear), plain.nn
    try:
        yield
    finally:
        plain.nn = usual
    assert left == []


def masks(shape):
    """By name; some block all keys of a query. True = blocked."""
    batch, heads, queries, keys, _ = shape
    found = {
        "none": None,
        "causal": torch.ones(queries, keys, dtype=torch.bool).triu(1),
        "item": torch.rand(batch, queries, keys) < 0.4,
        "padding": torch.rand(batch, 1, 1, keys) < 0.4,
        "head": torch.rand(batch, heads, queries, keys) < 0.4,
    }
    numbers = (torch.rand(queries, keys) < 0.4).float()
    return found | {"0 and 1": numbers, "integers": numbers.long()}


def drawn(shape, dtype):
    batch, heads, queries, keys, d = shape
    q = torch.randn(batch, queries, heads * d, dtype=dtype)
    k, v = torch.randn(2, batch, keys, heads * d, dtype=dtype)
    return q, k, v


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scaled_dot_product_attention(shape, dtype):
    for seed in range(SEEDS):
        seed_all(seed)
        batch, heads, queries, keys, d = shape
        q = torch.randn(batch, heads, queries, d, dtype=dtype)
        k, v = torch.randn(2, batch, heads, keys, d, dtype=dtype)
        for name, mask in masks(shape).items():
            mask = plain.per_head(mask)
            ours = plain.scaled_dot_product_attention(q, k, v, mask)
            exact = textbook.scaled_dot_product_attention(q, k, v, mask)
            assert all(map(close, ours, exact)), (seed, name)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_multi_head_attention(shape, dtype):
    _, heads, _, _, d = shape
    width = heads * d
    module = nn.MultiheadAttention(
        width, heads, bias=False, batch_first=True, dtype=dtype
    )
    for seed in range(SEEDS):
        seed_all(seed)
        redraw(module)
        weights = [*module.in_proj_weight.chunk(3), module.out_proj.weight]
        q, k, v = drawn(shape, dtype)
        for name, mask in masks(shape).items():
            with given(weights):
                ours = plain.multi_head_attention(q, k, v, heads, width, mask)
            exact = textbook.multi_head_attention(
                q, k, v, heads, width, mask, weights=weights
            )
            assert close(ours, exact), (seed, name)
            if name in ("none", "causal"):
                assert close(ours, module(q, k, v, attn_mask=mask)[0]), (seed, name)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_query_attention(shape, dtype):
    batch, heads, _, _, d = shape
    width = heads * d
    for seed in range(SEEDS):
        seed_all(seed)
        q, k, v = drawn(shape, dtype)
        for groups in (1, heads // 2, heads):
            rows = (width, groups * d, groups * d, width)
            weights = [torch.rand(r, width, dtype=dtype) / 5 - 0.1 for r in rows]
            for name, mask in masks(shape).items():
                with given(weights):
                    ours = plain.grouped_query_attention(
                        q, k, v, groups, width, mask, heads
                    )
                exact = textbook.grouped_query_attention(
                    q, k, v, groups, width, mask, num_heads=heads, weights=weights
                )
                assert close(ours, exact), (seed, groups, name)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_module(shape, dtype):
    _, heads, _, _, d = shape
    width = heads * d
    module = reference(width, heads, dtype)
    ours = plain.MultiHeadAttention(width, heads).to(dtype)
    exact = textbook.MultiHeadAttention(width, heads).to(dtype)
    for seed in range(SEEDS):
        seed_all(seed)
        redraw(module)
        copy_weights(ours, module)
        copy_weights(exact, module)
        q, k, v = drawn(shape, dtype)
        for name, blocked in masks(shape).items():
            keep = None if blocked is None else blocked == 0
            assert close(ours(q, k, v, keep), exact(q, k, v, keep)), (seed, name)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_module_of_one_sequence(dtype):
    module = reference(48, 8, dtype, dropout=0.1)
    ours = plain.MultiHeadSelfAttention(48, 8, dropout=0.1).to(dtype)
    for seed in range(SEEDS):
        seed_all(seed)
        redraw(module)
        layers = [layer for layer in ours.children() if isinstance(layer, nn.Linear)]
        copy_weights(nn.ModuleList(layers), module)
        x = torch.randn(3, 7, 48, dtype=dtype)
        for training in (True, False):
            ours.train(training), module.train(training)
            seed_all(seed)
            result = ours(x)
            seed_all(seed)
            assert close(result, module(x, x, x)[0]), (seed, training)


@pytest.mark.parametrize("form", ["multi_head_attention", "MultiHeadAttention"])
def test_gradients(form):
    """In float64, of the inputs and of the weights; rows that see nothing included in the
    module, whose gradients stay finite."""
    seed_all(0)
    shape = (2, 4, 5, 7, 3)
    module = reference(12, 4, torch.float64, bias=form == "MultiHeadAttention")
    q, k, v = (x.requires_grad_() for x in drawn(shape, torch.float64))
    gradients = []
    for forms in (plain, textbook):
        if form == "MultiHeadAttention":
            layer = getattr(forms, form)(12, 4).double()
            copy_weights(layer, module)
            leaves = [q, k, v, *layer.parameters()]
            mask = torch.ones(5, 7).tril(2)
            mask[1] = 0
            result = layer(q, k, v, mask)
        else:
            weights = [*module.in_proj_weight.chunk(3), module.out_proj.weight]
            leaves = [q, k, v, *module.parameters()]
            mask = torch.ones(5, 7, dtype=torch.bool).triu(2)
            call = functools.partial(getattr(forms, form), q, k, v, 4, 12, mask)
            if forms is textbook:
                result = call(weights=weights)
            else:
                with given(weights):
                    result = call()
        gradients.append(torch.autograd.grad(result.square().sum(), leaves))
    assert all(g.isfinite().all() for g in gradients[0])
    assert all(map(close, *gradients))


def test_layers_are_made_anew():
    q, k, v = torch.randn(3, 2, 5, 12)
    for call in (plain.multi_head_attention, plain.grouped_query_attention):
        torch.manual_seed(0)
        first = call(q, k, v, 4, 12)
        assert first.shape == q.shape
        assert not torch.equal(first, call(q, k, v, 4, 12))
        torch.manual_seed(0)
        assert torch.equal(first, call(q, k, v, 4, 12))
    assert plain.grouped_query_attention(q, k, v, 2, 12, num_heads=4).shape == q.shape


def test_the_wrong_view_of_the_figure_is_wrong():
    """What docs/learn.md warns of: the same shape, other numbers."""
    x = torch.randn(1, 4, 6)
    heads = plain.split_heads(x, 2)
    assert torch.equal(heads[0, 1], x[0, :, 3:])
    wrong = x.view(1, 2, 4, 3)
    assert wrong.shape == heads.shape and not torch.equal(wrong, heads)
    assert torch.equal(plain.combine_heads(heads), x)


def test_each_form_is_short():
    """A body has a dozen lines at most, and nothing but PyTorch is imported."""
    tree = ast.parse(FILE.read_text())
    bodies = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    lines = {
        n.name: n.end_lineno - n.body[0].lineno + (ast.get_docstring(n) is None)
        for n in bodies
    }
    assert max(lines.values()) <= 13, lines
    imports = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {a.name for n in imports for a in n.names}
    assert names == {"math", "torch", "nn"}
