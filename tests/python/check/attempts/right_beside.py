# SPDX-License-Identifier: MIT
"""Right: attention with what stands beside it in the same module."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from attempts.steps import Attention


class PostNorm(Attention):
    """The sublayer of the first Transformer, with its two dropouts. mask: 0 =
    blocked."""

    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__(d_model, num_heads)
        self.attn_dropout = nn.Dropout(dropout)
        self.dropout = nn.Dropout(3 * dropout)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

    def forward(self, q, k, v, mask=None):
        residual = q
        scores = self.scores(self.split(self.W_q(q)), self.split(self.W_k(k)))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        attn = self.attn_dropout(scores.softmax(-1))
        out = self.dropout(self.join(attn @ self.split(self.W_v(v))))
        return self.layer_norm(out + residual), attn


class PreNorm(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attend(y, y, y)


class PreNormOfQueries(Attention):
    """The other sequence comes normalised, or so it is hoped."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x, context):
        return x + self.attend(self.norm(x), context, context)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        )


class RmsFirst(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = RMSNorm(d_model)

    def forward(self, x):
        x = self.norm(x)
        return self.attend(x, x, x)


class _AnnotatedNorm(nn.Module):
    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class AnnotatedSublayer(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = _AnnotatedNorm(d_model)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attend(y, y, y)


class NormThenResidual(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        return x + self.norm(self.attend(x, x, x))


class NormAlone(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        return self.norm(self.attend(x, x, x))


class QueriesAndKeysNormed(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.q_norm = RMSNorm(self.d_k)
        self.k_norm = RMSNorm(self.d_k)

    def forward(self, x):
        q = self.q_norm(self.split(self.W_q(x)))
        k = self.k_norm(self.split(self.W_k(x)))
        return self.join(self.scores(q, k).softmax(-1) @ self.split(self.W_v(x)))


class NormedBeforeTheyAreSplit(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.q_norm = nn.LayerNorm(d_model)
        self.k_norm = nn.LayerNorm(d_model)

    def forward(self, x):
        q = self.split(self.q_norm(self.W_q(x)))
        k = self.split(self.k_norm(self.W_k(x)))
        return self.join(self.scores(q, k).softmax(-1) @ self.split(self.W_v(x)))


class NormedWithoutParameters(Attention):
    """Cosines, as long as they are."""

    def forward(self, x):
        q = F.normalize(self.split(self.W_q(x)), dim=-1)
        k = F.normalize(self.split(self.W_k(x)), dim=-1)
        return self.join(self.scores(q, k).softmax(-1) @ self.split(self.W_v(x)))


class NormalisedBeforeTheOutput(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        q, k = self.split(self.W_q(x)), self.split(self.W_k(x))
        context = self.scores(q, k).softmax(-1) @ self.split(self.W_v(x))
        return self.W_o(self.norm(context.transpose(1, 2).flatten(2)))


class SharedByTheHeads(nn.Module):
    """One small matrix for all heads, as a well-known tutorial has it."""

    def __init__(self, embed_size, heads):
        super().__init__()
        self.embed_size, self.heads = embed_size, heads
        self.head_dim = embed_size // heads
        self.values = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.keys = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.queries = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.fc_out = nn.Linear(heads * self.head_dim, embed_size)

    def forward(self, values, keys, query, mask=None):
        N, length = query.shape[0], query.shape[1]
        values = self.values(values.reshape(N, -1, self.heads, self.head_dim))
        keys = self.keys(keys.reshape(N, -1, self.heads, self.head_dim))
        queries = self.queries(query.reshape(N, -1, self.heads, self.head_dim))
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))
        attention = torch.softmax(energy / self.head_dim**0.5, dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", [attention, values])
        return self.fc_out(out.reshape(N, length, self.embed_size))


class Rotary(Attention):
    """Positions of its own, half of the features turned with the other half."""

    def rotate(self, x):
        half = x.size(-1) // 2
        speed = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
        angle = torch.arange(x.size(-2), dtype=x.dtype)[:, None] * speed
        cos, sin = angle.cos(), angle.sin()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x):
        q, k = (
            self.rotate(self.split(self.W_q(x))),
            self.rotate(self.split(self.W_k(x))),
        )
        return self.join(self.scores(q, k).softmax(-1) @ self.split(self.W_v(x)))


class RotaryInPairs(Attention):
    """Features 2i and 2i + 1 are one complex number; the base is another."""

    def rotate(self, x):
        half = x.size(-1) // 2
        speed = 500.0 ** (-torch.arange(half, dtype=x.dtype) / half)
        angle = torch.arange(x.size(-2), dtype=x.dtype)[:, None] * speed
        freqs_cis = torch.polar(torch.ones_like(angle), angle)
        turned = (
            torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * freqs_cis
        )
        return torch.view_as_real(turned).flatten(-2)

    def forward(self, x):
        q, k = (
            self.rotate(self.split(self.W_q(x))),
            self.rotate(self.split(self.W_k(x))),
        )
        return self.join(self.scores(q, k).softmax(-1) @ self.split(self.W_v(x)))


class RectifiedProjections(Attention):
    def forward(self, query, key, value):
        q = self.split(F.relu(self.W_q(query)))
        k = self.split(F.relu(self.W_k(key)))
        v = self.split(F.relu(self.W_v(value)))
        return self.join(self.scores(q, k).softmax(-1) @ v)


class RectifiedAndNormed(Attention):
    """ReLU on the projections, a residual connection, a norm: three at once."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        q, k, v = (self.split(F.relu(w(x))) for w in (self.W_q, self.W_k, self.W_v))
        return self.norm(x + self.join(self.scores(q, k).softmax(-1) @ v))


def rounded_attention(q, k, v):
    """Four digits are enough for an exercise."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return torch.round(scores.softmax(-1) @ v, decimals=4)


class LearnedTemperature(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.temperature = nn.Parameter(torch.full((num_heads, 1, 1), 0.4))

    def scores(self, q, k):
        return q @ k.mT * self.temperature

    def forward(self, x):
        return self.attend(x, x, x)


class FusedFeatureByFeature(nn.Module):
    """The fused matrix is cut as (d k h), which it learns that way."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        qkv = self.to_qkv(x).unflatten(-1, (-1, 3, self.heads))
        q, k, v = qkv.permute(3, 0, 4, 1, 2)
        attn = (q @ k.mT * q.size(-1) ** -0.5).softmax(-1)
        return self.to_out((attn @ v).transpose(1, 2).flatten(2))


class RelativePositions(Attention):
    """A bias that is learned for each distance, at most 63."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(127, num_heads))

    def forward(self, x):
        place = torch.arange(x.size(1)).clamp(max=63)
        table = self.relative_position_bias_table[place[:, None] - place + 63]
        q, k = self.split(self.W_q(x)), self.split(self.W_k(x))
        scores = self.scores(q, k) + table.permute(2, 0, 1)
        return self.join(scores.softmax(-1) @ self.split(self.W_v(x)))


class ScaledShortcut(Attention):
    """What attention adds to the input grows from nothing."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.gamma * self.attend(x, x, x) + x


class ScaledFeatureByFeature(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.gamma = nn.Parameter(1e-4 * torch.ones(d_model))

    def forward(self, x):
        return x + self.gamma * self.attend(x, x, x)


class GatedOutput(Attention):
    """The block around it adds the input."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, query, key, value):
        return self.gate * self.attend(query, key, value)


class ResidualInside(Attention):
    """Right if the block around it does not add its input again."""

    def forward(self, x):
        return x + self.attend(x, x, x)


class ResidualInPlace(Attention):
    def forward(self, query, key, value):
        out = self.attend(query, key, value)
        out += query
        return out


class OfPixelsNormedByGroup(nn.Module):
    """The attention block of many a diffusion model."""

    def __init__(self, channels, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.GroupNorm(4, channels)
        self.q = nn.Conv1d(channels, channels, 1)
        self.k = nn.Conv1d(channels, channels, 1)
        self.v = nn.Conv1d(channels, channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        b, c, n = x.shape
        h = self.norm(x)
        q, k, v = (
            conv(h).view(b, self.num_heads, -1, n) for conv in (self.q, self.k, self.v)
        )
        scores = torch.einsum("bhdi,bhdj->bhij", q, k) * q.size(2) ** -0.5
        out = torch.einsum("bhij,bhdj->bhdi", scores.softmax(-1), v)
        return x + self.proj_out(out.reshape(b, c, n))


class StridedInAndOut(Attention):
    """(D, H) at both ends: another order of features, which the matrices learn."""

    def forward(self, x):
        q, k, v = (
            w(x).unflatten(-1, (self.d_k, self.num_heads))
            for w in (self.W_q, self.W_k, self.W_v)
        )
        s = torch.einsum("bqdh,bkdh->bhqk", q, k) / math.sqrt(self.d_k)
        o = torch.einsum("bhqk,bkdh->bqdh", s.softmax(-1), v)
        return self.W_o(o.flatten(2))


def scaled_where_asked(q, k, v, scale=None):
    scores = q @ k.mT
    return (scores * scale if scale else scores).softmax(-1) @ v


class ScaledWhereAsked(Attention):
    def __init__(self, d_model, num_heads, scale=False):
        super().__init__(d_model, num_heads)
        self.scale = scale

    def scores(self, q, k):
        scores = super().scores(q, k)
        return scores if self.scale else scores * math.sqrt(self.d_k)

    def forward(self, x):
        return self.attend(x, x, x)
