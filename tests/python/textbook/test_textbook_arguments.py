# SPDX-License-Identifier: MIT
"""Masks and errors of the textbook forms, and the attention step on its own."""

import pytest
import torch
import torch.nn.functional as F
from equal import assert_equal
from torch import nn

from multihead import textbook

pytestmark = pytest.mark.filterwarnings("error")

N, H, LQ, LK, E = 2, 3, 5, 4, 12


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return torch.randn(N, LQ, E), torch.randn(N, LK, E), torch.randn(N, LK, E)


@pytest.fixture
def module():
    torch.manual_seed(1)
    return nn.MultiheadAttention(E, H, bias=False, batch_first=True)


def blocked_everywhere(mask):
    """As PyTorch takes it, from a mask that broadcasts to (N, H, LQ, LK)."""
    return {"attn_mask": mask.expand(N, H, LQ, LK).reshape(N * H, LQ, LK)}


# --- Masks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [(), (LK,), (1, 1), (LQ, 1), (LQ, LK), (1, 1, LQ, LK), (N, 1, 1, LK)]
    + [(1, H, LQ, LK), (N, 1, LQ, LK), (N, H, LQ, LK), (N, H, 1, LK)],
    ids=str,
)
def test_masks_broadcast(inputs, module, shape):
    mask = torch.rand(shape) < 0.4
    if mask.dim() and mask.size(-1) == LK:
        mask[..., 0] = False
    expected, _ = module(*inputs, **blocked_everywhere(mask))
    ours = textbook.multi_head_attention(*inputs, H, E, mask, weights=module)
    assert_equal(ours, expected)


@pytest.mark.parametrize(
    ("shape", "as_4d"),
    [
        ((N, LQ, LK), (N, 1, LQ, LK)),
        ((N, 1, LK), (N, 1, 1, LK)),
        ((1, LQ, LK), (1, 1, LQ, LK)),
        ((N * H, LQ, LK), (N, H, LQ, LK)),
        ((N * H, 1, LK), (N, H, 1, LK)),
    ],
)
def test_masks_of_three_dimensions(inputs, module, shape, as_4d):
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    expected, _ = module(*inputs, **blocked_everywhere(mask.view(as_4d)))
    ours = textbook.multi_head_attention(*inputs, H, E, mask, weights=module)
    assert torch.equal(ours, expected)
    form = textbook.MultiHeadAttention(E, H)
    assert torch.equal(form(*inputs, ~mask), form(*inputs, ~mask.view(as_4d)))


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int32, torch.int64]
    + [torch.bfloat16, torch.float32, torch.float64],
    ids=str,
)
def test_masks_of_any_number_type(inputs, module, dtype):
    mask = torch.ones(LQ, LK, dtype=torch.bool).triu(1)
    number = mask.to(dtype)
    expected, _ = module(*inputs, attn_mask=mask)
    for form in (textbook.multi_head_attention, textbook.grouped_query_attention):
        assert torch.equal(form(*inputs, H, E, number, weights=module), expected)
    form = textbook.MultiHeadAttention(E, H)  # the other polarity: 0 = blocked
    keep = (~mask).to(dtype)
    assert torch.equal(form(*inputs, keep), form(*inputs, ~mask))
    assert not torch.equal(form(*inputs, keep), form(*inputs, mask))
    ours = textbook.scaled_dot_product_attention(*inputs, number)
    expected = textbook.scaled_dot_product_attention(*inputs, mask)
    assert all(map(torch.equal, ours, expected))


def test_rows_that_see_nothing(inputs, module):
    mask = torch.zeros(LQ, LK, dtype=torch.bool)
    mask[2] = True
    for form in (textbook.multi_head_attention, textbook.grouped_query_attention):
        ours = form(*inputs, H, E, mask, weights=module)
        assert ours[:, 2].isnan().all()
        assert ours[:, [0, 1, 3, 4]].isfinite().all()
    output, weights = textbook.scaled_dot_product_attention(*inputs, mask)
    assert output[:, 2].isnan().all() and weights[:, 2].isnan().all()
    form = textbook.MultiHeadAttention(E, H)
    ours = form(*(x.requires_grad_() for x in inputs), ~mask)
    assert torch.equal(ours[:, 2], form.W_o.bias.expand(N, E))
    ours.sum().backward()
    assert all(x.grad.isfinite().all() for x in (*inputs, *form.parameters()))
    assert inputs[0].grad[:, 2].eq(0).all()


# --- The attention step --------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_scaled_dot_product_attention(lead, masked):
    torch.manual_seed(0)
    q = torch.randn(*lead, 5, 8, dtype=torch.float64)
    k = torch.randn(*lead, 7, 8, dtype=torch.float64)
    v = torch.randn(*lead, 7, 6, dtype=torch.float64)
    mask = torch.rand(5, 7) < 0.3 if masked else None
    output, weights = textbook.scaled_dot_product_attention(q, k, v, mask)
    keep = None if mask is None else ~mask
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights.sum(-1), torch.ones(*lead, 5).double())
    assert mask is None or weights.masked_select(mask).eq(0).all()
    assert torch.equal(weights @ v, output)


def test_dropout_acts_in_training_only_and_on_whole_weights():
    form = textbook.MultiHeadSelfAttention(16, 4, dropout=1.0)
    x = torch.randn(2, 6, 16)
    assert torch.equal(form(x), form.out_proj.bias.expand(2, 6, 16))
    form.eval()
    assert not torch.equal(form(x), form.out_proj.bias.expand(2, 6, 16))


# --- Errors --------------------------------------------------------------------------

x = torch.zeros(N, LQ, E)
wide = torch.zeros(N, LQ, E + 1)
square = [torch.zeros(E, E)] * 4
mha, gqa = textbook.multi_head_attention, textbook.grouped_query_attention
sdpa, Module = textbook.scaled_dot_product_attention, textbook.MultiHeadAttention
SelfModule = textbook.MultiHeadSelfAttention
with_bias_kv = nn.MultiheadAttention(E, H, add_bias_kv=True)
with_zero = nn.MultiheadAttention(E, H, add_zero_attn=True)
narrow_keys = nn.MultiheadAttention(E, H, kdim=E - 1)
one_bias = {f"{r}_proj.weight": square[0] for r in ("q", "k", "v", "out")}
one_bias |= {"k_proj.bias": torch.zeros(E)}
long_bias = {"in_proj_weight": torch.zeros(3 * E, E), "out_proj.weight": square[0]}
long_bias |= {"out_proj.bias": torch.zeros(E + 1)}

ERRORS = [
    (lambda: mha(x, x, x, 5, E), "multi_head_attention: d_model must be a positive"),
    (lambda: mha(x, x, x, 0, E), "multi_head_attention: num_heads must be positive"),
    (lambda: mha(x, x, x, H, 0), "multi_head_attention: d_model must be a positive"),
    (lambda: mha(wide, x, x, H, E), "multi_head_attention: q must have the shape"),
    (lambda: mha(x, wide, x, H, E), "multi_head_attention: k must have the shape"),
    (lambda: mha(x, x, wide, H, E), "multi_head_attention: v must have the shape"),
    (lambda: mha(x[0], x, x, H, E), "multi_head_attention: q must have the shape"),
    (lambda: mha(x, x[:1], x, H, E), "multi_head_attention: k must have the batch"),
    (lambda: mha(x, x, x[:, 1:], H, E), "v must have the shape of k, got"),
    (lambda: mha(x, x, x, H, E, torch.ones(2, 2)), "mask must broadcast to"),
    (lambda: mha(x, x, x, H, E, torch.ones(4, LQ, LQ)), "mask must broadcast to"),
    (lambda: mha(x, x, x, H, E, torch.ones(1, N, H, LQ, LQ)), "mask must broadcast to"),
    (lambda: mha(x, x, x, H, E, weights=square[:3]), "weights must be the query, key"),
    (lambda: mha(x, x, x, H, E, weights=[wide[0]] * 4), "weights must have the query"),
    (lambda: mha(x, x, x, H, E, weights={}), "weights must have in_proj_weight, or"),
    (lambda: mha(x, x, x, H, E, weights=narrow_keys), "weights must have in_proj_w"),
    (lambda: mha(x, x, x, H, E, weights=with_bias_kv), "weights must be without bias"),
    (lambda: mha(x, x, x, H, E, weights=with_zero), "weights must be without add_zero"),
    (lambda: mha(x, x, x, H, E, weights=one_bias), "weights must have biases for"),
    (
        lambda: mha(x, x, x, H, E, weights=long_bias),
        "weights must have the output bias",
    ),
    (
        lambda: gqa(x, x, x, 2, E, num_heads=3),
        r"grouped_query_attention: num_heads must .* got 3 \(num_query_groups=2\)",
    ),
    (lambda: gqa(x, x, x, 0, E), "num_query_groups must be positive, got 0"),
    (lambda: gqa(x, x, x, 5, E), "d_model must be a positive multiple of num_heads"),
    (
        lambda: gqa(x, x, x, 2, E, num_heads=4, weights=square),
        r"weights must have the key matrix of shape \(6, 12\), got \(12, 12\)",
    ),
    (
        lambda: sdpa(x[0, 0], x, x),
        "scaled_dot_product_attention: q must have the shape",
    ),
    (lambda: sdpa(x[..., :0], x[..., :0], x), "q must have the shape"),
    (lambda: sdpa(x, wide, x), "k must have the shape"),
    (lambda: sdpa(x, x[:1], x), "k must have the shape"),
    (lambda: sdpa(x, x, x[:, 1:]), "v must have the shape"),
    (lambda: sdpa(x, x, x, torch.ones(3, 3)), "mask must broadcast to"),
    (lambda: Module(E, 5), "MultiHeadAttention: d_model must be a positive multiple"),
    (lambda: Module(E, H)(wide, x, x), "MultiHeadAttention: Q must have the shape"),
    (lambda: Module(E, H)(x, x[:1], x[:1]), "MultiHeadAttention: K must have the ba"),
    (lambda: Module(E, H)(x, x, x, torch.ones(3, 3)), "mask must broadcast to"),
    (lambda: SelfModule(E), "MultiHeadSelfAttention: dim must be a positive multiple"),
    (lambda: SelfModule(E, H, 1.5), "dropout must be from 0 to 1, got 1.5"),
    (lambda: SelfModule(E, H)(wide), "MultiHeadSelfAttention: x must have the shape"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[m[:60] for _, m in ERRORS])
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
