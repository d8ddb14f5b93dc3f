# SPDX-License-Identifier: MIT
"""What arguments are, told by what the code does with them: settings in settings, what may
be None, widths by default, numbers of documents; and batches that alone do not raise."""

from dataclasses import dataclass, field

import torch
from heads import Heads
from torch import nn
from torch.nn import functional as F

import multihead


@dataclass(frozen=True)
class OfAttention:
    width: int = 32
    heads: int = 4


@dataclass
class Settings:
    attn: OfAttention = field(default_factory=OfAttention)


class InSettings(nn.Module):
    """frames (B, T, width), n_frames (B,) valid counts"""

    def __init__(self, cfg: Settings):
        super().__init__()
        self.heads, width = cfg.attn.heads, cfg.attn.width
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, frames, n_frames):
        valid = torch.arange(frames.shape[1]) < n_frames[:, None]
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(frames).chunk(3, -1)
        )
        out = F.scaled_dot_product_attention(q, k, v, valid[:, None, None])
        return self.out(out.transpose(1, 2).flatten(2)) * valid.unsqueeze(-1)


def test_settings_in_settings_get_our_sizes():
    report = multihead.check(InSettings)
    assert report.passed, str(report)
    assert "heads=8" in str(report)


class MayBeNone(Heads):
    def forward(self, x, positive, negative):
        q, k, v = self.heads(x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)
        out = self.merged(F.scaled_dot_product_attention(q, k, v, ~later))
        if positive is not None and negative is not None:
            return out, positive, negative
        return out


class Edges(Heads):
    """What it asks for may be None, and is a mask by what it is used for."""

    def forward(self, x, edges):
        q, k, v = self.heads(x)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        if edges is not None:
            weights = weights.masked_fill(edges == 0, 0.0)
        return self.merged(weights @ v)


def test_what_is_asked_for_may_be_none():
    assert multihead.check(MayBeNone).cause == "causal_inverted"
    assert not multihead.check(Edges).passed


class Spectra(nn.Module):
    def __init__(self, n_mels=40, dim=64, heads=4):
        super().__init__()
        self.inp, self.attn = nn.Linear(n_mels, dim), Plain(dim, heads)

    def forward(self, mel):
        return self.attn(self.inp(mel))


class Plain(Heads):
    def forward(self, x):
        return self.merged(F.scaled_dot_product_attention(*self.heads(x)))


def test_widths_of_inputs_by_default():
    report = multihead.check(Spectra)
    assert report.judgement == "right_if", str(report)
    assert "n_mels=48" in str(report)


class PackedLayer(Heads):
    """doc_ids (B, T): a token sees the earlier ones of its document."""

    def mask(self, doc_ids):
        same = doc_ids.unsqueeze(-1) == doc_ids.unsqueeze(-2)
        place = torch.arange(doc_ids.shape[-1])
        return (same & (place[:, None] >= place)).unsqueeze(1)

    def forward(self, x, doc_ids):
        out = F.scaled_dot_product_attention(*self.heads(x), self.mask(doc_ids))
        return self.merged(out)


class PackedEither(PackedLayer):
    def mask(self, doc_ids):
        same = doc_ids.unsqueeze(-1) == doc_ids.unsqueeze(-2)
        place = torch.arange(doc_ids.shape[-1])
        return (same | (place[:, None] >= place)).unsqueeze(1)


def test_documents_that_a_method_compares():
    assert multihead.check(PackedLayer).judgement in ("right", "right_if")
    assert multihead.check(PackedEither).cause == "documents_mixed"


class ItemsAsHeads(nn.Module):
    def __init__(self, hidden_dim, num_heads, dim_head):
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(hidden_dim, num_heads * dim_head) for _ in range(3)
        )
        self.out = nn.Linear(num_heads * dim_head, hidden_dim)
        self.num_heads = num_heads

    def cut(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, query, key, value):
        q, k, v = (
            self.cut(self.q(query)),
            self.cut(self.k(key)),
            self.cut(self.v(value)),
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v.transpose(0, 1)).transpose(1, 2).flatten(2))


def test_as_many_items_as_heads():
    report = multihead.check(ItemsAsHeads)
    assert report.judgement == "wrong" and "as many items as heads" in str(report)


class AlibiHeadByHead(nn.Module):
    """Cut head by head, as Bloom is, and causal."""

    sign = 1.0

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        slopes = 0.5 ** torch.arange(1.0, num_heads + 1)
        self.register_buffer("slopes", slopes[:, None, None])

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3, -1)).unbind(-2)
        place = torch.arange(x.shape[1])
        far = place - place[:, None]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        scores = scores + self.sign * self.slopes * far
        scores = scores.masked_fill(far > 0, float("-inf"))
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return self.dense(out.flatten(2))


class AlibiRises(AlibiHeadByHead):
    """With the bias of ALiBi."""

    sign = -1.0


def test_a_bias_beside_heads_that_are_cut_one_by_one():
    report = multihead.check(AlibiHeadByHead)
    assert report.judgement in ("right", "right_if"), str(report)
    assert multihead.check(AlibiRises).cause == "alibi_rises"


class Unread(nn.Module):
    """caption: (B, T, E) words so far; image_features: (B, P, E) of an encoder"""

    def __init__(self, emb_dim, n_heads):
        super().__init__()
        self.own = nn.MultiheadAttention(emb_dim, n_heads, batch_first=True)
        self.cross = nn.MultiheadAttention(emb_dim, n_heads, batch_first=True)

    def forward(self, caption, image_features):
        x = caption + self.own(caption, caption, caption)[0]
        return x + self.cross(x, x, x)[0]


def test_a_context_that_nothing_reads_whatever_asks_it():
    assert multihead.check(Unread).cause == "context_unread"


class AtPositions(Heads):
    """Heads that are turned by numbers of positions, which must be given."""

    times = 1

    def rotated(self, x, positions):
        half = x.shape[-1] // 2
        angles = positions[:, None, :, None] / 100 ** (torch.arange(half) / half)
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x: torch.Tensor, positions: torch.Tensor):
        q, k, v = self.heads(x)
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        scores = self.times * q @ k.mT / q.shape[-1] ** 0.5
        return self.merged(scores.softmax(-1) @ v)


class AtPositionsTwiceAsLarge(AtPositions):
    times = 2


def test_numbers_of_positions_that_must_be_given():
    report = multihead.check(AtPositions)
    assert report.judgement.startswith("right"), str(report)
    assert multihead.check(AtPositionsTwiceAsLarge).judgement == "wrong"


class WithATable(Heads):
    """A learned bias for each distance, of which rel_dist are known."""

    def __init__(self, dim: int, num_heads: int, rel_dist: int):
        super().__init__(dim, num_heads)
        self.table = nn.Embedding(rel_dist, num_heads)

    def forward(self, x):
        q, k, v = self.heads(x)
        places = torch.arange(q.shape[-2])
        assert len(places) <= self.table.num_embeddings
        bias = self.table((places[:, None] - places).abs()).permute(2, 0, 1)
        scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
        return self.merged(scores.softmax(-1) @ v)


def test_how_many_rows_a_table_has():
    report = multihead.check(WithATable)
    assert report.judgement.startswith("right"), str(report)
    assert "rel_dist=" in str(report)


class OfAllKeys(nn.Module):
    """key_dim is how wide the keys of all heads are."""

    def __init__(self, inp: int, num_heads: int, key_dim: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, key_dim // num_heads
        self.q, self.k = nn.Linear(inp, key_dim), nn.Linear(inp, key_dim)
        self.v, self.o = nn.Linear(inp, key_dim), nn.Linear(key_dim, inp)

    def forward(self, x):
        cut = (
            f(x).unflatten(-1, (self.num_heads, -1)) for f in (self.q, self.k, self.v)
        )
        q, k, v = (t.transpose(1, 2) for t in cut)
        weights = (q @ k.mT / self.head_dim**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def test_a_width_that_heads_divide_is_that_of_all():
    assert multihead.check(OfAllKeys).judgement == "right"
