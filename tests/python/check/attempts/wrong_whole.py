# SPDX-License-Identifier: MIT
"""Wrong: axes of the whole exchanged, something added, and what is returned."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class BatchFirstForgotten(nn.Module):
    """nn.MultiheadAttention wants (L, B, E) unless it is told."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_heads)

    def forward(self, x):
        return self.attn(x, x, x)[0]


class SequenceReadAsBatch(nn.Module):
    """Written for (L, B, E)."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        length, batch, width = x.shape
        shape = (length, batch * self.num_heads, self.head_dim)
        q = self.q_proj(x).reshape(shape).transpose(0, 1)
        k = self.k_proj(x).reshape(shape).transpose(0, 1)
        v = self.v_proj(x).reshape(shape).transpose(0, 1)
        w = torch.softmax(torch.bmm(q, k.mT) / math.sqrt(self.head_dim), dim=-1)
        out = torch.bmm(w, v).transpose(0, 1).reshape(length, batch, width)
        return self.out_proj(out)


class _Layers(nn.Module):
    """mask: 0 = blocked."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def heads(self, Q, K, V):
        q = self.W_q(Q).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.W_k(K).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        v = self.W_v(V).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return q, k, v

    def scores(self, q, k, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        return scores if mask is None else scores.masked_fill(mask == 0, -1e9)

    def join(self, heads):
        return self.W_o(heads.transpose(1, 2).flatten(2))


class ValueAdded(_Layers):
    """A residual connection from the wrong side."""

    def forward(self, query, key, value, mask=None):
        residual = value
        q, k, v = self.heads(query, key, value)
        out = self.join(F.softmax(self.scores(q, k, mask), dim=-1) @ v)
        out += residual
        return out


def query_added(query, key, value, mask=None):
    """Heads go in, and their mean is not all that comes out. mask: 0 = blocked"""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return query + scores.softmax(-1) @ value


class ReturnsSummedWeights(_Layers):
    def forward(self, query, key, value, mask=None):
        q, k, v = self.heads(query, key, value)
        attn = F.softmax(self.scores(q, k, mask), dim=-1)
        return self.join(attn @ v), attn.sum(dim=1)


class ReturnsOneHead(_Layers):
    """The loop leaves its last weights behind."""

    def forward(self, x):
        q, k, v = self.heads(x, x, x)
        outs = []
        for h in range(self.num_heads):
            attn = F.softmax(q[:, h] @ k[:, h].mT / math.sqrt(self.d_k), dim=-1)
            outs.append(attn @ v[:, h])
        return self.W_o(torch.cat(outs, dim=-1)), attn


class ReturnsTheFirstHead(_Layers):
    def forward(self, query, key, value, mask=None):
        q, k, v = self.heads(query, key, value)
        attn = F.softmax(self.scores(q, k, mask), dim=-1)
        return self.join(attn @ v), attn[:, 0]


class ReturnsScores(_Layers):
    def forward(self, query, key, value, mask=None):
        q, k, v = self.heads(query, key, value)
        scores = self.scores(q, k, mask)
        return self.join(F.softmax(scores, dim=-1) @ v), scores


def core_returns_scores(q, k, v):
    """Output and, by their name, weights."""
    attention_weights = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    output = F.softmax(attention_weights, dim=-1) @ v
    return output, attention_weights


class ReturnsUnmaskedWeights(_Layers):
    def forward(self, query, key, value, mask=None):
        q, k, v = self.heads(query, key, value)
        weights = self.scores(q, k, None).softmax(dim=-1)
        attn = F.softmax(self.scores(q, k, mask), dim=-1)
        return self.join(attn @ v), weights


class WeightsDetached(_Layers):
    """detach() was meant for the picture."""

    def forward(self, x):
        q, k, v = self.heads(x, x, x)
        attn = F.softmax(self.scores(q, k, None), dim=-1).detach()
        self.attn_weights = attn
        return self.join(attn @ v)


class SoftmaxInNumpy(_Layers):
    """The way through NumPy loses the graph."""

    def forward(self, query, key, value):
        q, k, v = self.heads(query, key, value)
        scores = self.scores(q, k, None).detach().numpy()
        e = torch.from_numpy(scores - scores.max(axis=-1, keepdims=True)).exp()
        return self.join(e / e.sum(-1, keepdim=True) @ v)


class KeysWithoutGradient(_Layers):
    def forward(self, query, key, value):
        q, k, v = self.heads(query, key.detach(), value)
        return self.join(F.softmax(self.scores(q, k, None), dim=-1) @ v)


def values_in_no_grad(q, k, v):
    """no_grad() around a line too many."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    with torch.no_grad():
        v = v * 1.0
    return torch.softmax(scores, dim=-1) @ v


class AlwaysBfloat16(_Layers):
    def forward(self, x):
        q, k, v = (t.bfloat16() for t in self.heads(x, x, x))
        attn = F.softmax(self.scores(q, k, None), dim=-1)
        return self.join((attn @ v).to(x.dtype))


def core_in_half(q, k, v):
    """Half precision to save memory."""
    scores = torch.matmul(q.half(), k.half().transpose(-2, -1)) / math.sqrt(q.size(-1))
    return torch.matmul(torch.softmax(scores, dim=-1), v.half()).to(q.dtype)
