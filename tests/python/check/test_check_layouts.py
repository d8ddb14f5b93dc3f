# SPDX-License-Identifier: MIT
"""Orders of axes in functions without weights: batch or sequence first, channels first,
all sequences of a batch behind one another."""

import pytest
import torch

import multihead


def attend(q, k, v):
    return (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v


def of_steps(query, key, value, key_lengths=None):
    """query (T, B, C), key and value (S, B, C); key_lengths (B,)."""
    q, k, v = (t.transpose(0, 1) for t in (query, key, value))
    scores = q @ k.mT / q.size(-1) ** 0.5
    if key_lengths is not None:
        padded = torch.arange(k.size(1))[None] >= key_lengths[:, None]
        scores = scores.masked_fill(padded[:, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def of_steps_blocks_tokens(query, key, value, key_lengths=None):
    """query (T, B, C), key and value (S, B, C); key_lengths (B,)."""
    q, k, v = (t.transpose(0, 1) for t in (query, key, value))
    scores = q @ k.mT / q.size(-1) ** 0.5
    if key_lengths is not None:
        padded = torch.arange(k.size(1))[None] < key_lengths[:, None]
        scores = scores.masked_fill(padded[:, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def heads_of_steps(q, k, v):
    """q: (L, B, H, D); k, v: (S, B, H, D)."""
    scores = torch.einsum("lbhd,sbhd->bhls", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhls,sbhd->lbhd", scores.softmax(-1), v)


def channels_first(q, k, v):
    """q, k, v: (batch, channels, length), as after a Conv1d."""
    scores = torch.einsum("bct,bcs->bts", q, k) / q.shape[1] ** 0.5
    return torch.einsum("bts,bcs->bct", scores.softmax(-1), v)


@pytest.mark.parametrize(
    ("function", "layout"),
    [
        (of_steps, "(L, B, D)"),
        (heads_of_steps, "(L, B, H, D)"),
        (channels_first, "(B, D, L)"),
    ],
)
def test_functions_whose_batch_or_features_stand_elsewhere(function, layout):
    report = multihead.check(function)
    assert report.judgement == "right", str(report)
    assert f"tensors as {layout}" in report.understood


def test_faults_in_another_order_have_their_names():
    report = multihead.check(of_steps_blocks_tokens)
    assert report.cause == "padding_inverted", str(report)


def merged(weights, v):
    """Weights (B, H, L, S), v (B, S, H, D): (B, L, H·D)."""
    return torch.einsum("bhls,bshd->blhd", weights, v).flatten(2)


def merging(q, k, v):
    """q, k, v: (B, L, H, D); returns (B, L, H * D)."""
    scores = torch.einsum("blhd,bshd->bhls", q, k) / q.shape[-1] ** 0.5
    return merged(scores.softmax(-1), v)


def merging_over_queries(q, k, v):
    scores = torch.einsum("blhd,bshd->bhls", q, k) / q.shape[-1] ** 0.5
    return merged(scores.softmax(-2), v)


def merging_of_heads_first(q, k, v):
    return attend(q, k, v).transpose(1, 2).flatten(2)


def merging_of_steps(query_layer, key_layer, value_layer):
    """query_layer: [sq, b, np, hn]; key_layer, value_layer: [sk, b, np, hn];
    returns [sq, b, np * hn], as Megatron-LM's core attention."""
    length, items, heads, width = query_layer.shape
    q, k, v = (
        t.reshape(-1, items * heads, width).transpose(0, 1)
        for t in (query_layer, key_layer, value_layer)
    )
    context = attend(q, k, v).view(items, heads, length, width)
    return context.permute(2, 0, 1, 3).reshape(length, items, -1)


def merging_of_steps_with_another_scale(query_layer, key_layer, value_layer):
    return merging_of_steps(query_layer / 3, key_layer, value_layer)


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (merging, "(B, L, H, D)"),
        (merging_of_heads_first, "(B, H, L, D)"),
        (merging_of_steps, "(L, B, H, D)"),
    ],
)
def test_functions_of_heads_may_merge_them(function, taken):
    report = multihead.check(function)
    assert report.judgement in ("right", "right_if"), str(report)
    assert any(f"heads taken as {taken}" in said for said in report.understood)


def test_faults_of_functions_that_merge_heads_have_their_names():
    assert multihead.check(merging_over_queries).cause == "softmax_over_queries"
    report = multihead.check(merging_of_steps_with_another_scale)
    assert report.cause == "scale_of_another_number", str(report)


def unsaid(query, key, value):
    q, k, v = (t.transpose(0, 1) for t in (query, key, value))
    scores = torch.bmm(q, k.mT) / q.size(-1) ** 0.5
    return torch.bmm(scores.softmax(-1), v).transpose(0, 1)


def test_an_order_that_nothing_states_is_a_condition():
    report = multihead.check(unsaid)
    assert [c["name"] for c in report.conditions] == ["sequence_first"]
    assert multihead.check(unsaid, batch_first=False).judgement == "right"


def varlen(q, k, v, cu_seqlens):
    """q, k, v: (total, heads, dim); cu_seqlens: (batch + 1,)."""
    out = torch.empty_like(q)
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        parts = (t[start:end].transpose(0, 1) for t in (q, k, v))
        out[start:end] = attend(*parts).transpose(0, 1)
    return out


def varlen_across_items(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q):
    """q, k, v: (total, heads, dim)."""
    return attend(*(t.transpose(0, 1) for t in (q, k, v))).transpose(0, 1)


class OverItems(torch.nn.Module):
    """x: (B, N, D)"""

    def __init__(self, dim, num_heads=8):
        super().__init__()
        self.attend = torch.nn.MultiheadAttention(dim, num_heads)

    def forward(self, x):
        return self.attend(x, x, x, need_weights=False)[0]


class OfSteps(OverItems):
    """x: (N, B, D)"""


def test_n_counts_the_tokens_beside_a_b():
    assert multihead.check(OverItems).cause == "batch_and_sequence_exchanged"
    assert multihead.check(OfSteps).judgement == "right"


def test_items_behind_one_another():
    report = multihead.check(varlen)
    assert [c["name"] for c in report.conditions] == ["equal_lengths_only"]
    assert "items behind one another, (B·L, H, D)" in report.understood


def test_items_behind_one_another_that_see_each_other_are_wrong():
    report = multihead.check(varlen_across_items)
    assert report.judgement == "wrong", str(report)


def test_a_call_with_the_ends_of_items_comes_to_an_end():
    packed, ends = torch.randn(9, 2, 4), torch.tensor([0, 3, 9])
    report = multihead.check(varlen, inputs=(packed, packed, packed, ends))
    assert report.seconds < 30 and "hangs" not in report.causes
