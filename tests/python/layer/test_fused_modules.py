# SPDX-License-Identifier: MIT
"""The fused path of the modules: which calls take it, and what they return.

Values are those of torch.nn.MultiheadAttention in float64.
"""

import copy
import dataclasses
import itertools
import os

import parity
import pytest
import torch
from error_budget import BUDGETS
from paths import fused_calls
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import multihead
from multihead import GroupedQueryAttention, MultiheadAttention

TESTS = 100 if os.environ.get("MULTIHEAD_LONG") else 10
PER_TEST = 30
E, H, G, B, L, S = 24, 6, 2, 3, 5, 7
ops = torch.ops.multihead
MODULES = {
    "packed": lambda **o: MultiheadAttention(E, H, **o),
    "separate": lambda **o: MultiheadAttention(E, H, kdim=E, vdim=E, **o),
    "appended": lambda **o: MultiheadAttention(
        E, H, add_bias_kv=True, add_zero_attn=True, **o
    ),
    "no bias": lambda **o: MultiheadAttention(E, H, bias=False, **o),
    "grouped": lambda **o: GroupedQueryAttention(E, H, G, **o),
    "grouped, head_dim": lambda **o: GroupedQueryAttention(E, H, G, head_dim=9, **o),
}
EACH_MODULE = pytest.mark.parametrize("module", MODULES)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def sequences(batch_first=False, dtype=torch.float32):
    shapes = ((B, L), (B, S)) if batch_first else ((L, B), (S, B))
    query, key = (torch.randn(*shape, E, dtype=dtype) for shape in shapes)
    return query, key, torch.randn_like(key)


# --- Which path ----------------------------------------------------------------------


@EACH_MODULE
@pytest.mark.parametrize("mode", ["auto", "fused", "exact"])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_backend_decides(module, training, batched, mode):
    module = MODULES[module](dropout=0.3).train(training)
    inputs = sequences()
    if not batched:
        inputs = [x[:, 0] for x in inputs]
    for weights, average in ((False, True), (True, True), (True, False)):
        options = dict(need_weights=weights, average_attn_weights=average)
        with torch.no_grad(), multihead.backend(mode):
            reached = fused_calls(module, *inputs, **options)
        expected = ["attention", "weights"] if weights else ["attention"]
        assert reached == ([] if mode == "exact" else expected)


@EACH_MODULE
def test_inference_without_a_gradient(module):
    """Modes and frozen parameters alike; self-attention in eval too, which
    PyTorch runs by a native function of its own."""
    module = MODULES[module](batch_first=True).eval()
    x = torch.randn(B, L, E)
    with torch.inference_mode():
        assert fused_calls(module, x, x, x) == ["attention", "weights"]
    module.requires_grad_(False)
    assert fused_calls(module, x, x, x) == ["attention", "weights"]


def functional_arguments(**changes):
    return (
        dict(
            embed_dim_to_check=E,
            num_heads=H,
            in_proj_weight=torch.randn(3 * E, E),
            in_proj_bias=torch.randn(3 * E),
            bias_k=None,
            bias_v=None,
            add_zero_attn=True,
            dropout_p=0.0,
            out_proj_weight=torch.randn(E, E),
            out_proj_bias=torch.randn(E),
        )
        | changes
    )


@pytest.mark.parametrize(
    "given", [("static_k",), ("static_v",), ("static_k", "static_v")]
)
def test_functional_with_static_keys(given):
    static = {name: torch.randn(B * H, S, E // H) for name in given}
    arguments = functional_arguments(**static)
    ours = multihead.multi_head_attention_forward
    inputs = sequences()
    assert fused_calls(ours, *inputs, **arguments) == ["attention", "weights"]
    theirs = F.multi_head_attention_forward(*inputs, **arguments)
    assert_close(ours(*inputs, **arguments), theirs)


# --- Values --------------------------------------------------------------------------


def as_double(x):
    return x.double() if x.is_floating_point() else x


def expected_of(module, inputs, masks):
    """Output and weights per head of torch.nn.MultiheadAttention in float64.

    Where that is NaN, because a row sees no key, those of our formula.
    """
    formula = copy.deepcopy(module).double()
    if isinstance(module, GroupedQueryAttention):
        module = module.to_multihead()
    theirs = nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        bias=module.in_proj_bias is not None,
        add_bias_kv=module.bias_k is not None,
        add_zero_attn=module.add_zero_attn,
        kdim=module.kdim,
        vdim=module.vdim,
        batch_first=module.batch_first,
        dtype=torch.float64,
    )
    theirs.load_state_dict(module.state_dict())
    inputs = [x.double() for x in inputs]
    masks = {name: as_double(mask) for name, mask in masks.items()}
    with torch.enable_grad():
        results = [
            call(*inputs, **masks, average_attn_weights=False)
            for call in (theirs, formula)
        ]
    return [torch.where(x.isnan(), y, x).detach() for x, y in zip(*results)]


def check(module, inputs, masks, options, expected):
    """Runs fused; the weights may be averaged, or not wanted."""
    with torch.no_grad(), multihead.backend("fused"):
        out, weights = module(*inputs, **masks, **options)
    dtype = out.dtype
    assert_close(out, expected[0].to(dtype))
    if not options["need_weights"]:
        assert weights is None
    elif options["average_attn_weights"]:
        assert_close(weights, expected[1].mean(-3).to(dtype))
    else:
        assert_close(weights, expected[1].to(dtype))


@pytest.mark.parametrize("number", range(TESTS))
def test_random_configurations(number):
    for seed in range(50_000 + number * PER_TEST, 50_000 + (number + 1) * PER_TEST):
        c = parity.draw(seed, (torch.float32, torch.float64))
        c = dataclasses.replace(c, grad=False, mask_grad=False, dropout=0.0)
        module = parity.make(MultiheadAttention, c)
        inputs, masks = parity.inputs(c)
        options = dict(need_weights=c.need_weights, average_attn_weights=c.average)
        try:
            expected = expected_of(module, inputs, masks)
            check(module, inputs, masks, options | dict(is_causal=c.hint), expected)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def mask_cases():
    """(attn_mask, key_padding_mask, is_causal) of every pair of kinds."""
    blocked, padded = torch.rand(B * H, L, S) < 0.3, torch.rand(B, S) < 0.3
    rows = torch.rand(L, S) < 0.3
    attn = [None, rows, torch.randn(L, S), blocked, torch.randn(B * H, L, S)]
    attn.append(torch.randn(B * H, L, S).masked_fill(blocked, -torch.inf))
    padding = [None, padded, torch.randn(B, S)]
    return itertools.product(attn, padding, (False, True))


# torch.nn.MultiheadAttention has no head_dim to compare with.
@pytest.mark.parametrize("module", [m for m in MODULES if "head_dim" not in m])
@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_of_every_kind(module, batch_first):
    """Bool and float ones, mixed, with is_causal on top: all of them apply."""
    module = MODULES[module](batch_first=batch_first)
    inputs = sequences(batch_first)
    future = torch.ones(L, S, dtype=torch.bool).triu(1)
    for attn_mask, padding, is_causal in mask_cases():
        masks = dict(attn_mask=attn_mask, key_padding_mask=padding)
        masks = {name: mask for name, mask in masks.items() if mask is not None}
        # PyTorch takes one mask, and both masks of one kind.
        merged = {n: additive(mask) for n, mask in masks.items()}
        if is_causal:
            merged["attn_mask"] = merged.get("attn_mask", 0) + additive(future)
        expected = expected_of(module, inputs, merged)
        for need_weights, average in ((True, False), (True, True), (False, True)):
            options = dict(need_weights=need_weights, average_attn_weights=average)
            check(module, inputs, masks, options | dict(is_causal=is_causal), expected)


def additive(mask):
    if mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


@pytest.mark.parametrize("module", ["packed", "grouped"])
@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.float32).min])
def test_low_finite_masks_do_not_block(module, low):
    """Where every key has the same, the weights are even, as PyTorch's are."""
    module = MODULES[module]()
    inputs = sequences()
    mask = torch.full((L, S), low)
    with torch.no_grad(), multihead.backend("fused"):
        out, weights = module(*inputs, attn_mask=mask)
    if isinstance(module, GroupedQueryAttention):
        module = module.to_multihead()
    theirs = nn.MultiheadAttention(E, H)
    theirs.load_state_dict(module.state_dict())
    assert_close((out, weights), theirs(*inputs, attn_mask=mask))
    assert_close(weights, torch.full_like(weights, 1 / S))


@DTYPES
@EACH_MODULE
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_query_that_sees_nothing(module, batch_first, dtype):
    module = MODULES[module](batch_first=batch_first, dtype=dtype)
    bias = module.out_proj.bias
    if bias is not None:
        nn.init.normal_(bias)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1] = True
    with torch.no_grad(), multihead.backend("fused"):
        out, weights = module(*sequences(batch_first, dtype), key_padding_mask=padding)
    rows = out[1] if batch_first else out[:, 1]
    assert out.isfinite().all() and weights.isfinite().all()
    if getattr(module, "add_zero_attn", False):
        assert (weights[1, :, :S] == 0).all()  # the appended keys are seen
        return
    assert (weights[1] == 0).all()
    assert (rows == (0 if bias is None else bias)).all()
    sums = weights[0].double().sum(-1)
    assert ((sums - 1).abs() <= BUDGETS[dtype].allowed(scale=1, largest=0)).all()


# --- The parts -----------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_is_three_operators(batch_first, dtype):
    """To the bit: one product, fused attention on views of it, one product."""
    mha = MultiheadAttention(E, H, batch_first=batch_first, dtype=dtype)
    x = sequences(batch_first, dtype)[0]
    with torch.no_grad():
        out, weights = mha(x, x, x, is_causal=True, average_attn_weights=False)
        packed = F.linear(x, mha.in_proj_weight, mha.in_proj_bias)
        q, k, v = (
            part.unflatten(-1, (H, E // H)).permute(
                *((0, 2, 1, 3) if batch_first else (1, 2, 0, 3))
            )
            for part in packed.chunk(3, -1)
        )
        rows, lse = ops.fused_attention(q, k, v, is_causal=True)
        merged = rows.permute(*((0, 2, 1, 3) if batch_first else (2, 0, 1, 3)))
        expected = F.linear(merged.flatten(2), mha.out_proj.weight, mha.out_proj.bias)
        assert torch.equal(out, expected)
        assert torch.equal(
            weights, ops.attention_weights(q, k, lse, False, is_causal=True)
        )
    # Views all the way: nothing is copied on the way in or out.
    assert q.data_ptr() == packed.data_ptr()
    assert merged.flatten(2).data_ptr() == rows.data_ptr()


@EACH_MODULE
@pytest.mark.parametrize("batch_first", [True, False])
def test_memory_of_results_is_that_of_the_formula(module, batch_first):
    module = MODULES[module](batch_first=batch_first)
    inputs = sequences(batch_first)
    for average in (True, False):
        formula = module(*inputs, average_attn_weights=average)
        with torch.no_grad():
            fused = module(*inputs, average_attn_weights=average)
        for ours, theirs in zip(fused, formula, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert ours.is_contiguous()
