# SPDX-License-Identifier: MIT
"""Heads that attend to something else than the positions of the input: channels, frames,
rows and columns; and what becomes tokens: vectors of an item."""

import torch
from heads import Heads
from torch import nn
from torch.nn import functional as F

import multihead


def conditions(report):
    return [condition["name"] for condition in report.conditions]


class OfChannels(nn.Module):
    """Cross-covariance attention (El-Nouby et al., 2021): channels attend to channels."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def weights(self, scores):
        return scores.softmax(-1)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 4, 1)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature
        out = self.weights(scores) @ v
        return self.proj(out.permute(0, 3, 1, 2).reshape(batch, length, width))


class OfChannelsTurned(OfChannels):
    def weights(self, scores):
        return scores.softmax(-2)


def test_channels_that_attend():
    report = multihead.check(OfChannels)
    assert report.judgement == "right_if", str(report)
    assert "attends_elsewhere" in conditions(report)
    assert not multihead.check(OfChannelsTurned).passed


class OneAfterTheOther(nn.Module):
    """x: (B, T, N, D). Frames attend at each joint, then joints in each frame."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.time = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.space = nn.MultiheadAttention(dim, num_heads, batch_first=True)

    def forward(self, x):
        B, T, N, D = x.shape
        y = x.transpose(1, 2).reshape(B * N, T, D)
        x = x + self.time(y, y, y)[0].view(B, N, T, D).transpose(1, 2)
        y = x.reshape(B * T, N, D)
        return x + self.space(y, y, y)[0].view(B, T, N, D)


class Rows(Heads):
    def forward(self, x):
        return self.merged(F.scaled_dot_product_attention(*self.heads(x)))


class RowsAndColumns(nn.Module):
    """(B, C, H, W): the sum of attention along rows and along columns."""

    def __init__(self, dim, heads):
        super().__init__()
        self.along_w, self.along_h = Rows(dim, heads), Rows(dim, heads)

    def forward(self, x):
        b, c, h, w = x.shape
        rows = self.along_w(x.permute(0, 2, 3, 1).reshape(b * h, w, c))
        columns = self.along_h(x.permute(0, 3, 2, 1).reshape(b * w, h, c))
        rows = rows.view(b, h, w, c).permute(0, 3, 1, 2)
        return rows + columns.view(b, w, h, c).permute(0, 3, 2, 1)


class Frames(Heads):
    """x (B, T * P, D)"""

    def forward(self, x, num_frames, num_patches):
        q, k, v = (
            t.unflatten(2, (num_frames, num_patches)).transpose(2, 3)
            for t in self.heads(x)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.merged(out.transpose(2, 3).flatten(2, 3))


def test_frames_pixels_rows_and_columns():
    for kind in (OneAfterTheOther, RowsAndColumns, Frames):
        report = multihead.check(kind)
        assert report.judgement == "right_if", f"{kind.__name__}\n{report}"
        assert "attends_elsewhere" in conditions(report)


class Fusion(nn.Module):
    """Two vectors of an item, (B, text_dim) and (B, image_dim), attend to each other."""

    def __init__(self, text_dim=24, image_dim=32, dim=16, num_heads=2):
        super().__init__()
        self.text, self.image = nn.Linear(text_dim, dim), nn.Linear(image_dim, dim)
        self.attn = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.head = nn.Linear(dim, 3)

    def tokens(self, *vectors):
        return torch.stack(vectors, 1)

    def pooled(self, x):
        return x.mean(1)

    def forward(self, text, image):
        x = self.tokens(self.text(text), self.image(image))
        return self.head(self.pooled(x + self.attn(x, x, x)[0]))


class FusionOfItems(Fusion):
    def tokens(self, *vectors):
        return torch.stack(vectors, 0)

    def pooled(self, x):
        return x.mean(0)


def test_vectors_that_become_tokens():
    report = multihead.check(Fusion)
    assert report.judgement == "right_if", str(report)
    assert multihead.check(FusionOfItems).cause == "items_mixed"


# ---- Tables of offsets ---------------------------------------------------------------


class InWindow(Heads):
    """(B, ws * ws, dim), with a learned bias for each offset of two pixels."""

    def __init__(self, dim, num_heads, window_size):
        super().__init__(dim, num_heads)
        self.table = nn.Parameter(torch.randn((2 * window_size - 1) ** 2, num_heads))
        y, x = (
            torch.arange(window_size**2).div(window_size, rounding_mode="floor"),
            None,
        )
        x = torch.arange(window_size**2) % window_size
        dy, dx = y[:, None] - y + window_size - 1, x[:, None] - x + window_size - 1
        self.register_buffer("index", dy * self.stride(window_size) + dx)

    def stride(self, window_size):
        return 2 * window_size - 1

    def placed(self, bias):
        return bias.permute(2, 0, 1)

    def forward(self, x):
        q, k, v = self.heads(x)
        bias = self.placed(self.table[self.index])
        return self.merged(F.scaled_dot_product_attention(q, k, v, bias))


class InWindowViewed(InWindow):
    def placed(self, bias):
        return bias.reshape(bias.shape[2], *bias.shape[:2])


class InWindowOfOneSide(InWindow):
    def stride(self, window_size):
        return window_size


class InVolume(Heads):
    """(B, d * h * w, dim), of windows of videos or scans."""

    def __init__(self, dim, num_heads, window_size):
        super().__init__(dim, num_heads)
        d, h, w = window_size[0], window_size[1], window_size[2]
        count = (2 * d - 1) * (2 * h - 1) * (2 * w - 1)
        self.table = nn.Parameter(torch.randn(count, num_heads))
        places = torch.cartesian_prod(*map(torch.arange, window_size))
        offsets = places[:, None] - places + torch.tensor([d, h, w]) - 1
        offsets = offsets * torch.tensor(self.strides(h, w))
        self.register_buffer("index", offsets.sum(-1))

    def strides(self, h, w):
        return (2 * h - 1) * (2 * w - 1), 2 * w - 1, 1

    def forward(self, x):
        q, k, v = self.heads(x)
        bias = self.table[self.index].permute(2, 0, 1)
        return self.merged(F.scaled_dot_product_attention(q, k, v, bias))


def test_tables_of_offsets(monkeypatch):
    for kind in (InWindow, InVolume):
        assert multihead.check(kind).judgement in ("right", "right_if")
    monkeypatch.setattr(InVolume, "strides", lambda self, h, w: (3 * h, 2 * h - 1, 1))
    for kind in (InWindowViewed, InWindowOfOneSide, InVolume):
        report = multihead.check(kind)
        assert report.cause == "table_misread", f"{kind.__name__}\n{report}"
