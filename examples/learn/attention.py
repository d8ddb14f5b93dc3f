# SPDX-License-Identifier: MIT
"""Attention in its plain form: as few lines as it takes, and no trick.

Read it from top to bottom, then close it and write it again: docs/learn.md has the
pictures and an example to compute by hand, and the notebooks beside this file are the
exercises. attention.h is the same text in C++. These forms equal PyTorch's attention to
rounding; multihead.textbook has the same forms with PyTorch's bits and with checks of
their arguments.

Letters: N batch items, H heads, G key/value heads (groups), Lq queries, Lk keys,
d_model the width of a token, d = d_model / H the width of a head.
"""

import math

import torch
from torch import nn


def scaled_dot_product_attention(q, k, v, mask=None):
    """q (…, Lq, d), k and v (…, Lk, d); mask: True = blocked. Output, weights."""
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask != 0, -math.inf)
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v), weights


def split_heads(x, num_heads):
    """(N, L, H·d) → (N, H, L, d): cut the features, then bring the heads forward."""
    batch, length, width = x.shape
    return x.view(batch, length, num_heads, width // num_heads).transpose(1, 2)


def combine_heads(x):
    """(N, H, L, d) → (N, L, H·d): the way back, in the opposite order."""
    batch, heads, length, d = x.shape
    return x.transpose(1, 2).reshape(batch, length, heads * d)


def per_head(mask):
    """A mask for each batch item, (N, Lq, Lk), holds for each of its heads."""
    return mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask


def multi_head_attention(q, k, v, num_heads, d_model, mask=None):
    """q (N, Lq, d_model), k and v (N, Lk, d_model); mask: True = blocked."""
    W_q, W_k, W_v, W_o = [nn.Linear(d_model, d_model, bias=False) for _ in range(4)]
    q = split_heads(W_q(q), num_heads)
    k = split_heads(W_k(k), num_heads)
    v = split_heads(W_v(v), num_heads)
    found, _ = scaled_dot_product_attention(q, k, v, per_head(mask))
    return W_o(combine_heads(found))


def grouped_query_attention(
    q, k, v, num_query_groups, d_model, mask=None, num_heads=None
):
    """The same with G = num_query_groups heads of keys and values for H of queries."""
    num_heads = num_heads or num_query_groups
    copies = num_heads // num_query_groups
    widths = (d_model, d_model // copies, d_model // copies, d_model)
    W_q, W_k, W_v, W_o = [nn.Linear(d_model, width, bias=False) for width in widths]
    q = split_heads(W_q(q), num_heads)
    k = split_heads(W_k(k), num_query_groups).repeat_interleave(copies, dim=1)
    v = split_heads(W_v(v), num_query_groups).repeat_interleave(copies, dim=1)
    found, _ = scaled_dot_product_attention(q, k, v, per_head(mask))
    return W_o(combine_heads(found))


class MultiHeadAttention(nn.Module):
    """Q (N, Lq, d_model), K and V (N, Lk, d_model); mask: 0 = blocked."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split_heads(self, x):
        return x.view(x.size(0), -1, self.num_heads, self.d_k).transpose(1, 2)

    def combine_heads(self, x):
        return x.transpose(1, 2).reshape(x.size(0), -1, self.num_heads * self.d_k)

    def forward(self, Q, K, V, mask=None):
        q = self.split_heads(self.W_q(Q))
        k = self.split_heads(self.W_k(K))
        v = self.split_heads(self.W_v(V))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is None:
            weights = torch.softmax(scores, dim=-1)
        else:  # a query that may attend to nothing gets weights 0
            blocked = per_head(mask) == 0
            lowest = torch.finfo(scores.dtype).min
            weights = torch.softmax(scores.masked_fill(blocked, lowest), dim=-1)
            weights = weights.masked_fill(blocked, 0.0)
        return self.W_o(self.combine_heads(torch.matmul(weights, v)))


class MultiHeadSelfAttention(nn.Module):
    """x (N, L, dim) attends to itself; dropout on the weights, in training."""

    def __init__(self, dim, num_heads=8, dropout=0.1):
        super().__init__()
        self.num_heads, self.dropout = num_heads, nn.Dropout(dropout)
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        heads = (batch, length, self.num_heads, dim // self.num_heads)
        q = self.q_proj(x).view(heads).transpose(1, 2)
        k = self.k_proj(x).view(heads).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        weights = self.dropout(torch.softmax(scores, dim=-1))
        found = torch.matmul(weights, v)
        return self.out_proj(found.transpose(1, 2).reshape(x.shape))
