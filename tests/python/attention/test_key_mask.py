# SPDX-License-Identifier: MIT
"""key_mask: keys that nobody may attend to, beside a mask of another shape.

Its numbers are tested with all options mixed in test_definition.py and test_fused.py.
"""

import pytest
import torch
from error_budget import BUDGETS
from paths import fused_calls
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import multihead

attention = multihead.scaled_dot_product_attention
B, H, LQ, LK, D = 2, 4, 70, 300, 16
KINDS = {
    "random": lambda: torch.rand(B, LK) < 0.6,
    "padding": lambda: torch.arange(LK) < torch.tensor([[37], [LK]]),
    "left padding": lambda: torch.arange(LK) >= torch.tensor([[290], [5]]),
    "all": lambda: torch.ones(B, LK, dtype=torch.bool),
    "none in one row": lambda: torch.tensor([[False], [True]]).repeat(1, LK),
}
MASKS = {
    "alone": lambda: None,
    "keep": lambda: torch.rand(LQ, LK) < 0.7,
    "bias": lambda: torch.randn(LQ, LK),
    "bias per head": lambda: torch.randn(1, H, 1, LK),
    "bias, keys side by side": lambda: torch.randn(LK, LQ).t(),
}


def make(kind, mask, dtype=torch.float32):
    torch.manual_seed(len(kind) + len(mask))
    q = torch.randn(B, H, LQ, D, dtype=dtype)
    k, v = torch.randn(2, B, H, LK, D, dtype=dtype).unbind()
    return (q, k, v), KINDS[kind](), MASKS[mask]()


def merged(keys, mask):
    """Both as one mask."""
    keys = keys[:, None, None]
    if mask is None:
        return keys
    if mask.dtype == torch.bool:
        return mask & keys
    return mask.masked_fill(~keys, -torch.inf)


def results(inputs, mask, **options):
    """Output, logsumexp, gradients, weights and summary of the kernels."""
    ops = torch.ops.multihead
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out, lse = ops.fused_attention(q, k, v, mask, **options)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    q, k = q.detach(), k.detach()
    weights = ops.attention_weights(q, k, lse.detach(), False, mask, **options)
    summary = ops.fused_attention_summary(q, k, lse.detach(), 3, mask, **options)
    return [out, lse, *grads, weights, *summary]


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_one_mask(kind, mask, dtype):
    inputs, keys, beside = make(kind, mask, dtype)
    ours = results(inputs, beside, key_mask=keys)
    assert all(map(torch.equal, ours, results(inputs, merged(keys, beside))))
    strided = torch.stack([keys, ~keys], -1)[..., 0]
    assert all(map(torch.equal, ours, results(inputs, beside, key_mask=strided)))


@pytest.mark.parametrize("mask", MASKS)
def test_what_is_hidden_may_be_anything(mask):
    """NaN in keys, values and in the bias itself."""
    inputs, keys, beside = make("random", mask)
    keys[1] = keys[0]
    expected = results(inputs, beside, key_mask=keys)
    for x in inputs[1:]:
        x.masked_fill_(~keys[:, None, :, None], torch.nan)
    if beside is not None and beside.is_floating_point():
        beside = beside.masked_fill(~keys[0], torch.nan)
    assert all(map(torch.equal, results(inputs, beside, key_mask=keys), expected))


def test_the_gradient_of_the_bias():
    inputs, keys, bias = make("random", "bias", torch.float64)
    grads = []
    for mask in (bias.requires_grad_(), merged(keys, bias)):
        options = dict(key_mask=keys) if mask is bias else {}
        out = attention(*inputs, mask, **options)
        grads.append(torch.autograd.grad(out.square().sum(), bias)[0])
    assert_close(*grads)
    assert (grads[0][:, ~keys.any(0)] == 0).all()


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor holds that a call makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("grad", [False, True])
def test_padding_and_a_bias_stay_apart_in_modules(grad):
    """Nothing as large as (B, Lq, Lk) is formed, forward or backward."""
    torch.manual_seed(0)
    module = multihead.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(6, 40, 8, requires_grad=grad)
    padding, bias = torch.rand(6, 40) < 0.3, torch.randn(40, 40)
    options = dict(key_padding_mask=padding, attn_mask=bias, need_weights=False)

    def call():
        out, _ = module(x, x, x, **options)
        return out.square().sum().backward() if grad else out

    with Largest() as largest, torch.set_grad_enabled(grad):
        call()
    assert 0 < largest.numel < 6 * 40 * 40
    with torch.set_grad_enabled(grad):
        path = ["attention", "backward"] if grad else ["attention"]
        assert fused_calls(call) == path
    expected = merged(~padding, bias).expand(-1, 2, -1, -1).flatten(0, 1)
    ours, _ = module(x, x, x, **options)
    assert torch.equal(ours, module(x, x, x, attn_mask=expected, need_weights=False)[0])


@pytest.mark.parametrize("appended", ["add_zero_attn", "add_bias_kv"])
def test_padding_leaves_appended_keys_visible(appended):
    torch.manual_seed(0)
    ours = multihead.MultiheadAttention(8, 2, batch_first=True, **{appended: True})
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True, **{appended: True})
    theirs.load_state_dict(ours.state_dict())
    x, bias = torch.randn(3, 5, 8), torch.randn(5, 5)
    padding = torch.tensor([[False] * 5, [True] * 5, [False, True] * 2 + [True]])
    for mask in (None, bias, bias > 0):
        float_padding = torch.zeros(3, 5).masked_fill(padding, -torch.inf)
        same = mask is None or mask.dtype == torch.bool
        call = dict(attn_mask=mask, need_weights=False)
        expected, _ = theirs(
            x, x, x, **call, key_padding_mask=padding if same else float_padding
        )
        assert_close(ours(x, x, x, **call, key_padding_mask=padding)[0], expected)


def test_vmap_over_key_masks():
    inputs, keys, bias = make("random", "bias", torch.float64)

    def one(q, k, v, keys):
        return attention(q[None], k[None], v[None], bias, key_mask=keys[None])[0]

    mapped = torch.vmap(one)(*inputs, keys)
    assert_close(mapped, attention(*inputs, bias, key_mask=keys))


BAD = {
    "float": (torch.ones(2, 7), "key_mask must be bool, got Float"),
    "uint8": (torch.ones(2, 7).byte(), "key_mask must be bool, got Byte"),
    "another batch": (
        torch.ones(1, 7).bool(),
        r"key_mask must have the shape \(2, 7\), got \(1, 7\)",
    ),
    "another length": (torch.ones(2, 5).bool(), r"key_mask .* got \(2, 5\)"),
    "of scores": (torch.ones(2, 1, 1, 7).bool(), r"key_mask .* got \(2, 1, 1, 7\)"),
}


@pytest.mark.parametrize("mode", ["auto", "fused", "exact"])
@pytest.mark.parametrize("name", BAD)
def test_errors(name, mode):
    keys, text = BAD[name]
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
    with multihead.backend(mode):
        with pytest.raises(ValueError, match=text):
            attention(q, k, k, key_mask=keys)
        with pytest.raises(ValueError, match=text):
            multihead.attention_summary(q, k, 2, key_mask=keys)
