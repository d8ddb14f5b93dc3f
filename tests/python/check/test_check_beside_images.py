# SPDX-License-Identifier: MIT
"""What code takes beside its sequence: an image that reads it, or that it reads, the
masks and the tokens that say what is padding, what calls before have kept."""

import pytest
import torch
from attempts.steps import Attention
from test_check_strays import named
from test_check_unusual import conditions
from torch import nn

import multihead


class ImageReadsPoints(nn.Module):
    """feat0: (B, E, Y, X); feat1: (B, E, N)."""

    power = 0.5

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.query, self.key = nn.Linear(in_dim, out_dim), nn.Linear(in_dim, out_dim)
        self.value, self.out = nn.Linear(in_dim, out_dim), nn.Linear(out_dim, out_dim)

    def attend(self, asking, read):
        q, k, v = self.query(asking), self.key(read), self.value(read)
        weights = (q @ k.mT / q.shape[-1] ** self.power).softmax(-1)
        return self.out(weights @ v)

    def forward(self, feat0, feat1):
        _, _, y, x = feat0.shape
        _, _, _ = feat1.shape
        out = self.attend(feat0.flatten(2).mT, feat1.mT)
        return out.mT.unflatten(2, (y, x)) + feat0


class PointsReadImage(ImageReadsPoints):
    def forward(self, feat0, feat1):
        _, _, _ = feat0.shape
        _, _, _, _ = feat1.shape
        return self.attend(feat0.mT, feat1.flatten(2).mT).mT + feat0


class TokensReadImage(ImageReadsPoints):
    """feat0: (B, N, E); feat1: (B, E, Y, X)."""

    def forward(self, feat0, feat1):
        _, _, _ = feat0.shape
        _, _, _, _ = feat1.shape
        return self.attend(feat0, feat1.flatten(2).mT) + feat0


class PointsReadImageUnscaled(PointsReadImage):
    power = 0.0


@pytest.mark.parametrize("target", [ImageReadsPoints, PointsReadImage, TokensReadImage])
def test_images_beside_sequences(target):
    report = multihead.check(target)
    assert report.judgement in ("right", "right_if"), str(report)
    assert multihead.check(PointsReadImageUnscaled).cause == "scale_missing"


class OfOneHeadEach(nn.Module):
    """Scores are (B, Lq, Lk): a padding mask is (B, 1, Lk)."""

    def __init__(self, d_model=512, n_heads=8, d_k=64):
        super().__init__()
        self.d_k = d_k
        self.query = nn.ModuleList(nn.Linear(d_model, d_k) for _ in range(n_heads))
        self.key = nn.ModuleList(nn.Linear(d_model, d_k) for _ in range(n_heads))
        self.value = nn.ModuleList(nn.Linear(d_model, d_k) for _ in range(n_heads))
        self.out = nn.Linear(n_heads * d_k, d_model)

    def of_head(self, q, k, v, padding_mask):
        scores = q @ k.mT / self.d_k**0.5
        if padding_mask is not None:
            scores = scores.masked_fill(padding_mask == 0, float("-inf"))
        return scores.softmax(-1) @ v

    def forward(self, q, k, v, padding_mask):
        heads = zip(self.query, self.key, self.value)
        outs = (self.of_head(f(q), g(k), h(v), padding_mask) for f, g, h in heads)
        return self.out(torch.cat(list(outs), -1))


class OfOneHeadEachShifted(OfOneHeadEach):
    """It hides the key behind each that is padding."""

    def of_head(self, q, k, v, padding_mask):
        mask = None if padding_mask is None else padding_mask.roll(1, -1)
        return super().of_head(q, k, v, mask)


def test_padding_with_an_axis_of_queries():
    report = multihead.check(OfOneHeadEach)
    assert report.judgement == "right_if", str(report)
    assert "padding_keeps" in conditions(report)
    assert multihead.check(OfOneHeadEachShifted).judgement == "wrong"


class OfRawTokens(Attention):
    """It finds the padding itself, in the tokens that became its input."""

    def __init__(self, d_model, num_heads, pad=0):
        super().__init__(d_model, num_heads)
        self.pad = pad

    def hidden(self, source):
        return (source != self.pad).unsqueeze(1).unsqueeze(1).logical_not()

    def forward(self, embedded, raw):
        q, k, v = self.qkv(embedded)
        scores = self.scores(q, k).masked_fill(self.hidden(raw), -1e20)
        return self.join(scores.softmax(-1) @ v)


def test_tokens_that_say_what_is_padding():
    report = multihead.check(OfRawTokens)
    assert report.judgement in ("right", "right_if"), str(report)
    assert "tokens, of which 0 is padding" in str(report)


SAMPLED = """
import torch
from torch import nn

class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.heads = n_head
        self.key, self.query = nn.Linear(n_embd, n_embd), nn.Linear(n_embd, n_embd)
        self.value, self.proj = nn.Linear(n_embd, n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x, layer_past=None):
        parts = self.query(x), self.key(x), self.value(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        present = torch.stack((k, v))
        if layer_past is not None:
            k, v = (torch.cat(pair, -2) for pair in zip(layer_past, (k, v)))
        scores = q @ k.mT / k.shape[-1] ** 0.5
        if layer_past is None:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.proj(out), present

def sample(layer, x, steps):
    past = []
    for _ in range(steps):
        x, present = layer(x, torch.cat(past, -2) if past else None)
        past.append(present)
"""


def test_callers_that_join_what_calls_return(tmp_path):
    path = tmp_path / "sampled.py"
    path.write_text(SAMPLED)
    report = multihead.check(f"{path}:CausalSelfAttention")
    assert named(report) == [] and report.judgement == "right_if", str(report)
    path = tmp_path / "alone.py"
    path.write_text(SAMPLED.partition("def sample")[0])
    assert named(multihead.check(f"{path}:CausalSelfAttention")) == ["cache_differs"]
