# SPDX-License-Identifier: MIT
"""Wrong: softmax over the wrong axis, twice, or not at all."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class _Attention(nn.Module):
    """Subclasses turn scores (B, H, Lq, Lk) into weights."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.wq = nn.Linear(d_model, d_model)
        self.wk = nn.Linear(d_model, d_model)
        self.wv = nn.Linear(d_model, d_model)
        self.wo = nn.Linear(d_model, d_model)

    def forward(self, q, k, v):
        q = self.wq(q).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.wk(k).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        v = self.wv(v).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        weights = self.weights(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)))
        return self.wo((weights @ v).transpose(1, 2).flatten(2))


class OverQueries(_Attention):
    def weights(self, scores):
        return F.softmax(scores, dim=-2)


def over_queries_in_a_function(q, k, v, num_heads, d_model, mask=None):
    """dim=2 was right while there were three axes. mask: 0 = blocked."""
    d = d_model // num_heads
    to_q, to_k, to_v, to_o = (nn.Linear(d_model, d_model) for _ in range(4))
    q = to_q(q).view(q.size(0), -1, num_heads, d).transpose(1, 2)
    k = to_k(k).view(k.size(0), -1, num_heads, d).transpose(1, 2)
    v = to_v(v).view(v.size(0), -1, num_heads, d).transpose(1, 2)
    s = q @ k.mT / math.sqrt(d)
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    return to_o((torch.softmax(s, dim=2) @ v).transpose(1, 2).flatten(2))


class OverHeads(_Attention):
    def weights(self, scores):
        return torch.softmax(scores, dim=1)


class DimLeftOut(_Attention):
    """Of four axes PyTorch takes the second, and warns."""

    def weights(self, scores):
        return F.softmax(scores)


def heads_normalised_in_einsum(x, W_q, W_k, W_v, W_o, num_heads):
    """Scores are (B, Lq, Lk, H), and dim=-1 is the heads."""
    q, k, v = ((x @ w).unflatten(-1, (num_heads, -1)) for w in (W_q, W_k, W_v))
    s = torch.einsum("bqhd,bkhd->bqkh", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bqkh,bkhd->bqhd", s.softmax(dim=-1), v).flatten(2) @ W_o


class OverTheBatch(_Attention):
    def weights(self, scores):
        return scores.softmax(dim=0)


class OneHeadDimLeftOut(nn.Module):
    """Of three axes PyTorch takes the first: the batch."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        d_head = d_model // num_heads
        self.W_q = nn.ModuleList(nn.Linear(d_model, d_head) for _ in range(num_heads))
        self.W_k = nn.ModuleList(nn.Linear(d_model, d_head) for _ in range(num_heads))
        self.W_v = nn.ModuleList(nn.Linear(d_model, d_head) for _ in range(num_heads))
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, x):
        heads = []
        for w_q, w_k, w_v in zip(self.W_q, self.W_k, self.W_v):
            q, k, v = w_q(x), w_k(x), w_v(x)
            attn = F.softmax(torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(-1)))
            heads.append(torch.bmm(attn, v))
        return self.W_o(torch.cat(heads, dim=-1))


class OverThePlane(_Attention):
    def weights(self, scores):
        return scores.flatten(-2).softmax(dim=-1).view_as(scores)


class SumsOfOtherRows(nn.Module):
    """Item by item and head by head."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.Wq, self.Wk = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.Wv, self.Wo = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def powers(self, scores):
        return torch.exp(scores - scores.max(-1, keepdim=True)[0])

    def of_head(self, q, k, v):
        powers = self.powers(q @ k.T / q.shape[-1] ** 0.5)
        return powers / powers.sum(-1) @ v

    def forward(self, x):
        """x: (batch, seq, dim)"""
        items = []
        for item in x:
            parts = (w(item).chunk(self.heads, -1) for w in (self.Wq, self.Wk, self.Wv))
            items.append(torch.cat([self.of_head(*one) for one in zip(*parts)], dim=-1))
        return self.Wo(torch.stack(items))


class PowersBySumsOfOtherRows(SumsOfOtherRows):
    """Of scores of which nothing is subtracted."""

    def powers(self, scores):
        return torch.exp(scores)


class SumsAndMaximaOfOtherRows(SumsOfOtherRows):
    def powers(self, scores):
        return torch.exp(scores - scores.max(-1)[0])


class MaximaOfOtherRows(SumsAndMaximaOfOtherRows):
    def of_head(self, q, k, v):
        powers = self.powers(q @ k.T / q.shape[-1] ** 0.5)
        return powers / powers.sum(-1, keepdim=True) @ v


class OverHeadsAndKeys(nn.Module):
    """All heads' keys in one row."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)) for t in self.qkv(x).chunk(3, dim=-1)
        )
        s = torch.einsum("bqhd,bkhd->bqhk", q, k) * q.shape[-1] ** -0.5
        w = s.flatten(2).softmax(dim=-1).unflatten(2, (self.num_heads, -1))
        return self.proj(torch.einsum("bqhk,bkhd->bqhd", w, v).flatten(2))


class Forgotten(_Attention):
    def weights(self, scores):
        return scores


def forgotten_in_the_formula(Q, K, V):
    """(Q K^T / sqrt(d)) V."""
    return torch.matmul(Q @ K.transpose(-1, -2) / math.sqrt(Q.shape[-1]), V)


class NeverDivided(_Attention):
    def weights(self, scores):
        return torch.exp(scores)


class Twice(_Attention):
    """Once here and once in the layer above it."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.softmax = nn.Softmax(dim=-1)

    def weights(self, scores):
        return self.softmax(F.softmax(scores, dim=-1))


class Logarithm(_Attention):
    def weights(self, scores):
        return F.log_softmax(scores, dim=-1)


class Sigmoid(_Attention):
    def weights(self, scores):
        return torch.sigmoid(scores)


class DividedByTheSum(_Attention):
    def weights(self, scores):
        return scores / scores.sum(dim=-1, keepdim=True)
