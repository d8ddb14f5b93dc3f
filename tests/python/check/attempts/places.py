# SPDX-License-Identifier: MIT
"""Where dropout stands, which of items and heads comes first, where queries stand among
the keys, and what a name promises: right, and beside it wrong."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from attempts.steps import Attention


def heads_first(x):
    """(B, H, L, d) as (H·B, L, d)."""
    return x.transpose(0, 1).flatten(0, 1)


class FoldedHeadsFirst(Attention):
    """The weights that it returns are (H·B, Lq, Lk), and are dropped so."""

    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__(d_model, num_heads)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value):
        q, k = self.split(self.W_q(query)), self.split(self.W_k(key))
        v = self.split(self.W_v(value))
        weights = self.scores(heads_first(q), heads_first(k)).softmax(-1)
        weights = self.dropout(weights)
        context = (weights @ heads_first(v)).unflatten(0, (self.num_heads, -1))
        out = self.dropout(self.join(context.transpose(0, 1)))
        return self.norm(query + out), weights


class EachHeadDropsItsResult(nn.Module):
    """Without projections what the heads return is the output."""

    def __init__(self, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = nn.Dropout(dropout)

    def forward(self, q, k, v):
        heads = zip(*(x.chunk(self.num_heads, dim=-1) for x in (q, k, v)))
        results = [
            (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v for q, k, v in heads
        ]
        return torch.cat([self.dropout(result) for result in results], dim=-1)


class DropsResultsAndOutput(Attention):
    """And no weights."""

    ahead = 1

    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__(d_model, num_heads)
        self.dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x):
        """Causal."""
        q, k, v = self.qkv(x)
        later = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(self.ahead)
        scores = self.scores(q, k).masked_fill(later, -math.inf)
        return self.dropped_output(self.join(self.dropout(scores.softmax(-1) @ v)))

    def dropped_output(self, out):
        return self.resid_dropout(out)


class DropsWeightsAndResults(Attention):
    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__(d_model, num_heads)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.qkv(x)
        context = self.dropout(self.scores(q, k).softmax(-1)) @ v
        return self.W_o(self.dropout(context.transpose(1, 2).flatten(2)))


class NeverDropsAsConfigured(Attention):
    """The layer is made, and never called."""

    def __init__(self, config):
        super().__init__(config.d_model, config.num_heads)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.attend(x, x, x)


class DropsResultsAndSeesTheNext(DropsResultsAndOutput):
    ahead = 2


class DropsResultsAndAlwaysTheOutput(DropsResultsAndOutput):
    def dropped_output(self, out):
        return F.dropout(out, self.resid_dropout.p)


class ReturnsKeysAndValues(nn.Module):
    """As a cache; where keys are as many as a head is wide, they look like weights."""

    def __init__(self, d_model, n_heads, n_kv_heads=None):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads or n_heads
        self.width = d_model // n_heads
        self.shared = self.n_kv_heads * self.width
        self.qkv = nn.Linear(d_model, d_model + 2 * self.shared, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).split([x.size(-1), self.shared, self.shared], dim=-1)
        q, k, v = (
            part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in (q, k, v)
        )
        group = self.n_heads // self.n_kv_heads
        keys, values = (part.repeat_interleave(group, dim=1) for part in (k, v))
        weights = (q @ keys.mT / math.sqrt(self.width)).softmax(-1)
        return self.out((weights @ values).transpose(1, 2).flatten(2)), k, v


def dot_attention(query, key, value):
    return (query @ key.mT).softmax(-1) @ value


def dot_product_attention(query, key, value):
    """Scaled dot-product attention."""
    return (query @ key.mT).softmax(-1) @ value


def _cached(q, k, v, first):
    later = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).triu(first)
    scores = q @ k.mT / math.sqrt(q.size(-1))
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


def cached(q, k, v):
    """Causal, with a cache: the queries are the last ones of the keys."""
    return _cached(q, k, v, 1 + k.size(-2) - q.size(-2))


def cached_from_the_first(q, k, v):
    """Causal, with a cache: the queries are the last ones of the keys."""
    return _cached(q, k, v, 1)


def _windowed(q, k, v, more):
    i, j = torch.arange(q.size(-2))[:, None], torch.arange(k.size(-2))
    scores = q @ k.mT / math.sqrt(q.size(-1))
    seen = (j <= i) & (i - j < more)
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


def windowed(q, k, v, window):
    """Causal: each query sees itself and the window - 1 keys before it."""
    return _windowed(q, k, v, window)


def windowed_by_one_more(q, k, v, window):
    """Causal: each query sees itself and the window - 1 keys before it."""
    return _windowed(q, k, v, window + 1)


class AnyMaskMakesItCausal(Attention):
    def forward(self, x, mask=None):
        q, k, v = self.qkv(x)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None)
        return self.join(out)


class FirstHeadEverywhere(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        context = self.scores(q, k).softmax(-1) @ v
        return self.join(context[:, :1].expand_as(context))


class ViewedInAndOutUnscaled(Attention):
    def forward(self, x):
        heads = x.size(0) * self.num_heads, -1, self.d_k
        q, k, v = (w(x).view(heads) for w in (self.W_q, self.W_k, self.W_v))
        return self.W_o(((q @ k.mT).softmax(-1) @ v).view(x.shape))


class OneHeadOfFullWidth(DropsResultsAndOutput):
    """Its weights are dropped, one head's."""

    def forward(self, x):
        q, k, v = self.W_q(x), self.W_k(x), self.W_v(x)
        weights = self.dropout(self.scores(q, k).softmax(-1))
        return self.resid_dropout(self.W_o(weights @ v))
