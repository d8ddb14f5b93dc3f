# SPDX-License-Identifier: MIT
"""What a check spends, on calls and on searches for faults, and what it then says."""

import json
import time

import torch
import torch.nn.functional as F
from torch import nn

import multihead
from multihead._library import diagnosis
from multihead.check.sandbox.guard import Guard


def unexplained() -> dict[str, torch.Tensor]:
    """A run of something that is not attention."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "query": (2, 5, 8),
        "key": (2, 7, 8),
        "value": (2, 7, 8),
        "out": (2, 5, 8),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def explained(**facts: str) -> dict:
    return json.loads(diagnosis().explain([unexplained()], [facts]))


def test_a_search_says_what_it_spent_and_that_it_was_cut_short():
    whole, part = explained(), explained(search_effort="0.001")
    assert not any(r["name"] == "search_cut_short" for r in whole["remarks"])
    assert any(r["name"] == "search_cut_short" for r in part["remarks"])
    assert 0.001 <= part["effort"] < 0.002 < whole["effort"] <= 1.1
    assert explained()["effort"] == whole["effort"]  # counted, not timed


def test_a_share_of_the_effort_that_is_none():
    for text in ("0", "1.5", "much"):
        try:
            explained(search_effort=text)
        except ValueError as error:
            assert "search_effort must be a number above 0" in str(error)
        else:
            raise AssertionError(text)


def test_no_call_takes_longer_than_is_left_for_it():
    with Guard(20) as guard:
        start = time.monotonic()
        with guard.each_at_most(0.3):
            (finding,) = guard.call(time.sleep, 15).findings
        assert finding.name == "hangs"
        assert "0.3 s" in finding.sentence
        assert time.monotonic() - start < 5
        assert guard.call(time.sleep, 0.5).error is None


class OfOneWidth(nn.Module):
    """It is constructed in any width, and runs in one."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, n_heads, batch_first=True)

    def forward(self, x):
        assert x.shape[-1] == 8, "it runs in a width of 8"
        return self.attention(x, x, x)[0]


def test_what_is_said_to_be_constructed_is_what_was_judged():
    report = multihead.check(OfOneWidth)
    assert report.cause is None, str(report)
    assert "OfOneWidth(d_model=8, n_heads=2)" in report.understood


class Slow(nn.Module):
    """Larger ones take longer than a person waits."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        if d_model > 48:
            time.sleep(60)

    def forward(self, x):
        raise ValueError("it takes nothing")


def test_a_constructor_that_is_slow_in_other_sizes_ends_no_check():
    start = time.monotonic()
    report = multihead.check(Slow)
    assert time.monotonic() - start < 15
    assert "it takes nothing" in report.findings[0].sentence, str(report)


class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale = config.scale

    def forward(self, q, k, v):
        return (q @ k.mT / self.scale).softmax(-1) @ v


class OfAScale(nn.Module):
    """The scale is one of its settings, which another class divides by."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.qkv = nn.Linear(config.d_emb, 3 * config.d_emb)
        self.out = nn.Linear(config.d_emb, config.d_emb)
        self.inner = Inner(config)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        return self.out(self.inner(q, k, v).transpose(1, 2).flatten(2))


def test_a_configuration_has_the_scale_that_the_text_asks_for():
    report = multihead.check(OfAScale)
    assert report.judgement == "right", str(report)


class OfBroadcastMatrices(nn.Module):
    """Matrices of each head, with an axis for the batch."""

    def __init__(self, d_model, h):
        super().__init__()
        shape = h, 1, d_model, d_model // h
        self.queries, self.keys, self.values = (
            nn.Parameter(torch.randn(shape) / d_model**0.5) for _ in range(3)
        )
        self.output = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (x @ w for w in (self.queries, self.keys, self.values))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.output(out.permute(1, 2, 0, 3).flatten(2))


def test_matrices_of_heads_that_broadcast_over_the_batch():
    report = multihead.check(OfBroadcastMatrices)
    assert report.cause is None, str(report)
    assert report.judgement != "not_judged", str(report)


class OfKeysAsTheyMeet(nn.Module):
    """Keys come as (B, H, D, L)."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.scale = (d_model // n_heads) ** -0.5

    def forward(self, q, k, v):
        return torch.softmax(torch.matmul(q, k) * self.scale, dim=-1) @ v


def test_keys_that_come_transposed():
    report = multihead.check(OfKeysAsTheyMeet)
    assert report.judgement != "not_judged", str(report)
    assert report.cause is None, str(report)
    assert "k transposed" in report.understood


class OfSquares(nn.Module):
    """Attention over the pixels of an image that is as high as it is wide."""

    def __init__(self, dim, fmap_size, heads):
        super().__init__()
        self.height, self.width = fmap_size[0], fmap_size[1]
        assert self.height == self.width, "a square"
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x):
        b, c, h, w = x.shape
        assert (h, w) == (self.height, self.width)
        rows = x.flatten(2).transpose(1, 2)
        out = self.attention(rows, rows, rows)[0]
        return out.transpose(1, 2).reshape(b, c, h, w)


def test_an_image_that_has_to_be_a_square():
    report = multihead.check(OfSquares)
    assert report.judgement == "right", str(report)


class OfOneItem(nn.Module):
    """One query for each item, (B, E), beside (B, L, E): without a batch another call
    runs, in which all queries see all keys."""

    def __init__(self, input_dim, num_heads):
        super().__init__()
        self.h = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (
            nn.Linear(input_dim, input_dim) for _ in range(4)
        )

    def forward(self, target_item, history_sequence):
        q, k = self.W_q(target_item), self.W_k(history_sequence)
        v = self.W_v(history_sequence)
        items = len(q)
        q, k, v = (
            t.view(items, -1, self.h, t.size(-1) // self.h).transpose(1, 2)
            for t in (q, k, v)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.W_o(out.transpose(1, 2).reshape(items, -1))


def test_other_forms_are_tried_where_only_a_call_without_a_batch_runs():
    report = multihead.check(OfOneItem)
    assert report.judgement == "right", str(report)
