# SPDX-License-Identifier: MIT
"""What models of images have: channels first, pooling, windows, dropout of channels."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from test_check_unusual import conditions
from torch import nn

import multihead


@functools.cache
def checked(target):
    return multihead.check(target, allow="all")


class OfAnImage(nn.Module):
    """x (B, C, H, W), by convolutions of 1×1, heads as (H, 3, D) of the channels."""

    def __init__(
        self,
        dim,
        dim_head=32,
        rel_pos_cls=None,
        attn_drop=0.0,
        proj_drop=0.0,
    ):
        super().__init__()
        self.num_heads = dim // dim_head
        self.dim_head = dim_head
        self.qkv = nn.Conv2d(dim, 3 * dim, 1)
        self.rel_pos = rel_pos_cls(num_heads=self.num_heads) if rel_pos_cls else None
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj, self.proj_drop = nn.Conv2d(dim, dim, 1), nn.Dropout(proj_drop)
        self.scale = dim_head**-0.5

    def forward(self, x):
        B, C, H, W = x.shape
        parts = self.qkv(x).view(B, self.num_heads, self.dim_head * 3, -1)
        q, k, v = parts.chunk(3, dim=2)
        weights = ((q.mT * self.scale) @ k).softmax(-1)
        out = v @ self.attn_drop(weights).mT
        return self.proj_drop(self.proj(out.reshape(B, C, H, W)))


class OfAnImageUnscaled(OfAnImage):
    def __init__(self, dim, dim_head=32, rel_pos_cls=None, attn_drop=0.0):
        super().__init__(dim, dim_head, rel_pos_cls, attn_drop)
        self.scale = 1.0


class DropsPositionsLast(OfAnImage):
    """The output is dropped as (B, C, L), before it is an image again."""

    def forward(self, x):
        B, C, H, W = x.shape
        parts = self.qkv(x).view(B, self.num_heads, self.dim_head * 3, -1)
        q, k, v = parts.chunk(3, dim=2)
        weights = self.attn_drop(((q.mT * self.scale) @ k).softmax(-1))
        out = (v @ weights.mT).reshape(B, C, H, W)
        return self.proj_drop(self.proj(out).flatten(2)).view(B, C, H, W)


class DropsChannels(nn.Module):
    """Whole channels of the output are dropped."""

    def __init__(self, dim, head_dim=8, drop=0.0):
        super().__init__()
        self.heads, self.qkv = dim // head_dim, nn.Conv2d(dim, dim * 3, 1)
        self.proj, self.drop = nn.Conv2d(dim, dim, 1), nn.Dropout2d(drop)

    def forward(self, x):
        B, C, H, W = x.shape
        parts = self.qkv(x).reshape(B, 3, self.heads, C // self.heads, -1)
        q, k, v = parts.permute(1, 0, 2, 4, 3)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.drop(self.proj(out.mT.reshape(B, C, H, W)))


class ReadsTheRate(nn.Module):
    """The layer of dropout is not called: PyTorch is told its rate."""

    fused = True

    def __init__(self, dim, dim_head=32, bias=True, attn_drop=0.0):
        super().__init__()
        self.heads = dim // dim_head
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(attn_drop)

    def forward(self, x):
        cut = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = cut
        if self.fused:
            rate = self.attn_drop.p if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        else:
            scores = q @ k.mT / math.sqrt(q.size(-1))
            out = self.attn_drop(scores.softmax(-1)) @ v
        return self.proj(out.transpose(1, 2).flatten(2))


class RefusesARate(ReadsTheRate):
    """What it is constructed without cannot be missed."""

    def __init__(self, dim, dim_head=32, bias=True, attn_drop=0.0):
        assert attn_drop == 0.0, "no dropout yet"
        super().__init__(dim, dim_head, bias)


class OfAnotherOrItself(nn.Module):
    """`m`, one letter, is a sequence."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, m=None):
        m = m if m is not None else x
        q, k, v = (
            p(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p, t in ((self.q, x), (self.k, m), (self.v, m))
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.o(out.transpose(1, 2).flatten(2))


class WithAMaskOfPositions(ReadsTheRate):
    """Read only where there is a bias, which there is not."""

    bias = None

    def forward(self, x, pos_mask=None):
        assert self.bias is None or pos_mask is not None
        return super().forward(x)


@pytest.mark.parametrize(
    "kind",
    [
        OfAnImage,
        DropsPositionsLast,
        DropsChannels,
        ReadsTheRate,
        RefusesARate,
        OfAnotherOrItself,
        WithAMaskOfPositions,
    ],
)
def test_right_ones(kind):
    report = checked(kind)
    assert report.passed, str(report)


def test_a_width_of_heads_that_divides_the_channels():
    assert "dim_head=6" in " ".join(checked(OfAnImage).understood)
    assert checked(OfAnImageUnscaled).cause == "scale_missing"


def test_another_sequence_of_one_letter():
    cases = [case["name"] for case in checked(OfAnotherOrItself).cases]
    assert "self-attention" in cases and not any("mask (" in name for name in cases)


class NeverDrops(ReadsTheRate):
    fused = False

    def forward(self, x):
        self.attn_drop.eval()
        return super().forward(x)


def test_a_rate_that_is_given_and_not_used():
    assert checked(NeverDrops).cause == "dropout_missing"


class OverChannels(nn.Module):
    """Each channel of a head attends to the others."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.heads, self.qkv = num_heads, nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        cut = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = cut
        weights = (q.mT @ k / math.sqrt(x.size(1))).softmax(-1)
        return self.proj((weights @ v.mT).mT.transpose(1, 2).flatten(2))


def test_channels_that_attend_are_judged_as_they_meet():
    report = checked(OverChannels)
    assert report.passed, str(report)
    assert "attends_elsewhere" in {one["name"] for one in report.conditions}


class Pools(OfAnImage):
    """One vector for each image."""

    def forward(self, x):
        return super().forward(x).mean((2, 3))


class Halves(OfAnImage):
    """Every second position."""

    def forward(self, x):
        return super().forward(x)[:, :, ::2, ::2]


def test_of_another_kind():
    report = checked(Halves)
    assert report.judgement == "not_judged" and report.cause == "pools", str(report)


class PoolsUnscaled(OfAnImageUnscaled):
    def forward(self, x):
        return super().forward(x).mean((2, 3))


class PoolsByAQuery(nn.Module):
    """The mean asks, as in the attention pooling of CLIP (Radford et al., 2021)."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def scores(self, q, k):
        return q @ k.mT / math.sqrt(q.size(-1))

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([x.mean(1, keepdim=True), x], 1)
        parts = (self.q(x[:, :1]), *self.kv(x).chunk(2, -1))
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in parts)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.proj((self.scores(q, k).softmax(-1) @ v).flatten(1))


class PoolsByAQueryUnscaled(PoolsByAQuery):
    """Whether a query of its own is meant to be scaled, nothing tells."""

    def scores(self, q, k):
        return q @ k.mT


@pytest.mark.parametrize("kind", [Pools, PoolsByAQuery])
def test_the_heads_of_what_pools_are_judged(kind):
    report = multihead.check(kind)
    assert report.judgement == "right_if", str(report)
    assert conditions(report) == ["layers_beside"]
    assert "what pools its positions" in " ".join(str(report).split())


def test_what_is_wrong_before_it_pools():
    assert checked(PoolsUnscaled).causes == ["scale_missing"]
    report = checked(PoolsByAQueryUnscaled)
    assert report.judgement == "not_judged" and report.cause == "pools", str(report)


def ignores_padding(q, k, v, mask):
    """mask (B, Lk): True = blocked."""
    scores = (q @ k.mT / math.sqrt(q.size(-1))).float()
    return scores.softmax(-1).to(q.dtype) @ v


def test_what_adds_nothing_in_float32_is_no_number():
    assert checked(ignores_padding).cause in ("mask_ignored", "padding_ignored")


class InWindows(nn.Module):
    """Squares of an image attend to themselves; what is left at its sides is padded."""

    def __init__(self, dim, num_heads=8, ws=1):
        assert ws != 1
        super().__init__()
        self.heads, self.ws = num_heads, ws
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x, size):
        B, N, C = x.shape
        H, W = size
        below, beside = -H % self.ws, -W % self.ws
        x = F.pad(x.view(B, H, W, C), (0, 0, 0, beside, 0, below))
        rows, columns = (H + below) // self.ws, (W + beside) // self.ws
        x = x.view(B, rows, self.ws, columns, self.ws, C).transpose(2, 3)
        cut = self.qkv(x.reshape(-1, self.ws**2, C)).unflatten(-1, (3, self.heads, -1))
        q, k, v = cut.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        out = out.reshape(B, rows, columns, self.ws, self.ws, C).transpose(2, 3)
        out = out.reshape(B, H + below, W + beside, C)[:, :H, :W]
        return self.proj(out.reshape(B, N, C))


def test_an_image_that_is_one_window():
    report = checked(InWindows)
    assert report.passed, str(report)
    assert "121 queries" in [case["name"] for case in report.cases]
