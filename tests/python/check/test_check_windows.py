# SPDX-License-Identifier: MIT
"""Sliding windows, whatever their size is called: a window is given that binds."""

import re

import pytest
import torch
from heads import Heads
from torch import nn

import multihead


def slide(q, k, v, hidden):
    place = torch.arange(q.shape[-2])
    blocked = hidden(place[:, None] - place)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(blocked, float("-inf"))
    return scores.softmax(-1) @ v


def causal(q, k, v, window_size=64):
    """Causal: each token sees itself and the window_size - 1 tokens before it."""
    return slide(q, k, v, lambda d: (d < 0) | (d >= window_size))


def one_too_many(q, k, v, window_size=64):
    """Causal: each token sees itself and the window_size - 1 tokens before it."""
    return slide(q, k, v, lambda d: (d < 0) | (d > window_size))


def on_both_sides(q, k, v, radius=64):
    """Local attention: position i sees j with |i - j| <= radius."""
    return slide(q, k, v, lambda d: d.abs() > radius)


def nearer(q, k, v, local_size=4):
    """Local attention: position i sees j with |i - j| < local_size."""
    return slide(q, k, v, lambda d: d.abs() >= local_size)


def required(q, k, v, window_size):
    """Causal sliding window."""
    return slide(q, k, v, lambda d: (d < 0) | (d >= window_size))


@pytest.mark.parametrize("function", [causal, on_both_sides, nearer, required])
def test_a_window_of_any_name_is_given_a_size_that_binds(function):
    report = multihead.check(function)
    assert [c["name"] for c in report.conditions] == ["equal_lengths_only"]
    assert re.search(r"(window_size|radius|local_size) 3\b", report.understood[0])


def test_a_window_with_a_key_too_many_is_named():
    assert multihead.check(one_too_many).cause == "window_off_by_one"


def of_the_last(q, k, v, window_size=64):
    """Causal sliding window; the queries are the last of the keys."""
    ahead = k.shape[-2] - q.shape[-2]
    places = torch.arange(q.shape[-2])[:, None] + ahead
    distance = places - torch.arange(k.shape[-2])
    blocked = (distance < 0) | (distance >= window_size)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(blocked, float("-inf"))
    return scores.softmax(-1) @ v


def test_a_window_of_queries_that_are_the_last():
    assert multihead.check(of_the_last).judgement == "right"


class NoWindow(nn.Module):
    """Causal, of at most so many tokens."""

    def __init__(self, dim, heads, context_window=512):
        super().__init__()
        self.inner, self.window = (
            nn.MultiheadAttention(dim, heads, batch_first=True),
            context_window,
        )
        self.register_buffer(
            "later", torch.ones(context_window, context_window).triu(1).bool()
        )

    def forward(self, x):
        x = x[:, -self.window :]
        later = self.later[: x.size(1), : x.size(1)]
        return self.inner(x, x, x, attn_mask=later)[0]


def test_a_longest_context_is_no_window():
    assert multihead.check(NoWindow).judgement == "right"


class LocalAttention(nn.Module):
    """Causal sliding window: each token sees itself and the window_size - 1 tokens
    before it."""

    hides = staticmethod(lambda d, w: (d < 0) | (d >= w))

    def __init__(self, dim, heads, window_size=64):
        super().__init__()
        self.heads, self.w = heads, window_size
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        mixed = slide(q, k, v, lambda d: self.hides(d, self.w))
        return self.out(mixed.transpose(1, 2).flatten(2))


class OneKeyTooMany(LocalAttention):
    __doc__ = LocalAttention.__doc__
    hides = staticmethod(lambda d, w: (d < 0) | (d > w))


def test_windows_that_a_constructor_is_told():
    report = multihead.check(LocalAttention)
    assert report.judgement == "right" and "window_size=3" in str(report)
    assert multihead.check(OneKeyTooMany).cause == "window_off_by_one"


class GemmasWindow(nn.Module):
    """Heads turned in float32, scores with a cap, and a window made of the mask."""

    def __init__(
        self, hidden_size, num_heads, num_kv_heads, head_dim, sliding_window_size=None
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.window = head_dim, sliding_window_size
        inner = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv_proj = nn.Linear(hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def turned(self, x, freqs_cis):
        halves = torch.stack(x.float().chunk(2, -1), -1)
        out = torch.view_as_real(torch.view_as_complex(halves) * freqs_cis)
        return torch.cat(out.unbind(-1), -1).type_as(x)

    def forward(self, hidden_states, freqs_cis, mask):
        """mask: (1, 1, L, L) additive causal mask"""
        sizes = self.num_heads, self.num_kv_heads, self.num_kv_heads
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for t in self.qkv_proj(hidden_states).split(
                [n * self.head_dim for n in sizes], -1
            )
        )
        q, k = self.turned(q, freqs_cis), self.turned(k, freqs_cis)
        k, v = (t.repeat_interleave(sizes[0] // sizes[1], 1) for t in (k, v))
        scores = torch.tanh(q @ k.mT / self.head_dim**0.5 / 50) * 50
        if self.window is not None:
            ones = torch.ones_like(mask)
            near = ones.triu(1 - self.window) * ones.tril(self.window - 1)
            mask = torch.where(near == 1, mask, -2.3819763e38)
        weights = (scores + mask).float().softmax(-1).type_as(q)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


def test_a_window_of_rows_beside_what_is_rounded_on_the_way():
    report = multihead.check(GemmasWindow)
    assert report.judgement == "right_if", str(report)
    assert [c["name"] for c in report.conditions] == ["softcap"], str(report)


class OfGrids(nn.Module):
    """Pixels that stand side / grid_size apart attend to each other (MaxViT)."""

    def __init__(self, in_channels, grid_size=4, num_heads=4):
        super().__init__()
        self.grid_size, self.num_heads = grid_size, num_heads
        self.qkv = nn.Linear(in_channels, 3 * in_channels)
        self.proj = nn.Linear(in_channels, in_channels)

    def put_back(self, x):
        return x.permute(0, 3, 1, 4, 2, 5)

    def forward(self, x):
        B, C, H, W = x.shape
        side, rows, columns = self.grid_size, H // self.grid_size, W // self.grid_size
        grids = x.view(B, C, side, rows, side, columns).permute(0, 3, 5, 2, 4, 1)
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in self.qkv(grids.reshape(-1, side * side, C)).chunk(3, -1)
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        out = self.proj((weights @ v).transpose(1, 2).flatten(2))
        out = self.put_back(out.view(B, rows, columns, side, side, C))
        return x + out.reshape(B, H, W, C).permute(0, 3, 1, 2)


class GridsAsWindows(OfGrids):
    def put_back(self, x):
        return x.permute(0, 1, 3, 2, 4, 5)


def test_grids_are_put_back_where_they_were_cut():
    report = multihead.check(OfGrids)
    assert [c["name"] for c in report.conditions] == ["residual_inside"], str(report)
    assert multihead.check(GridsAsWindows).cause == "windows_misplaced"


class Streaming(Heads):
    """window: how many frames ahead each one sees, beside all before."""

    def __init__(self, dim, num_heads, window=2):
        super().__init__(dim, num_heads)
        self.window = window

    def forward(self, x):
        q, k, v = self.heads(x)
        place = torch.arange(x.shape[1])
        seen = place[None] <= place[:, None] + self.window
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
        return self.merged(scores.softmax(-1) @ v)


def test_a_window_that_is_said_to_lie_ahead():
    report = multihead.check(Streaming)
    assert report.judgement != "wrong", str(report)
