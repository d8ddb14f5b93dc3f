# SPDX-License-Identifier: MIT
"""Blocks whose heads are right, beside layers that are not judged: features of one
position that a view takes apart, and projections of which nothing is left."""

import pytest
import torch
from test_check_strays import named
from torch import nn
from torch.nn import functional as F

import multihead


class OfChannels(nn.Module):
    """x: (B, C, L)"""

    def __init__(self, channels: int, num_heads: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.mha = nn.MultiheadAttention(channels, num_heads, batch_first=True)
        self.wide = nn.Linear(channels, 2 * channels)
        self.narrow = nn.Linear(2 * channels, channels)

    def tokens(self, x):
        return x.transpose(1, 2)

    def back(self, tokens, shape):
        return tokens.transpose(1, 2)

    def forward(self, x):
        # x is (B, C, L)
        h = self.norm(self.tokens(x))
        h = h + self.mha(h, h, h)[0]
        return self.back(h + self.narrow(F.gelu(self.wide(h))), x.shape)


class ByView(OfChannels):
    """x: (B, C, L)"""

    def tokens(self, x):
        return x.contiguous().view(x.shape[0], x.shape[2], x.shape[1])

    def back(self, tokens, shape):
        return tokens.reshape(shape)


class OnlyBack(OfChannels):
    """x: (B, C, L)"""

    def back(self, tokens, shape):
        return tokens.reshape(shape)


class WithPlaces(OfChannels):
    """x: (B, C, L), to which something is added for each position."""

    def tokens(self, x):
        at = torch.linspace(-1, 1, x.shape[2]).to(x)[:, None]
        return x.transpose(1, 2) + at


class WithNeighbours(OfChannels):
    """x: (B, C, L)"""

    def __init__(self, channels: int, num_heads: int):
        super().__init__(channels, num_heads)
        self.near = nn.Conv1d(channels, channels, 3, padding=1, groups=channels)

    def tokens(self, x):
        return (x + self.near(x)).transpose(1, 2)


@pytest.mark.parametrize("kind", [ByView, OnlyBack])
def test_a_view_for_a_transpose_is_seen_beside_other_layers(kind):
    report = multihead.check(kind)
    assert "positions_scrambled" in named(report), str(report)


@pytest.mark.parametrize("kind", [OfChannels, WithPlaces, WithNeighbours])
def test_blocks_that_are_right_or_know_an_order_are_not_accused(kind):
    report = multihead.check(kind)
    assert named(report) == [] and report.judgement != "wrong", str(report)


class Fused(nn.Module):
    """A block of a vision transformer."""

    parts = (0, 1, 2)

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.net = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, x):
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (
            parts[i].unflatten(-1, (self.heads, -1)).transpose(1, 2) for i in self.parts
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.net(self.second(x))


class KeysTwice(Fused):
    parts = (0, 1, 1)


class Apart(Fused):
    """The same of three layers, whose names are behind another word."""

    of_scores = "value"

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        del self.qkv
        self.att_query_linear = nn.Linear(dim, dim)
        self.att_key_linear = nn.Linear(dim, dim)
        self.att_value_linear = nn.Linear(dim, dim)

    def forward(self, x):
        layers = self.att_query_linear, self.att_key_linear, self.att_value_linear
        q, k, v = (
            f(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in layers
        )
        scores = q @ (v if self.of_scores == "value" else k).mT / q.shape[-1] ** 0.5
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.net(self.second(x))


class ApartAndRight(Apart):
    of_scores = "key"


@pytest.mark.parametrize("kind", [KeysTwice, Apart])
def test_a_projection_of_which_nothing_is_left(kind):
    report = multihead.check(kind)
    assert named(report) == ["projection_unused"], str(report)


@pytest.mark.parametrize("kind", [Fused, ApartAndRight])
def test_blocks_that_use_all_they_project(kind):
    assert multihead.check(kind).judgement == "right_if"


class OfFrames(nn.Module):
    """Attention of each pixel over the frames of a video, (B, C, T, H, W)."""

    def __init__(self, channels: int, num_heads: int = 4):
        super().__init__()
        self.count = num_heads
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def pixels(self, x):
        return x.permute(0, 3, 4, 2, 1)

    def forward(self, x):
        B, C, T, H, W = x.shape
        y = self.qkv(self.pixels(x).reshape(B * H * W, T, C))
        q, k, v = y.view(B * H * W, T, 3, self.count, -1).permute(2, 0, 3, 1, 4)
        y = ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2)
        y = self.proj(y.reshape(B * H * W, T, C))
        return x + y.view(B, H, W, T, C).permute(0, 4, 3, 1, 2)


class OfRows(OfFrames):
    def pixels(self, x):
        return x.permute(0, 2, 3, 4, 1)


def test_the_pixels_of_a_video_that_a_view_exchanges():
    assert named(multihead.check(OfRows)) == ["positions_scrambled"]
    assert multihead.check(OfFrames).judgement == "right_if"
