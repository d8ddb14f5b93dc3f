# SPDX-License-Identifier: MIT
"""How `check` finds the shapes in which code takes its tensors and masks."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead


def of_one_head_at_a_time(q, k, v, d_k, mask=None):
    """Attention by itself, which is told how wide a head is."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
    return scores.softmax(-1) @ v


def of_features_first(query, key, value):
    """(B, D, H, L), as convolutions along a line leave them."""
    scores = torch.einsum("bdhn,bdhm->bhnm", query, key) / query.shape[1] ** 0.5
    weights = scores.softmax(-1)
    return torch.einsum("bhnm,bdhm->bdhn", weights, value), weights


class Layers(nn.Module):
    def __init__(self, dim, num_heads, dropout=0.1):
        super().__init__()
        self.heads, self.dropout = num_heads, nn.Dropout(dropout)
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(dim, dim))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def attend(self, q, k, v):
        q, k, v = (
            self.split(f(x))
            for f, x in ((self.query, q), (self.key, k), (self.value, v))
        )
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        out = self.dropout(scores.softmax(-1)) @ v
        return self.dropout(self.out(out.transpose(-3, -2).flatten(-2)))


class OfFourAxes(Layers):
    """Nothing but its refusal says that it wants an axis more."""

    def forward(self, x):
        b, *_ = x.reshape(x.size(0), x.size(1), -1, self.query.in_features).shape
        if x.dim() != 4:
            raise ValueError("wrong number of dimensions")
        return self.attend(x, x, x)


class OfOneQuery(Layers):
    def forward(self, target, history):
        batch, _, width = history.shape
        asked = target.view(batch, 1, width)
        return self.attend(asked, history, history).squeeze(1)


class OfHeadsBeforeItems(nn.Module):
    """Heads are folded into the batch with the first of all items in front, and so
    are the weights that it returns, beside what is dropped."""

    def __init__(self, n_head, d_model, dropout=0.1):
        super().__init__()
        self.heads = n_head
        self.w_q, self.w_k, self.w_v = (nn.Linear(d_model, d_model) for _ in range(3))
        self.fc, self.norm = nn.Linear(d_model, d_model), nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, q, k, v, mask=None):
        size, length, _ = q.shape
        parts = (self.w_q(q), self.w_k(k), self.w_v(v))
        a, b, c = (torch.cat(p.chunk(self.heads, -1)) for p in parts)
        scores = a @ b.transpose(1, 2) / a.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask.repeat(self.heads, 1, 1), -torch.inf)
        weights = self.dropout(scores.softmax(-1))
        merged = torch.cat((weights @ c).chunk(self.heads), -1)
        return self.norm(self.dropout(self.fc(merged)) + q), weights


class DroppedHeadByHead(nn.Module):
    """No matrices; each head drops of what it returns."""

    def __init__(self, n_heads, dropout=0.1):
        super().__init__()
        self.heads, self.dropout = n_heads, nn.Dropout(dropout)

    def forward(self, q, k, v):
        found = []
        for a, b, c in zip(*(x.chunk(self.heads, -1) for x in (q, k, v))):
            weights = (a @ b.transpose(1, 2) / a.shape[-1] ** 0.5).softmax(-1)
            found.append(self.dropout(weights @ c))
        return torch.cat(found, -1)


class WithKeysBeside(Layers):
    """It returns keys and values for a cache, which may look like weights."""

    def __init__(self, d_model, n_heads, n_kv_heads):
        super().__init__(d_model, n_heads)
        self.groups = n_kv_heads
        wide = d_model // n_heads * n_kv_heads
        self.key, self.value = nn.Linear(d_model, wide), nn.Linear(d_model, wide)

    def forward(self, x):
        k, v = (
            f(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
            for f in (self.key, self.value)
        )
        q = self.split(self.query(x))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2)), k, v


class WithTables(Layers):
    """Rotary positions of pairs, from tables with a number for each pair."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)

    def forward(self, x, freqs_cos, freqs_sin):
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        assert freqs_cos.shape == (x.shape[1], q.shape[-1] // 2)
        q, k = (self.turned(t, freqs_cos, freqs_sin) for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))

    def turned(self, x, cos, sin):
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


@pytest.mark.parametrize(
    "target",
    [
        of_one_head_at_a_time,
        of_features_first,
        OfFourAxes,
        OfOneQuery,
        OfHeadsBeforeItems,
        DroppedHeadByHead,
        WithKeysBeside,
        WithTables,
    ],
)
def test_shapes_that_are_found(target):
    report = multihead.check(target)
    assert report.judgement in ("right", "right_if"), str(report)


class OfWeightsByHead(OfHeadsBeforeItems):
    """Drops, and returns, in the order in which the rows are; what it adds is wrong."""

    def forward(self, q, k, v, mask=None):
        out, weights = super().forward(q, k, v, mask)
        return out, weights / 2


def test_rows_of_heads_before_items_are_said():
    report = multihead.check(OfHeadsBeforeItems)
    assert "heads_before_items" in [a["name"] for a in report.assumptions]
    assert multihead.check(OfWeightsByHead).judgement == "wrong"


class Settings:
    attention: str
    hidden_size: int = 64
    num_heads: int = 4


class OfAKind(Layers):
    def __init__(self, config):
        super().__init__(config.hidden_size, config.num_heads)
        assert config.attention in ("plain", "other")
        self.plain = config.attention == "plain"

    def forward(self, x):
        return self.attend(x, x, x) if self.plain else x


def test_texts_that_settings_are_compared_with():
    report = multihead.check(OfAKind)
    assert report.judgement == "right", str(report)


class OfHiddenLayers(nn.Module):
    """Its layers are in a list, where PyTorch does not see them."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.parts = [nn.Linear(dim, dim) for _ in range(4)]
        self.heads = num_heads

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.parts[:3]
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.parts[3](out.transpose(1, 2).flatten(2))


def test_layers_in_a_list_are_in_the_type_of_the_inputs():
    report = multihead.check(OfHiddenLayers)
    assert not any("float32, " in said for said in report.understood), str(report)
    assert report.cause != "raises", str(report)
