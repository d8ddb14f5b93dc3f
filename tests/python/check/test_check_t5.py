# SPDX-License-Identifier: MIT
"""Attention of T5, which scales no scores, and adds its mask and a bias of positions at
once: neither hides what is wrong with the other."""

import pytest
import torch
from heads import Heads
from test_check_blocks import Decoder, conditions
from torch import nn
from torch.nn import functional as F

import multihead

BUCKETS = 8


class OfT5(nn.Module):
    """Raffel et al. 2020; the mask holds numbers to add, 0 or -inf."""

    has_bias = True
    divisor = 1.0

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1):
        super().__init__()
        self.count, self.dropout = num_heads, dropout
        self.q, self.k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.v, self.o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        if self.has_bias:
            self.relative_attention_bias = nn.Embedding(BUCKETS, num_heads)

    def bias(self, queries: int, keys: int):
        if not self.has_bias:
            return torch.zeros(1, self.count, queries, keys)
        distance = torch.arange(keys) - torch.arange(queries)[:, None]
        bucket = distance.clamp(-BUCKETS // 2, BUCKETS // 2 - 1) + BUCKETS // 2
        return self.relative_attention_bias(bucket).permute(2, 0, 1)[None]

    def to_add(self, mask):
        return mask

    def forward(self, hidden_states, key_value_states=None, mask=None):
        """mask: additive, 0 or -inf"""
        x = hidden_states
        keys = x if key_value_states is None else key_value_states
        q, k, v = (
            f(t).unflatten(-1, (self.count, -1)).transpose(1, 2)
            for f, t in ((self.q, x), (self.k, keys), (self.v, keys))
        )
        bias = self.bias(x.shape[1], keys.shape[1])
        if mask is not None:
            bias = bias + self.to_add(mask)
        scores = q @ k.transpose(-2, -1) / self.divisor + bias
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Kept(OfT5):
    def to_add(self, mask):
        return (1.0 - mask.float()) * -1e9

    def forward(self, hidden_states, key_value_states=None, mask=None):
        """mask: 1 = may be attended to, 0 = blocked"""
        return super().forward(hidden_states, key_value_states, mask)


class Inverted(Kept):
    def to_add(self, mask):
        return mask.float() * -1e9


class Ignored(OfT5):
    def to_add(self, mask):
        return torch.zeros_like(mask, dtype=torch.float)


class OfContext(OfT5):
    has_bias = False


class Flagged(OfT5):
    """Whether it has a bias, its constructor must be told."""

    def __init__(self, d_model: int, num_heads: int, relative_attention_bias):
        self.has_bias = False
        if relative_attention_bias:
            self.has_bias = True
        super().__init__(d_model, num_heads)


class MadeFloat(Kept):
    """The mask is float32, in which the least number of float64 is none."""

    def to_add(self, mask):
        least = torch.finfo(self.q.weight.dtype).min
        return (1.0 - mask.to(torch.float32)) * least


class Handed(OfContext):
    """Its caller has the bias, and adds the mask to it."""

    def forward(self, x, enc, pos_bias):
        return super().forward(x, enc, pos_bias)


class BlockOfT5(Decoder):
    def __init__(self, d_model: int, num_heads: int):
        super().__init__(d_model, num_heads)
        self.self_attn = OfT5(d_model, num_heads)

    def of_context(self, *sizes):
        return OfContext(*sizes)

    def alone(self, x, src_mask, tgt_mask):
        return self.self_attn(x, x, tgt_mask)

    def across(self, x, enc_out, src_mask, tgt_mask):
        return self.cross_attn(x, enc_out, src_mask)


class Scaled(BlockOfT5):
    def of_context(self, *sizes):
        attention = super().of_context(*sizes)
        attention.divisor = 3.0
        return attention


@pytest.mark.parametrize(
    ("attention", "assumed"),
    [
        (OfT5, "mask_additive"),
        (Flagged, "mask_additive"),
        (Kept, "mask_keeps"),
        (MadeFloat, "mask_keeps"),
    ],
)
def test_a_mask_added_to_a_bias_is_followed(attention, assumed):
    report = multihead.check(attention)
    assert report.judgement != "wrong", str(report)
    names = {one["name"] for one in report.assumptions}
    assert {assumed, "position_bias", "unscaled"} <= names, str(report)


@pytest.mark.parametrize(
    ("attention", "fault"), [(Inverted, "mask_inverted"), (Ignored, "mask_ignored")]
)
def test_a_bias_does_not_hide_what_is_wrong_with_its_mask(attention, fault):
    report = multihead.check(attention)
    assert report.causes == [fault], str(report)


def test_a_bias_that_is_handed_is_not_counted_twice():
    report = multihead.check(Handed)
    assert report.judgement == "right_if", str(report)
    assert conditions(report) == ["unscaled_beside_number"]


def test_a_block_of_t5_is_right_in_both_attentions():
    report = multihead.check(BlockOfT5)
    assert report.judgement == "right_if", str(report)
    assert set(conditions(report)) == {"mask_additive", "layers_beside"}
    assert {case["name"][-1] for case in report.cases} == {"1", "2"}


def test_a_block_of_t5_may_not_scale_by_what_is_no_root():
    report = multihead.check(Scaled)
    assert report.causes == ["scale_of_another_number"], str(report)


class Stated(BlockOfT5):
    """Masks are additive: 0 to attend, -inf to block."""


class OfTheTarget(Stated):
    """Masks are additive: 0 to attend, -inf to block."""

    def across(self, x, enc_out, src_mask, tgt_mask):
        return self.cross_attn(x, enc_out, tgt_mask)


def test_a_block_whose_masks_are_said_to_be_added():
    report = multihead.check(Stated)
    assert conditions(report) == ["layers_beside"], str(report)
    wrong = multihead.check(OfTheTarget)
    assert wrong.judgement == "wrong", str(wrong)
    assert "mask_of_another" in [finding.name for finding in wrong.findings]


class Table(nn.Module):
    """Causal: a learned table of distances, and the triangle, added at once."""

    def __init__(self, d_model: int, num_heads: int, max_len: int = 64):
        super().__init__()
        self.count, self.longest = num_heads, max_len
        self.qkv, self.out = (
            nn.Linear(d_model, 3 * d_model),
            nn.Linear(d_model, d_model),
        )
        self.table = nn.Parameter(torch.randn(num_heads, 2 * max_len - 1))

    def attend(self, q, k, v, added):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return (scores + added).softmax(-1) @ v

    def forward(self, x):
        length = x.shape[1]
        three = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.count, -1)).transpose(1, 2) for t in three)
        at = torch.arange(length)
        bias = self.table[:, at - at[:, None] + self.longest - 1]
        causal = torch.full((length, length), -torch.inf).triu(1)
        context = self.attend(q, k, v, (bias + causal)[None])
        return self.out(context.transpose(1, 2).flatten(2))


class TableFused(Table):
    def attend(self, q, k, v, added):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added)


class TableOfOneItem(Table):
    """(L, E), without a batch."""

    def forward(self, x):
        if x.dim() != 2:
            raise ValueError("x must be (L, E)")
        return super().forward(x[None])[0]


@pytest.mark.parametrize("attention", [Table, TableFused, TableOfOneItem])
def test_a_bias_and_a_triangle_may_be_one_tensor(attention):
    report = multihead.check(attention)
    assert report.judgement == "right", str(report)
    assert "position_bias" in {one["name"] for one in report.assumptions}


class LearnedDistances(Heads):
    """A causal layer with a learned number for each distance of a key, and each head."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.relative_attention_bias = nn.Embedding(16, num_heads)

    def distances(self, places):
        return places[:, None] - places

    def forward(self, x):
        q, k, v = self.heads(x)
        places = torch.arange(x.shape[1])
        buckets = self.distances(places).clamp(0, 15)
        bias = self.relative_attention_bias(buckets).permute(2, 0, 1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        bias = bias.masked_fill(later, float("-inf"))
        return self.merged(F.scaled_dot_product_attention(q, k, v, bias))


class DistancesOfLaterKeys(LearnedDistances):
    def distances(self, places):
        return places - places[:, None]


def test_a_learned_bias_that_no_weight_follows_is_named():
    assert multihead.check(LearnedDistances).passed
    assert multihead.check(DistancesOfLaterKeys).cause == "bias_cancels"
