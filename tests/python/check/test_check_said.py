# SPDX-License-Identifier: MIT
"""What docstrings and names say of masks, weights and scales, against what code does."""

import math

import torch
from heads import Heads
from test_check_unusual import conditions
from torch import nn
from torch.nn import functional as F

import multihead


def by_heads(x, memory, w_q, w_k, w_v, w_o):
    """w_q, w_k: (h, d, k), w_v: (h, d, v), w_o: (h, d, v), summed over heads."""
    q = torch.einsum("bnd,hdk->bhnk", x, w_q)
    k = torch.einsum("bmd,hdk->bhmk", memory, w_k)
    v = torch.einsum("bmd,hdv->bhmv", memory, w_v)
    scores = torch.einsum("bhnk,bhmk->bhnm", q, k) * w_q.shape[-1] ** -0.5
    heads = torch.einsum("bhnm,bhmv->bhnv", scores.softmax(-1), v)
    return torch.einsum("bhnv,hdv->bnd", heads, w_o)


def test_matrices_by_heads_may_have_their_output_last():
    report = multihead.check(by_heads)
    assert report.judgement == "right", str(report)


class OfTheModel(nn.Module):
    """x: (batch, seq, model). No name says how wide it is."""

    axis = 2

    def __init__(self, model: int, heads: int, dim: int):
        super().__init__()
        self.wq = nn.Parameter(torch.randn(model, heads, dim) * model**-0.5)
        self.wk = nn.Parameter(torch.randn(model, heads, dim) * model**-0.5)
        self.wv = nn.Parameter(torch.randn(model, heads, dim) * model**-0.5)
        self.wo = nn.Parameter(torch.randn(heads, dim, model) * (heads * dim) ** -0.5)

    def forward(self, x):
        q, k, v = (
            torch.einsum("bsm,mhd->bshd", x, w) for w in (self.wq, self.wk, self.wv)
        )
        scores = torch.einsum("bqhd,bkhd->bqkh", q, k) / q.shape[-1] ** 0.5
        heads = torch.einsum("bqkh,bkhd->bqhd", scores.softmax(self.axis), v)
        return torch.einsum("bqhd,hdm->bqm", heads, self.wo)


class OfTheModelOverHeads(OfTheModel):
    axis = -1


def test_widths_of_matrices_by_heads():
    assert multihead.check(OfTheModel).judgement == "right"
    assert multihead.check(OfTheModelOverHeads).causes == ["softmax_over_heads"]


class TakesBoth(Heads):
    """attn_mask: (B, Lq, Lk); a bool mask is True where attention is forbidden, a float
    mask is added to the scores"""

    def forward(self, q, kv, attn_mask=None):
        q, k, v = self.heads(q, kv)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = self.number(attn_mask)
            scores = scores + attn_mask[:, None].to(scores)
        return self.merged(scores.softmax(-1) @ v)

    def number(self, mask):
        return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


class AddsBools(TakesBoth):
    def number(self, mask):
        return mask.float()


def test_bool_masks_of_code_that_takes_both():
    report = multihead.check(TakesBoth)
    assert report.judgement.startswith("right"), str(report)
    assert multihead.check(AddsBools).causes == ["mask_added"]


class OfTokens(Heads):
    """tokens: (B, L, D); is_token: (B, L) bool, True for tokens, False for padding."""

    rows = False

    def forward(self, tokens, is_token):
        q, k, v = self.heads(tokens)
        real = is_token[:, None, :, None] if self.rows else is_token[:, None, None]
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~real, -1e9)
        return self.merged(scores.softmax(-1) @ v)


class OfTokensThatAsk(OfTokens):
    rows = True


def test_what_is_said_to_mark_padding():
    assert multihead.check(OfTokens).judgement == "right"
    assert multihead.check(OfTokensThatAsk).causes == ["padding_on_queries"]


def in_pytorchs_order(
    x, num_heads, in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias
):
    """x: (L, N, E), with the parameters of nn.MultiheadAttention."""
    q, k, v = F.linear(x, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    return F.linear(attended(q, k, v, num_heads), out_proj_weight, out_proj_bias)


def in_another_order(
    x, num_heads, in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias
):
    """x: (L, N, E), with the parameters of nn.MultiheadAttention."""
    k, q, v = F.linear(x, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    return F.linear(attended(q, k, v, num_heads), out_proj_weight, out_proj_bias)


def attended(q, k, v, num_heads):
    length, batch, width = q.shape
    shape = length, batch * num_heads, width // num_heads
    q, k, v = (t.reshape(shape).transpose(0, 1) for t in (q, k, v))
    weights = (q @ k.mT / shape[-1] ** 0.5).softmax(-1)
    return (weights @ v).transpose(0, 1).reshape(length, batch, width)


def test_a_fused_weight_that_is_given_has_the_order_of_its_name():
    assert multihead.check(in_pytorchs_order).judgement == "right"
    assert multihead.check(in_another_order).causes == ["query_key_swapped"]


class Pools(nn.Module):
    """Pooling by attention of a set transformer (Lee et al., 2019), which adds its
    queries to what the heads return, with its norms."""

    def __init__(self, dim, num_heads, num_seeds):
        super().__init__()
        self.count = num_heads
        self.seeds = nn.Parameter(torch.randn(1, num_seeds, dim))
        self.fc_q, self.fc_k = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.fc_v, self.fc_o = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.ln0, self.ln1 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def divisor(self, q):
        return math.sqrt(q.shape[-1])

    def forward(self, x):
        seeds = self.seeds.repeat(len(x), 1, 1)
        q, k, v = (
            torch.cat(t.chunk(self.count, -1))
            for t in (self.fc_q(seeds), self.fc_k(x), self.fc_v(x))
        )
        weights = (q @ k.mT / self.divisor(q)).softmax(-1)
        y = self.ln0(torch.cat((q + weights @ v).chunk(self.count), -1))
        return self.ln1(y + F.relu(self.fc_o(y)))


class PoolsByWidth(Pools):
    def divisor(self, q):
        return math.sqrt(q.shape[-1] * self.count)


class PoolsByWidthAsOthers(PoolsByWidth):
    """As in the reference code the scale is 1 / sqrt(dim)."""


def test_queries_that_are_added_to_what_heads_return():
    report = multihead.check(Pools)
    assert conditions(report) == ["layers_beside"], str(report)
    assert multihead.check(PoolsByWidth).causes == ["scale_by_embed_dim"]
    report = multihead.check(PoolsByWidthAsOthers)
    assert "own_scale" in conditions(report), str(report)


class OfGemma(Heads):
    """Heads of any width, whose scale has a number of its own."""

    def __init__(self, dim, num_heads, query_pre_attn_scalar=256):
        super().__init__(dim, num_heads)
        self.scaling = query_pre_attn_scalar**-0.5

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merged((q @ k.mT * self.scaling).softmax(-1) @ v)


def test_the_number_of_a_scale():
    assert multihead.check(OfGemma).judgement == "right"
