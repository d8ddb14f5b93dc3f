# SPDX-License-Identifier: MIT
"""Exercises in the form in which their answers are published.

The functions build their layers inside, so no two calls share weights, and the
comparison that goes with them cannot succeed.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def multi_head_attention(q, k, v, num_heads, d_model, mask=None):
    assert d_model % num_heads == 0
    batch_size = q.shape[0]
    head_size = d_model // num_heads

    query_layer = nn.Linear(d_model, d_model, bias=False)
    key_layer = nn.Linear(d_model, d_model, bias=False)
    value_layer = nn.Linear(d_model, d_model, bias=False)
    output_layer = nn.Linear(d_model, d_model, bias=False)

    queries = query_layer(q).view(batch_size, -1, num_heads, head_size)
    keys = key_layer(k).view(batch_size, -1, num_heads, head_size)
    values = value_layer(v).view(batch_size, -1, num_heads, head_size)
    queries, keys, values = (t.transpose(1, 2) for t in (queries, keys, values))

    scores = queries @ keys.transpose(-2, -1) / math.sqrt(head_size)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    context = F.softmax(scores, dim=-1) @ values
    context = context.transpose(1, 2).contiguous().view(batch_size, -1, d_model)
    return output_layer(context)


def broken_grouped_query_attention(q, k, v, num_query_groups, d_model, mask=None):
    """Heads of 64 channels whatever the width; groups that share the whole width."""
    batch_size, seq_len, _ = q.shape
    num_heads = d_model // 64
    heads_per_group = num_heads // num_query_groups
    head_size = d_model // num_heads
    group_size = d_model // num_query_groups

    query_layer = nn.Linear(d_model, d_model)
    key_layer = nn.Linear(d_model, d_model)
    value_layer = nn.Linear(d_model, d_model)
    output_layer = nn.Linear(d_model, d_model)

    queries = query_layer(q).view(batch_size, seq_len, num_heads, head_size)
    keys = key_layer(k).view(batch_size, seq_len, num_query_groups, group_size)
    values = value_layer(v).view(batch_size, seq_len, num_query_groups, group_size)
    keys = keys.repeat_interleave(heads_per_group, dim=2)
    values = values.repeat_interleave(heads_per_group, dim=2)
    queries, keys, values = (t.transpose(1, 2) for t in (queries, keys, values))

    scores = torch.matmul(queries, keys.transpose(-2, -1)) / head_size**0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    context = torch.matmul(F.softmax(scores, dim=-1), values).transpose(1, 2)
    return output_layer(context.reshape(batch_size, seq_len, d_model))


def grouped_query_attention(
    q, k, v, num_query_heads, num_query_groups, d_model, mask=None
):
    """The same, repaired."""
    assert num_query_heads % num_query_groups == 0
    batch_size, head_size = q.size(0), d_model // num_query_heads
    group_width = num_query_groups * head_size

    query_layer = nn.Linear(d_model, d_model, bias=False)
    key_layer = nn.Linear(d_model, group_width, bias=False)
    value_layer = nn.Linear(d_model, group_width, bias=False)
    output_layer = nn.Linear(d_model, d_model, bias=False)

    queries = query_layer(q).view(batch_size, -1, num_query_heads, head_size)
    keys = key_layer(k).view(batch_size, -1, num_query_groups, head_size)
    values = value_layer(v).view(batch_size, -1, num_query_groups, head_size)
    repeats = num_query_heads // num_query_groups
    keys = keys.repeat_interleave(repeats, dim=2)
    values = values.repeat_interleave(repeats, dim=2)
    queries, keys, values = (t.transpose(1, 2) for t in (queries, keys, values))

    scores = torch.matmul(queries, keys.transpose(-2, -1)) / head_size**0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    context = torch.matmul(F.softmax(scores, dim=-1), values).transpose(1, 2)
    return output_layer(context.reshape(batch_size, -1, d_model))


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        assert d_model % num_heads == 0
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def attend(self, Q, K, V, mask=None):
        scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return torch.matmul(torch.softmax(scores, dim=-1), V)

    def forward(self, Q, K, V, mask=None):
        batch_size, d_model = Q.size(0), Q.size(-1)
        shape = (batch_size, -1, self.num_heads, self.d_k)
        Q = self.W_q(Q).view(shape).transpose(1, 2)
        K = self.W_k(K).view(shape).transpose(1, 2)
        V = self.W_v(V).view(shape).transpose(1, 2)
        out = self.attend(Q, K, V, mask).transpose(1, 2).contiguous()
        return self.W_o(out.view(batch_size, -1, d_model))


class SelfAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.query = nn.Linear(embed_dim, embed_dim)
        self.key = nn.Linear(embed_dim, embed_dim)
        self.value = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)
        self.fc_out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q = self.query(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.key(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.value(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * self.head_dim**-0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        attention = self.dropout(F.softmax(scores, dim=-1))
        out = (attention @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.fc_out(out)


if __name__ == "__main__":
    torch.manual_seed(42)
    q, k, v = (torch.rand(3, 4, 8) for _ in range(3))
    ours = multi_head_attention(q, k, v, num_heads=2, d_model=8)
    layer = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    assert torch.allclose(ours, layer(q, k, v)[0], atol=1e-8, rtol=1e-5)
