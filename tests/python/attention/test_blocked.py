# SPDX-License-Identifier: MIT
"""What backend("auto") promises of keys that a query does not see.

Nothing planted in them reaches the query's row; a row that sees no key is 0.
"""

import calls
import pytest
import torch

import multihead

NAN, INF = float("nan"), float("inf")
PLANTED = pytest.mark.parametrize("planted", [NAN, INF, -INF], ids=str)
WHERE = pytest.mark.parametrize("where", ["key", "value", "key and value"])
TAIL = torch.zeros(calls.LQ, calls.LK, dtype=torch.bool)
TAIL[:, :2] = True
KEEP = TAIL.clone()
KEEP[2] = True  # query 2 alone sees the keys from 2 on
HIDDEN_TAIL = {
    "keep mask": dict(attn_mask=TAIL),
    "bias": dict(attn_mask=torch.zeros(TAIL.shape).masked_fill(~TAIL, -INF)),
    "lengths": dict(key_lengths=torch.tensor([2, 2])),
    "key mask": dict(key_mask=TAIL[:2]),
    "window": dict(
        window=(9, 0),
        key_lengths=torch.tensor([2, 2]),
        causal_alignment="bottom_right",
    ),
    "sinks": dict(attn_mask=TAIL, sinks=torch.randn(calls.H)),
    "everything": dict(
        attn_mask=torch.zeros(TAIL.shape).masked_fill(~TAIL, -INF),
        softcap=2.0,
        alibi_slopes=torch.rand(calls.H),
        sinks=torch.randn(calls.H),
        window=(9, 9),
    ),
}
SEEN_BY_SOME = {  # the first query that sees the keys from 2 on is 2
    "causal": dict(is_causal=True),
    "window": dict(window=(-1, 0)),
    "keep mask": dict(attn_mask=KEEP),
}


def attend(inputs, options):
    """Output, logsumexp and the gradients of query, key and value."""
    tensors = [x.detach().requires_grad_() for x in inputs]
    out, logsumexp = multihead.scaled_dot_product_attention(
        *tensors, **options, enable_gqa=True, return_lse=True
    )
    return out, logsumexp, tensors


def plant(inputs, planted, where):
    """The inputs with one bad element in every key or value row from 2 on."""
    query, key, value = (x.clone() for x in inputs)
    for name, x in (("key", key), ("value", value)):
        if name in where:
            x[:, :, 2:, 1] = planted
    return query, key, value


def inputs_of(groups):
    torch.manual_seed(0)
    return (
        torch.randn(calls.B, calls.H, calls.LQ, calls.D),
        torch.randn(calls.B, groups, calls.LK, calls.D),
        torch.randn(calls.B, groups, calls.LK, calls.DV),
    )


@PLANTED
@WHERE
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("name", HIDDEN_TAIL)
def test_what_no_row_sees_changes_nothing(name, groups, where, planted):
    inputs, options = inputs_of(groups), HIDDEN_TAIL[name]
    clean, clean_lse, tensors = attend(inputs, options)
    expected = torch.autograd.grad(clean.square().sum() + clean_lse.sum(), tensors)
    out, lse, tensors = attend(plant(inputs, planted, where), options)
    grads = torch.autograd.grad(out.square().sum() + lse.sum(), tensors)
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)
    for grad, clean_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, clean_grad)


@PLANTED
@WHERE
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("name", SEEN_BY_SOME)
def test_what_some_rows_see_reaches_those_rows_only(name, groups, where, planted):
    inputs, options = inputs_of(groups), SEEN_BY_SOME[name]
    clean, clean_lse, tensors = attend(inputs, options)
    (expected,) = torch.autograd.grad(clean[:, :, :2].sum(), tensors[:1])
    bad = plant(inputs, planted, where)
    out, lse, tensors = attend(bad, options)
    assert torch.equal(out[:, :, :2], clean[:, :, :2])
    assert torch.equal(lse[:, :, :2], clean_lse[:, :, :2])
    (grad,) = torch.autograd.grad(out[:, :, :2].sum(), tensors[:1])
    torch.testing.assert_close(grad[:, :, :2], expected[:, :, :2])
    if "value" in where and where != "key and value":
        # A column of the values is bad, every other one is as it was.
        assert not out[:, :, 2, 1].isfinite().any()
        untouched = [0, 2]
        assert torch.equal(out[:, :, 2, untouched], clean[:, :, 2, untouched])
    if planted is NAN and "key" in where:
        assert out[:, :, 2].isnan().all()
        assert lse[:, :, 2].isnan().all()


@PLANTED
@pytest.mark.parametrize("where", ["key", "value"])
def test_visible_nan_and_infinity_follow_ieee(where, planted):
    """As the same sums without a mask have them."""
    inputs = plant(inputs_of(calls.H), planted, where)
    query, key, value = inputs
    weights = torch.softmax(query @ key.transpose(-2, -1) / calls.D**0.5, -1)
    everything = torch.ones(calls.LQ, calls.LK, dtype=torch.bool)
    for options in ({}, dict(attn_mask=everything)):
        out, _, _ = attend(inputs, options)
        torch.testing.assert_close(out.detach(), weights @ value, equal_nan=True)


@pytest.mark.parametrize("sinks", [None, torch.randn(calls.H)], ids=["", "sinks"])
@pytest.mark.parametrize(
    "kind", ["keep", "bias", "lengths", "window", "offset", "key mask"]
)
def test_rows_that_see_nothing(kind, sinks):
    blocked = torch.zeros(calls.LQ, calls.LK)
    blocked[1] = -INF
    options = {
        "keep": dict(attn_mask=blocked == 0),
        "bias": dict(attn_mask=blocked),
        "lengths": dict(key_lengths=torch.tensor([0, calls.LK])),
        "window": dict(window=(1, 1), key_lengths=torch.tensor([0, calls.LK])),
        "offset": dict(is_causal=True, query_offset=torch.tensor([-calls.LQ, 0])),
        "key mask": dict(
            key_mask=torch.tensor([[False] * calls.LK, [True] * calls.LK])
        ),
    }[kind]
    empty = torch.zeros(calls.B, calls.H, calls.LQ, dtype=torch.bool)
    empty[(slice(None), slice(None), 1) if kind in ("keep", "bias") else 0] = True
    out, lse, tensors = attend(inputs_of(2), options | dict(sinks=sinks))
    assert (out[empty] == 0).all()
    assert (out[~empty] != 0).all()
    limit = torch.full((calls.H,), -INF) if sinks is None else sinks
    torch.testing.assert_close(lse[empty], limit[:, None].expand_as(lse)[empty])
    assert lse[~empty].isfinite().all()
    finite_lse = lse.masked_fill(empty, 0.0)
    grads = torch.autograd.grad(out.square().sum() + finite_lse.sum(), tensors)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][empty] == 0).all()


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_rows_that_see_nothing_in_layers(grouped, kind, need_weights, dtype):
    """Output: the bias of the output projection. Weights and gradients: 0."""
    torch.manual_seed(0)
    module = (
        multihead.GroupedQueryAttention(8, 4, 2, batch_first=True)
        if grouped
        else multihead.MultiheadAttention(8, 4, batch_first=True)
    )
    torch.nn.init.normal_(module.out_proj.bias)
    blocked = torch.zeros((2, 3) if kind == "key_padding_mask" else (3, 3)).bool()
    blocked[1] = True
    if dtype != torch.bool:
        blocked = torch.zeros(blocked.shape).masked_fill(blocked, -INF)
    x = torch.randn(2, 3, 8, requires_grad=True)
    options = {kind: blocked, "need_weights": need_weights}
    out, weights = module(x, x, x, **options)
    rows = (1,) if kind == "key_padding_mask" else (slice(None), 1)
    assert torch.equal(out[rows], module.out_proj.bias.expand_as(out[rows]))
    assert out.isfinite().all()
    if need_weights:
        assert (weights[rows] == 0).all()
    gradients = torch.autograd.grad(
        out.square().sum(), [x, *module.parameters()], retain_graph=True
    )
    assert all(gradient.isfinite().all() for gradient in gradients)
    if kind == "key_padding_mask":
        (gradient,) = torch.autograd.grad(out[rows].sum(), x)
        assert (gradient == 0).all()
    with torch.no_grad():
        module.eval()
        again, _ = module(x, x, x, **options)
    torch.testing.assert_close(again, out)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_query_that_sees_nothing_reaches_no_gradient(bad, softcap):
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    q[:, :, 1] = bad
    keep = torch.tensor([[True] * 3, [False] * 3, [True] * 3])
    for x in (q, k, v):
        x.requires_grad_()
    out = multihead.scaled_dot_product_attention(
        q, k, v, attn_mask=keep, softcap=softcap
    )
    out.square().sum().backward()
    assert (out[:, :, 1] == 0).all() and out.isfinite().all()
    assert (q.grad[:, :, 1] == 0).all()
    for x in (q, k, v):
        assert x.grad.isfinite().all()


def test_large_finite_masks_do_not_add_up_to_a_block():
    mha = multihead.MultiheadAttention(8, 2, dtype=torch.float16)
    x = torch.randn(4, 1, 8, dtype=torch.float16)
    lowest = torch.finfo(torch.float16).min
    _, weights = mha(
        x,
        x,
        x,
        attn_mask=torch.full((4, 4), lowest, dtype=torch.float16),
        key_padding_mask=torch.full((1, 4), lowest, dtype=torch.float16),
    )
    sums = weights.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))
