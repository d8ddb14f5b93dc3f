# SPDX-License-Identifier: MIT
"""Tensors whose memory is not what they mean: translated, PyTorch's, or refused."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from equal import assert_equal
from paths import fused_calls
from torch import nn
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing import assert_close

import multihead
from multihead import attention_summary, scaled_dot_product_attention

BACKENDS = ("auto", "exact", "fused")
BIASES = {
    "upper left": (causal_upper_left, 3, 5),
    "upper left, more queries": (causal_upper_left, 5, 3),
    "lower right": (causal_lower_right, 3, 5),
    "lower right, square": (causal_lower_right, 4, 4),
}


def case(name, *leading):
    """(query, key, the bias, the same as a bool mask: True = may attend)."""
    make, queries, keys = BIASES[name]
    torch.manual_seed(0)
    bias = make(queries, keys)
    offset = keys - queries if make is causal_lower_right else 0
    sees = torch.ones(queries, keys, dtype=torch.bool).tril(offset)
    leading = leading or (2, 4)
    return torch.randn(*leading, queries, 8), torch.randn(*leading, keys, 8), bias, sees


@pytest.mark.parametrize("mode", BACKENDS)
@pytest.mark.parametrize("name", BIASES)
def test_a_causal_bias_is_the_triangle_that_it_means(name, mode):
    q, k, bias, sees = case(name)
    expected = F.scaled_dot_product_attention(q, k, k, bias)
    assert_close(expected, F.scaled_dot_product_attention(q, k, k, sees))
    with multihead.backend(mode):
        out = scaled_dot_product_attention(q, k, k, bias)
        assert type(out) is torch.Tensor
        if mode == "exact":
            assert_equal(out, expected)
        assert_close(out, expected)


def test_a_causal_bias_runs_fused_without_a_mask():
    q, k, bias, _ = case("lower right")
    out = scaled_dot_product_attention(
        q, k, k, is_causal=True, causal_alignment="bottom_right"
    )
    assert_equal(scaled_dot_product_attention(q, k, k, bias), out)
    assert fused_calls(scaled_dot_product_attention, q, k, k, bias) == ["attention"]


BESIDE = {
    "alignment": dict(causal_alignment="bottom_right"),
    "sinks": dict(sinks=torch.tensor([0.1, 0.2, 0.3, 0.4])),
    "softcap": dict(softcap=2.0),
    "lse": dict(return_lse=True),
}


@pytest.mark.parametrize("mode", BACKENDS)
@pytest.mark.parametrize("option", BESIDE)
@pytest.mark.parametrize("name", ["upper left", "lower right"])
def test_a_causal_bias_beside_what_pytorch_lacks(name, option, mode):
    """What depends on positions is in test_causal_bias.py."""
    q, k, bias, sees = case(name)
    with multihead.backend(mode):
        assert_close(
            scaled_dot_product_attention(q, k, k, bias, **BESIDE[option]),
            scaled_dot_product_attention(q, k, k, sees, **BESIDE[option]),
        )


@pytest.mark.parametrize("shapes", ["five dimensions", "broadcast query"])
def test_a_causal_bias_where_pytorch_runs(shapes):
    q, k, bias, _ = case("lower right", *((1, 2, 4) if shapes[0] == "f" else ()))
    q = q if shapes[0] == "f" else q[:1]
    assert_close(
        scaled_dot_product_attention(q, k, k, bias),
        F.scaled_dot_product_attention(q, k, k, bias),
    )


@pytest.mark.parametrize("name", BIASES)
def test_a_causal_bias_of_a_summary_and_of_layers(name):
    q, k, bias, sees = case(name)
    assert_equal(attention_summary(q, k, 2, bias), attention_summary(q, k, 2, sees))
    x, y = q[:, 0], k[:, 0]
    for mode, layer in itertools.product(
        BACKENDS,
        (
            multihead.MultiheadAttention(8, 2, batch_first=True),
            multihead.GroupedQueryAttention(8, 2, 1, batch_first=True),
        ),
    ):
        with multihead.backend(mode):
            assert_equal(
                layer(x, y, y, attn_mask=bias), layer(x, y, y, attn_mask=~sees)
            )
    mha = multihead.MultiheadAttention(8, 2)
    arguments = [mha.in_proj_weight, mha.in_proj_bias, None, None, False, 0.0]
    arguments += [mha.out_proj.weight, mha.out_proj.bias]
    forward = multihead.multi_head_attention_forward
    x, y = x.transpose(0, 1), y.transpose(0, 1)
    assert_equal(
        forward(x, y, y, 8, 2, *arguments, attn_mask=bias),
        forward(x, y, y, 8, 2, *arguments, attn_mask=~sees),
    )


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("name", BIASES)
def test_a_causal_bias_in_a_compiled_graph(name, fullgraph):
    q, k, bias, sees = case(name)

    def function(q, k, bias):
        return scaled_dot_product_attention(q, k, k, bias)

    compiled = torch.compile(function, fullgraph=fullgraph, backend="aot_eager")
    assert_close(compiled(q, k, bias), function(q, k, sees))


def test_errors_of_a_causal_bias():
    q, k, bias, _ = case("lower right")
    layer = multihead.MultiheadAttention(8, 4, batch_first=True)
    x, y = q[:, 0], k[:, 0]
    both = (
        "CausalBias should not be used with causal=True: "  # PyTorch's words
        "is_causal must be False with a CausalBias as attn_mask, got True"
    )
    for call, error, text in (
        (
            lambda: scaled_dot_product_attention(q, k, k, bias, is_causal=True),
            ValueError,
            f"^scaled_dot_product_attention: {both}",
        ),
        (
            lambda: attention_summary(q, k, 1, bias, is_causal=True),
            ValueError,
            f"^attention_summary: {both}",
        ),
        (
            lambda: layer(x, y, y, attn_mask=bias, is_causal=True),
            ValueError,
            f"^MultiheadAttention: {both}",
        ),
        (
            lambda: scaled_dot_product_attention(q, k, k, causal_lower_right(4, 4)),
            ValueError,
            r"attn_mask must be a CausalBias of the lengths of query and key, "
            r"\(3, 5\), got \(4, 4\)",
        ),
        (
            lambda: layer(x, y, y, attn_mask=causal_upper_left(4, 4)),
            RuntimeError,
            r"2D attn_mask is \(4, 4\), but should be \(3, 5\)",
        ),
    ):
        with pytest.raises(error, match=text):
            call()
    with multihead.backend("exact"), pytest.raises(ValueError, match="CausalBias"):
        scaled_dot_product_attention(q, k, k, bias, is_causal=True)


@pytest.mark.parametrize("mode", BACKENDS)
@pytest.mark.parametrize("name", BIASES)
def test_a_causal_bias_where_ours_stands_under_pytorchs_name(monkeypatch, name, mode):
    """PyTorch's class knows its function by that name alone."""
    q, k, bias, _ = case(name)
    expected = F.scaled_dot_product_attention(q, k, k, bias)
    monkeypatch.setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)
    with multihead.backend(mode):
        ours = F.scaled_dot_product_attention(q, k, k, bias)
    if mode == "exact":
        assert torch.equal(ours, expected)
    assert_close(ours, expected)


# --- Nested tensors ------------------------------------------------------------------

NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def nested(layout):
    parts = [torch.randn(length, 4, 8) for length in (5, 3)]
    if layout == torch.strided:
        parts = [x.transpose(0, 1).contiguous() for x in parts]
        return torch.nested.nested_tensor(parts)
    return torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)


@NESTED
@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_attended_by_pytorch(layout, mode):
    x = nested(layout)
    with multihead.backend(mode):
        out = scaled_dot_product_attention(x, x, x)
    expected = F.scaled_dot_product_attention(x, x, x)
    assert out.is_nested and out.layout == layout
    assert_equal(list(out.unbind()), list(expected.unbind()))
    assert "nested" in multihead.route(x, x, x).reason.lower()


@NESTED
def test_a_layer_refuses_nested_tensors_where_it_shall_run_fused():
    mha = multihead.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.nested.nested_tensor([torch.randn(n, 8) for n in (2, 4)])
    with multihead.backend("fused"), pytest.raises(RuntimeError, match="is nested"):
        mha(x, x, x, need_weights=False)


@NESTED
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_where_pytorch_lacks_the_call(layout):
    x = nested(layout)
    refused = (RuntimeError, TypeError)
    with pytest.raises(refused, match="must be (a dense tensor|plain ones) w.* got "):
        scaled_dot_product_attention(x, x, x, window=(1, 1))
    with multihead.backend("fused"), pytest.raises(RuntimeError, match="cannot run"):
        scaled_dot_product_attention(x, x, x)


@NESTED
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_grouped_layer_refuses_nested_tensors(layout):
    gqa = multihead.GroupedQueryAttention(8, 2, 1, batch_first=True)
    parts = [torch.randn(n, 8) for n in (2, 4)]
    x, y = torch.nested.nested_tensor(parts, layout=layout), torch.randn(2, 3, 8)
    text = "^GroupedQueryAttention: {} must be a dense tensor, got a nested one"
    with pytest.raises(TypeError, match=text.format("query")):
        gqa(x, x, x)
    with pytest.raises(TypeError, match=text.format("value")):
        gqa(y, y, x)


# --- Other classes -------------------------------------------------------------------


class Annotated(torch.Tensor):
    """Adds attributes, and nothing else."""


class Peculiar(torch.Tensor):
    """Holds garbage, and gives PyTorch's function a meaning of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return "as PyTorch"
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_that_adds_attributes_is_computed():
    q = torch.randn(2, 4, 3, 8)
    x = q.as_subclass(Annotated)
    for options in ({}, dict(window=(1, 0))):
        out = scaled_dot_product_attention(x, x, x, **options)
        assert_equal(
            out.as_subclass(torch.Tensor),
            scaled_dot_product_attention(q, q, q, **options),
        )
    assert multihead.route(x, x, x) == ("fused", "")
    out = scaled_dot_product_attention(nn.Parameter(q), nn.Buffer(q), q)
    assert_equal(out, scaled_dot_product_attention(q, q, q))


def test_a_class_with_rules_of_its_own_is_pytorchs():
    q, own = torch.randn(2, 4, 3, 8), torch.randn(3, 3).as_subclass(Peculiar)
    for mode in ("auto", "exact"):
        with multihead.backend(mode):
            assert scaled_dot_product_attention(q, q, q, own) == "as PyTorch"
            assert scaled_dot_product_attention(q, q, q, attn_mask=own) == "as PyTorch"
    reason = "attn_mask, a .*Peculiar, which has rules of its own"
    with multihead.backend("fused"), pytest.raises(RuntimeError, match=reason):
        scaled_dot_product_attention(q, q, q, own)
    with pytest.raises(TypeError, match=f"plain ones with window, got {reason}"):
        scaled_dot_product_attention(q, q, q, own, window=(1, 1))
    with pytest.raises(TypeError, match=f"tensors must be plain ones, got {reason}"):
        attention_summary(q, q, 1, own)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked_tensors_are_refused_as_pytorch_refuses_them():
    q, mask = torch.randn(2, 4, 3, 8), torch.rand(3, 3)
    mask = masked_tensor(mask, mask > 0.5)
    for function in (F.scaled_dot_product_attention, scaled_dot_product_attention):
        with pytest.raises(TypeError, match="MaskedTensor"):
            function(q, q, q, mask)


def test_a_layer_leaves_other_classes_to_pytorch():
    x, mask = torch.randn(2, 3, 8), torch.zeros(3, 3).as_subclass(Peculiar)
    ours = multihead.MultiheadAttention(8, 2, batch_first=True)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    assert fused_calls(ours, x, x, x, attn_mask=mask) == []
    assert_equal(ours(x, x, x, attn_mask=mask), theirs(x, x, x, attn_mask=mask))
    with multihead.backend("fused"), pytest.raises(RuntimeError, match="Peculiar"):
        ours(x, x, x, attn_mask=mask)


def test_a_grouped_layer_refuses_other_classes():
    """PyTorch has no such layer."""
    x, mask = torch.randn(2, 3, 8), torch.zeros(3, 3).as_subclass(Peculiar)
    gqa = multihead.GroupedQueryAttention(8, 2, 1, batch_first=True)
    text = "^GroupedQueryAttention: tensors must be plain ones, got attn_mask, a .*Pec"
    with pytest.raises(TypeError, match=text):
        gqa(x, x, x, attn_mask=mask)
    x = x.as_subclass(Peculiar)
    with pytest.raises(TypeError, match="got query, a .*Peculiar"):
        gqa(x, x, x)


def test_dtensors():
    pytest.importorskip("torch.distributed.tensor", reason="built without distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=2
    )
    try:
        mesh, q = init_device_mesh("cpu", (2,)), torch.randn(2, 4, 3, 8)
        x = DTensor.from_local(q, mesh, [Replicate()], run_check=False)
        out = scaled_dot_product_attention(x, x, x)
        assert type(out) is DTensor
        assert_close(out.to_local(), scaled_dot_product_attention(q, q, q))
        out = scaled_dot_product_attention(x, x, x, window=(1, 1))
        plain = scaled_dot_product_attention(q, q, q, window=(1, 1))
        assert_close(out.to_local(), plain, rtol=0, atol=0)
    finally:
        torch.distributed.destroy_process_group()
