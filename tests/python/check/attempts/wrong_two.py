# SPDX-License-Identifier: MIT
"""Wrong in two ways at once."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from attempts.steps import Attention


def no_scale_no_mask(q, k, v, num_heads, d_model, mask=None):
    """A first draft. mask: 0 = blocked."""
    d = d_model // num_heads
    wq, wk, wv, wo = (nn.Linear(d_model, d_model) for _ in range(4))
    q = wq(q).unflatten(-1, (num_heads, d)).transpose(1, 2)
    k = wk(k).unflatten(-1, (num_heads, d)).transpose(1, 2)
    v = wv(v).unflatten(-1, (num_heads, d)).transpose(1, 2)
    out = torch.softmax(q @ k.mT, dim=-1) @ v
    return wo(out.transpose(1, 2).flatten(2))


class _Module(Attention):
    """mask: 0 = blocked."""

    def split_by_view(self, x):
        return x.view(x.size(0), self.num_heads, -1, self.d_k)

    def merge(self, x):
        return x.transpose(1, 2).flatten(2)


class ViewInAndTransposeOut(_Module):
    """Heads by view, and the root of the whole width."""

    def forward(self, Q, K, V, mask=None):
        q = self.split_by_view(self.W_q(Q))
        k = self.split_by_view(self.W_k(K))
        v = self.split_by_view(self.W_v(V))
        scores = q @ k.transpose(-2, -1) / math.sqrt(Q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.join(scores.softmax(-1) @ v)


class ViewInAndOut(_Module):
    """Two views that look like each other's inverse, and are."""

    def forward(self, Q, K, V, mask=None):
        q = self.split_by_view(self.W_q(Q))
        k = self.split_by_view(self.W_k(K))
        v = self.split_by_view(self.W_v(V))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.W_o((scores.softmax(-1) @ v).reshape(Q.shape))


class InvertedAndUnscaled(_Module):
    def forward(self, query, key, value, attn_mask=None):
        """attn_mask: True = blocked, as in nn.MultiheadAttention."""
        q, k = self.split(self.W_q(query)), self.split(self.W_k(key))
        v = self.split(self.W_v(value))
        scores = q @ k.transpose(-2, -1)
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask == 0, float("-inf"))
        return self.join(scores.softmax(-1) @ v)


class QueriesNormalisedAndNoOutput(_Module):
    def forward(self, Q, K, V):
        q, k, v = self.split(self.W_q(Q)), self.split(self.W_k(K)), self.W_v(V)
        p = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d_k), dim=-2)
        return self.merge(p @ self.split(v))


class TiledAndScaledByWidth(nn.Module):
    def __init__(self, embed_dim, num_heads, num_kv_heads):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        d = embed_dim // num_heads
        self.wq = nn.Linear(embed_dim, embed_dim)
        self.wk = nn.Linear(embed_dim, num_kv_heads * d)
        self.wv = nn.Linear(embed_dim, num_kv_heads * d)
        self.wo = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        rep = self.num_heads // self.num_kv_heads
        q = self.wq(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.wk(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        v = self.wv(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        k, v = k.repeat(1, rep, 1, 1), v.repeat(1, rep, 1, 1)
        w = torch.softmax(q @ k.mT / self.embed_dim**0.5, dim=-1)
        return self.wo((w @ v).transpose(1, 2).flatten(2))


class PairSwappedAndJoinedByView(nn.Module):
    """q, v, k out of a layer called qkv; the heads joined without transpose."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, v, k = qkv.permute(2, 0, 3, 1, 4)
        return self.proj((self.weights(q, k) @ v).reshape(B, N, C))

    def weights(self, q, k):
        return (q @ k.transpose(-2, -1) * q.size(-1) ** -0.5).softmax(dim=-1)


class MaskAfterSoftmaxAndNoRoot(_Module):
    def forward(self, Q, K, V, mask=None):
        q, k = self.split(self.W_q(Q)), self.split(self.W_k(K))
        attn = torch.softmax(q @ k.transpose(-2, -1) / self.d_k, dim=-1)
        if mask is not None:
            attn = attn * mask
        return self.join(attn @ self.split(self.W_v(V)))


class NoInputBiasAndSoftmaxOverHeads(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * embed_dim, embed_dim) / 5)
        self.in_proj_bias = nn.Parameter(torch.randn(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        q, k, v = (
            F.linear(x, w).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for w in self.in_proj_weight.chunk(3)
        )
        w = F.softmax(q @ k.mT / math.sqrt(q.size(-1)), dim=1)
        return self.out_proj((w @ v).transpose(1, 2).flatten(2))


class DiagonalBlockedAndUnscaled(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, is_causal=False):
        q, k, v = (
            t.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for t in self.c_attn(x).chunk(3, dim=-1)
        )
        att = q @ k.transpose(-2, -1)
        if is_causal:
            future = torch.ones(x.size(1), x.size(1)).triu().bool()
            att = att.masked_fill(future, -1e9)
        return self.c_proj((att.softmax(-1) @ v).transpose(1, 2).flatten(2))


class KeysCollectedAndUnscaled(_Module):
    def forward(self, x):
        q, k = self.split(self.W_q(x)), self.split(self.W_k(x))
        w = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k), dim=-1)
        return self.join(torch.einsum("bhij,bhjd->bhid", w, k))


class QueryTransposedAndMaskLost(_Module):
    def forward(self, Q, K, V, mask=None):
        q = self.split(torch.matmul(Q, self.W_q.weight) + self.W_q.bias)
        k, v = self.split(self.W_k(K)), self.split(self.W_v(V))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores.masked_fill(mask == 0, -1e9)
        return self.join(torch.softmax(scores, dim=-1) @ v)


class MaskAddedAndNoOutput(_Module):
    def forward(self, Q, K, V, mask=None):
        q, k, v = self.split(self.W_q(Q)), self.split(self.W_k(K)), self.W_v(V)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores + mask
        return self.merge(torch.softmax(scores, dim=-1) @ self.split(v))


class BothMasksForgotten(nn.Module):
    """Arguments of nn.MultiheadAttention, none of them read."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, key_padding_mask=None, attn_mask=None):
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, dim=-1)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))


def core_unscaled_over_queries(q, k, v):
    """Neither the root nor the axis."""
    return F.softmax(q @ k.transpose(-2, -1), dim=-2) @ v
