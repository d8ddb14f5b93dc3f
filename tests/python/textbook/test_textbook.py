# SPDX-License-Identifier: MIT
"""The textbook forms against torch.nn.MultiheadAttention with the same weights.

`torch.equal` wherever PyTorch is on its ordinary path; TOLERANCE only where it is not
(docs/textbook.md says where that is). No call may warn.
"""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from multihead import textbook

pytestmark = pytest.mark.filterwarnings("error")

SEEDS = 1000
TOLERANCE = {
    torch.float32: {"atol": 1e-6, "rtol": 1e-5},
    torch.float64: {"atol": 1e-8, "rtol": 1e-5},
}


@pytest.fixture(autouse=True)
def _strict():
    """Every warning every time; one thread, because the tensors are small."""
    threads, always = torch.get_num_threads(), torch.is_warn_always_enabled()
    torch.set_num_threads(1)
    torch.set_warn_always(True)
    yield
    torch.set_num_threads(threads)
    torch.set_warn_always(always)


def reference(width, num_heads, dtype=torch.float32, **options):
    """A reference whose biases, unlike those it is made with, are not 0."""
    module = nn.MultiheadAttention(
        width, num_heads, batch_first=True, dtype=dtype, **options
    )
    redraw(module)
    return module


@torch.no_grad()
def redraw(module):
    for parameter in module.parameters():
        parameter.uniform_(-0.1, 0.1)


@torch.no_grad()
def copy_weights(form, module):
    """From an nn.MultiheadAttention into a textbook module."""
    layers = list(form.children())
    weights = [*module.in_proj_weight.chunk(3), module.out_proj.weight]
    biases = [*module.in_proj_bias.chunk(3), module.out_proj.bias]
    for layer, weight, bias in zip(layers, weights, biases, strict=True):
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)


def seed_all(seed):
    """torch.manual_seed without its visits to devices, which take longer than a case."""
    torch.default_generator.manual_seed(seed)


def close(ours, expected):
    return torch.allclose(ours, expected, **TOLERANCE[expected.dtype])


def equal(a, b):
    """torch.equal, NaN in the same places counting as equal."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(0.0), b.nan_to_num(0.0)
    )


# --- The canonical cases -------------------------------------------------------------


def masks_of_case_a():
    """Mask for the form, arguments for the reference."""
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    padding = torch.arange(4) >= torch.tensor([3, 4, 2])[:, None]
    causal_3d = causal.expand(6, 4, 4)
    per_head = padding[:, None, :].expand(3, 4, 4).repeat_interleave(2, dim=0)
    return {
        "none": (None, {}),
        "causal": (causal, {"attn_mask": causal}),
        "causal per head": (causal_3d, {"attn_mask": causal_3d}),
        "padding": (padding[:, None, None, :], {"key_padding_mask": padding}),
        "padding per head": (per_head, {"attn_mask": per_head}),
    }


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_case_a_multi_head_attention(dtype):
    masks = masks_of_case_a()
    for seed in range(SEEDS):
        seed_all(seed)
        module = nn.MultiheadAttention(8, 2, bias=False, batch_first=True, dtype=dtype)
        q, k, v = torch.rand(3, 3, 4, 8, dtype=dtype)
        for name, (mask, arguments) in masks.items():
            expected, _ = module(q, k, v, **arguments)
            ours = textbook.multi_head_attention(q, k, v, 2, 8, mask, weights=module)
            assert torch.equal(ours, expected), (seed, name)


def test_case_b_multi_head_attention_module():
    torch.manual_seed(0)
    module, form = reference(512, 8), textbook.MultiHeadAttention(512, 8)
    keep = torch.ones(10, 10).tril()
    one_blind = keep.clone()
    one_blind[4] = 0
    seeing = torch.arange(10) != 4
    for seed in range(SEEDS):
        seed_all(seed)
        if seed % 10 == 0:  # a million numbers, which take longer than the three calls
            redraw(module)
            copy_weights(form, module)
        x = torch.randn(2, 10, 512)
        assert torch.equal(form(x, x, x), module(x, x, x)[0]), seed
        causal, _ = module(x, x, x, attn_mask=keep == 0)
        assert torch.equal(form(x, x, x, keep), causal), seed
        ours = form(x, x, x, one_blind)
        assert torch.equal(ours[:, seeing], causal[:, seeing]), seed
        assert torch.equal(ours[:, 4], module.out_proj.bias.expand(2, -1)), seed


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "groups", "width"),
    [(2, 2, 8), (8, 8, 8), (8, 2, 64), (8, 1, 64), (6, 3, 24)],
)
def test_case_c_grouped_query_attention(heads, groups, width, dtype):
    module = nn.MultiheadAttention(width, heads, bias=False, batch_first=True).to(dtype)
    query, key, value = module.in_proj_weight.detach().chunk(3)
    d = width // heads
    for seed in range(SEEDS):
        seed_all(seed)
        redraw(module)
        # Heads of a group share their rows in the reference; the form gets them once.
        for rows in (key, value):
            shared = rows.view(heads, d, width)[:: heads // groups]
            rows.copy_(shared.repeat_interleave(heads // groups, 0).view_as(rows))
        once = [r.view(heads, d, width)[:: heads // groups] for r in (key, value)]
        weights = (query, *(w.flatten(0, 1) for w in once), module.out_proj.weight)
        q, k, v = torch.rand(3, 3, 4, width, dtype=dtype)
        expected, _ = module(q, k, v)
        ours = textbook.grouped_query_attention(
            q, k, v, groups, width, num_heads=heads, weights=weights
        )
        assert close(ours, expected), seed
        if groups == heads:
            ours = textbook.grouped_query_attention(
                q, k, v, groups, width, weights=module
            )
            assert torch.equal(ours, expected), seed


def test_case_d_multi_head_self_attention():
    torch.manual_seed(0)
    module, form = reference(64, 8, dropout=0.1), textbook.MultiHeadSelfAttention(64)
    for seed in range(SEEDS):
        seed_all(seed)
        redraw(module)
        copy_weights(form, module)
        x = torch.randn(2, 16, 64)
        form.train(), module.train()
        seed_all(seed)
        ours, state = form(x), torch.get_rng_state()
        seed_all(seed)
        assert torch.equal(ours, module(x, x, x)[0]), seed
        assert torch.equal(state, torch.get_rng_state()), seed
        form.eval(), module.eval()
        ours = form(x)
        assert torch.equal(ours, module(x, x, x)[0]), seed
        with torch.no_grad():  # the reference takes its native inference path here
            assert close(form(x), module(x, x, x)[0]), seed


# --- Any configuration ---------------------------------------------------------------


@st.composite
def configurations(draw):
    d, heads = draw(st.sampled_from([2, 3, 8, 16, 40])), draw(st.integers(1, 6))
    sharing = draw(st.sampled_from(["self", "k is v", "q is k", "distinct"]))
    queries = draw(st.integers(1, 40))
    keys = draw(st.integers(1, 70)) if sharing in ("k is v", "distinct") else queries
    return {
        "seed": draw(st.integers(0, 2**31)),
        "shape": (draw(st.integers(1, 4)), heads, queries, keys, d),
        "sharing": sharing,
        "dtype": draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
        "bias": draw(st.booleans()),
        "inputs_need_grad": draw(st.booleans()),
        "mask": draw(st.sampled_from([None, "2d", "item", "item4", "head", "padding"])),
    }


def draw_inputs(case):
    batch, heads, queries, keys, d = case["shape"]
    options = {"dtype": case["dtype"], "requires_grad": case["inputs_need_grad"]}
    q = torch.randn(batch, queries, heads * d, **options)
    k = q if case["sharing"] in ("self", "q is k") else None
    k = torch.randn(batch, keys, heads * d, **options) if k is None else k
    v = k if case["sharing"] in ("self", "k is v") else torch.randn_like(k)
    return q, k, v.requires_grad_(case["inputs_need_grad"])


def draw_mask(case):
    """The mask for the form, and for the reference; rows may be fully blocked."""
    batch, heads, queries, keys, _ = case["shape"]
    sizes = {
        "2d": (queries, keys),
        "item": (batch, queries, keys),
        "item4": (batch, 1, queries, keys),
        "head": (batch * heads, queries, keys),
        "padding": (batch, 1, 1, keys),
    }
    if case["mask"] is None:
        return None, {}
    mask = torch.rand(sizes[case["mask"]]) < 0.3
    if case["mask"] == "padding":
        return mask, {"key_padding_mask": mask[:, 0, 0]}
    if case["mask"].startswith("item"):
        flat = mask.view(batch, queries, keys)
        return mask, {"attn_mask": flat.repeat_interleave(heads, 0)}
    return mask, {"attn_mask": mask}


def agree(case, shares_weights):
    """How results are compared: by bits where the weights of both sides lie alike.

    BLAS may choose its code by the address of an operand. PyTorch's weights are parts of
    one tensor, which begin wherever the part before ends; what the form stacks, or holds
    as a tensor of its own, begins at a multiple of 64 bytes. Self-attention multiplies by
    the whole on both sides; shares_weights: so do parts that are not stacked.
    """
    _, heads, _, _, d = case["shape"]
    alike = (heads * d) ** 2 * case["dtype"].itemsize % 64 == 0
    alike |= case["sharing"] == "self"
    alike |= shares_weights and case["sharing"] != "k is v"
    if alike:
        return equal
    assume(case["dtype"] in TOLERANCE)
    return lambda a, b: torch.allclose(a, b, **TOLERANCE[a.dtype], equal_nan=True)


@settings(max_examples=200, deadline=None)
@given(configurations())
def test_bits_of_outputs_and_gradients(case):
    torch.manual_seed(case["seed"])
    _, heads, _, _, d = case["shape"]
    module = reference(heads * d, heads, case["dtype"], bias=case["bias"])
    q, k, v = draw_inputs(case)
    mask, arguments = draw_mask(case)
    expected, _ = module(q, k, v, **arguments)
    leaves = {id(x): x for x in (q, k, v) if x.requires_grad}.values()
    leaves = [*leaves, *module.parameters()]
    gradient = torch.randn_like(expected)
    expected = [expected, *torch.autograd.grad(expected, leaves, gradient)]
    for form in (textbook.multi_head_attention, textbook.grouped_query_attention):
        ours = form(q, k, v, heads, heads * d, mask, weights=module)
        ours = [ours, *torch.autograd.grad(ours, leaves, gradient)]
        assert all(map(agree(case, True), ours, expected)), form.__name__


@settings(max_examples=100, deadline=None)
@given(configurations())
def test_bits_of_the_module(case):
    torch.manual_seed(case["seed"])
    _, heads, _, _, d = case["shape"]
    module = reference(heads * d, heads, case["dtype"])
    form = textbook.MultiHeadAttention(heads * d, heads).to(case["dtype"])
    copy_weights(form, module)
    q, k, v = draw_inputs(case)
    blocked, arguments = draw_mask(case)
    expected, weights = module(q, k, v, average_attn_weights=False, **arguments)
    sees_nothing = weights.isnan().any(-1)
    keep = None if blocked is None else ~blocked
    ours = form(q, k, v, keep)
    seeing = ~sees_nothing.any(1)
    if case["dtype"] == torch.bfloat16:
        # PyTorch's product carries the NaN of a row into its neighbour.
        seeing &= expected.isfinite().all(-1)
    assert agree(case, False)(ours[seeing], expected[seeing])
    blind = sees_nothing.all(1)
    assert torch.equal(ours[blind], module.out_proj.bias.expand(int(blind.sum()), -1))
    ours.sum().backward()
    assert all(p.grad.isfinite().all() for p in form.parameters())


def without_gradients(module):
    """(ours, PyTorch's) of self-attention, key as value, and three tensors."""
    width, heads = module.embed_dim, module.num_heads
    q, k = torch.randn(3, 7, width), torch.randn(3, 11, width)
    with torch.no_grad():  # in training mode: not the native inference path
        for inputs in ((q, q, q), (q, k, k), (q, k, k.clone())):
            ours = textbook.multi_head_attention(*inputs, heads, width, weights=module)
            yield ours, module(*inputs)[0]


@pytest.mark.parametrize("bias", [True, False])
def test_frozen_weights_give_the_bits_without_gradients(bias):
    for seed in range(20):
        torch.manual_seed(seed)
        module = reference(48, 6, bias=bias).requires_grad_(False)
        for ours, expected in without_gradients(module):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_without_gradients_the_result_is_close(bias):
    """The weights that the form stacks need no gradient under no_grad, the module's
    do. PyTorch takes another product for such a weight, without a bias even one of
    another shape, and it depends on the CPU whether the bits show that."""
    for seed in range(20):
        torch.manual_seed(seed)
        for ours, expected in without_gradients(reference(48, 6, bias=bias)):
            assert close(ours, expected)


# --- Weights -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_same_seed_gives_the_same_layer(dtype):
    q, k, v = torch.randn(3, 2, 5, 24, dtype=dtype)
    options = {"bias": False, "batch_first": True, "dtype": dtype}
    for seed in range(20):
        torch.manual_seed(seed)
        expected, _ = nn.MultiheadAttention(24, 4, **options)(q, k, v)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(textbook.multi_head_attention(q, k, v, 4, 24), expected)
        assert torch.equal(torch.get_rng_state(), state)


def test_grouped_weights_are_drawn_out_q_k_v():
    q, k, v = torch.randn(3, 2, 5, 24)
    torch.manual_seed(7)
    output = nn.Linear(24, 24, bias=False).weight
    drawn = [nn.Parameter(torch.empty(rows, 24)) for rows in (24, 12, 12)]
    for matrix in drawn:
        nn.init.xavier_uniform_(matrix)
    expected = textbook.grouped_query_attention(
        q, k, v, 2, 24, num_heads=4, weights=(*drawn, output)
    )
    torch.manual_seed(7)
    ours = textbook.grouped_query_attention(q, k, v, 2, 24, num_heads=4)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_every_kind_of_weights(bias):
    torch.manual_seed(0)
    module = reference(24, 4, bias=bias).requires_grad_(False)
    matrices = [*module.in_proj_weight.chunk(3), module.out_proj.weight]
    roles = ("q_proj", "k_proj", "v_proj", "out_proj")
    named = {f"{r}.weight": m for r, m in zip(roles, matrices, strict=True)}
    if bias:
        biases = [*module.in_proj_bias.chunk(3), module.out_proj.bias]
        named |= {f"{r}.bias": b for r, b in zip(roles, biases, strict=True)}
    q, k, v = torch.randn(3, 2, 5, 24)
    expected, _ = module(q, k, v)
    kinds = [module, module.state_dict(), named] + ([] if bias else [matrices])
    for weights, form in itertools.product(
        kinds, (textbook.multi_head_attention, textbook.grouped_query_attention)
    ):
        assert torch.equal(form(q, k, v, 4, 24, weights=weights), expected)


@pytest.mark.parametrize(
    "form", [textbook.MultiHeadAttention, textbook.MultiHeadSelfAttention]
)
def test_parameters_of_the_modules(form):
    module = form(512, 8)
    assert sum(p.numel() for p in module.parameters()) == 1_050_624
    names = ("W_q", "W_k", "W_v", "W_o")
    if form is textbook.MultiHeadSelfAttention:
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
    assert [name for name, _ in module.named_children()] == list(names)
    assert all(isinstance(layer, nn.Linear) for layer in module.children())


def test_heads_are_split_and_combined():
    form = textbook.MultiHeadAttention(12, 3)
    x = torch.randn(2, 5, 12)
    heads = form.split_heads(x)
    assert heads.shape == (2, 3, 5, 4)
    assert torch.equal(heads[1, 2], x[1, :, 8:])
    assert torch.equal(form.combine_heads(heads), x)
