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


class Gated(Attention):
    """What it multiplies is for somebody else to say."""

    def forward(self, x, gamma):
        q, k, v = self.qkv(x)
        return (gamma + 1) * self.join(self.scores(q, k).softmax(-1) @ v)


def test_a_gate_that_nobody_understands_is_no_context():
    report = multihead.check(Gated)
    assert report.judgement == "not_judged", str(report)


class OfTheLast(nn.Module):
    """(B, L, E); its layers take (L, B, E), and its head the last position."""

    def __init__(self, d_model, nhead):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d_model, nhead, 4 * d_model)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, 1)

    def forward(self, x):
        out = self.encoder(x.permute(1, 0, 2))
        return self.head(out[-1])


def test_the_last_position_may_be_chosen():
    assert named(multihead.check(OfTheLast)) == []


def of_shared_keys(q, k, v):
    """q: (B, H, L, D); k, v: (B, L, D)."""
    scores = torch.einsum("bhid,bjd->bhij", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v)


def of_shared_keys_unscaled(q, k, v):
    scores = torch.einsum("bhid,bjd->bhij", q, k)
    return torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v)


def test_keys_that_all_heads_share():
    assert multihead.check(of_shared_keys).judgement == "right"
    assert multihead.check(of_shared_keys_unscaled).cause == "scale_missing"


def on_a_cache(query, key, value, past_key_value=None, is_causal=False):
    """The queries are the last of all tokens."""
    if past_key_value is not None:
        key = torch.cat([past_key_value[0], key], 1)
        value = torch.cat([past_key_value[1], value], 1)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        later = ~seen.tril(seen.shape[1] - seen.shape[0])
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ value


def on_a_cache_one_early(query, key, value, past_key_value=None, is_causal=False):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(seen.triu(0), float("-inf"))
    return scores.softmax(-1) @ value


def test_with_a_cache_queries_are_the_last_tokens():
    report = multihead.check(on_a_cache)
    assert report.judgement in ("right", "right_if"), str(report)
    assert multihead.check(on_a_cache_one_early).cause == "causal_misses_diagonal"


class OfVectors(nn.Module):
    """Both are of shape (batch_size, dim): there is one key."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.attend = nn.MultiheadAttention(dim, num_heads, batch_first=True)

    def forward(self, picture, sound):
        query, key = picture.unsqueeze(1), sound.unsqueeze(1)
        return self.attend(query, key, key)[0].squeeze(1)


def test_one_vector_for_each_item_is_one_key():
    assert named(multihead.check(OfVectors)) == ["softmax_of_one"]
