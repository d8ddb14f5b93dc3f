# SPDX-License-Identifier: MIT
"""Derivatives of attention under auto, against differences: first, second, of weights.

gradcheck and gradgradcheck run everything twice and allow no difference between the
two. Second derivatives are compared along random directions (fast_mode), those of a few
calls number by number; of each option by itself in ops/test_operators.py. Dropout is drawn anew in each call, from the same seed.
"""

import calls
import pytest
import torch
from paths import fused_calls

import multihead

ops = torch.ops.multihead
DIFFERENTIABLE = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")


def any_of(*choices):
    return choices[int(torch.randint(len(choices), ()))]


def mask_of(sizes, wanted):
    """None, who may attend, or what is added; wanted: what is added, with −∞."""
    full = [any_of(1, n) for n in sizes[any_of(0, 1, 2) :]]
    if not wanted and any_of(True, False):
        return any_of(None, torch.rand(full) < 0.7)
    bias = torch.randn(full, dtype=torch.float64)
    return bias.masked_fill(torch.rand(full) < 0.2, -torch.inf)


def configuration(n):
    """(tensors, options) of call `n`: the six tensors that have gradients, by name,
    of which those in the binary digits of n require them."""
    torch.manual_seed(n)
    wanted = {name: bool(n >> i & 1) for i, name in enumerate(DIFFERENTIABLE)}
    b, g, group = any_of(1, 2), any_of(1, 2), any_of(1, 2)
    lq, lk, d, dv = (any_of(1, 2, 3) for _ in range(4))
    h = g * group
    shapes = {
        "query": (b, h, lq, d),
        "key": (b, g, lk, d),
        "value": (b, g, lk, dv),
        "alibi_slopes": any_of((h,), (b, h)),
        "sinks": (h,),
    }
    tensors = {
        name: torch.randn(shape, dtype=torch.float64)
        for name, shape in shapes.items()
        if name in DIFFERENTIABLE[:3] or wanted[name] or any_of(False, False, True)
    }
    mask = mask_of((b, h, lq, lk), wanted["attn_mask"])
    if mask is not None:
        tensors["attn_mask"] = mask
    for name, x in tensors.items():
        if wanted[name]:
            x.requires_grad_()
    options = dict(
        is_causal=any_of(False, True),
        causal_alignment=any_of("top_left", "bottom_right"),
        window=any_of(None, None, (1, 0), (0, -1)),
        key_lengths=any_of(None, torch.randint(lk + 1, (b,))),
        key_mask=any_of(None, None, torch.rand(b, lk) < 0.6),
        softcap=any_of(None, None, 1.5),
        scale=any_of(None, -0.7, 0.0),
        dropout_p=any_of(0.0, 0.4),
        enable_gqa=True,
    )
    if options["causal_alignment"] == "top_left":
        options["query_offset"] = any_of(None, torch.randint(-2, lk, (b,)))
    return tensors, options


def function_of(tensors, options, function=multihead.scaled_dot_product_attention):
    """(function of what requires a gradient, those tensors); logsumexp's −∞ is 0."""
    inputs = {name: x for name, x in tensors.items() if x.requires_grad}
    rest = {name: x for name, x in tensors.items() if not x.requires_grad}

    def call(*given):
        torch.default_generator.manual_seed(7)  # visits no devices: faster
        named = dict(zip(inputs, given, strict=True))
        out, lse = function(**named, **rest, **options, return_lse=True)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    return call, tuple(inputs.values())


@pytest.mark.parametrize("n", range(256))
def test_first_derivatives(n):
    """Every set of the six tensors, four times."""
    tensors, options = configuration(n)
    function, inputs = function_of(tensors, options)
    if not inputs:
        assert not any(x.requires_grad for x in function())
        return
    assert fused_calls(function, *inputs) == ["attention"]
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("n", range(63, 640, 12))
def test_second_derivatives(n):
    tensors, options = configuration(n)
    function, inputs = function_of(tensors, options)
    if inputs:
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize(
    "name", ["none", "slopes per batch", "sinks, blocked rows", "everything"]
)
def test_second_derivatives_number_by_number(name):
    function, inputs = calls.differentiable(name)
    assert torch.autograd.gradgradcheck(function, inputs)


# --- Returned weights ----------------------------------------------------------------


def weights_of(average):
    """Output and weights, as a function with scaled_dot_product_attention's names."""

    def function(query, key, value, return_lse, dropout_p, **options):
        state = torch.tensor([5, 6]) if dropout_p else None
        options |= dict(dropout_p=dropout_p, dropout_state=state)
        out, lse = ops.fused_attention(query, key, value, **options)
        weights = ops.attention_weights(query, key, lse, average, **options)
        return out, weights

    return function


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("n", range(63, 640, 24))
def test_derivatives_of_weights(n, average):
    tensors, options = configuration(n)
    function, inputs = function_of(tensors, options, weights_of(average))
    if inputs:
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_weights_of_another_logsumexp():
    """Of keys that are elsewhere, too: a variable of its own."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (3, 5))
    lse = torch.randn(2, 3, 3, dtype=torch.float64) + 4
    inputs = [x.requires_grad_() for x in (q, k, lse)]
    assert torch.autograd.gradcheck(
        lambda q, k, lse: ops.attention_weights(q, k, lse, False), inputs
    )


def test_inputs_that_depend_on_each_other():
    """A tensor that stands twice in a call, one that is made of another."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)

    def function(x):
        y = x * 2
        out, lse = ops.fused_attention(x, y, x)
        return out, ops.attention_weights(x, y, lse, True)

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)
