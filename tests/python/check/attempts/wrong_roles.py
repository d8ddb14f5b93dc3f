# SPDX-License-Identifier: MIT
"""Wrong: one tensor, matrix or input taken for another. Where lengths differ, some
of these do not run at all; with equal lengths all of them do."""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import einsum


class KeysByTheLayerOfValues(nn.Module):
    """Copied from the line below; mask 0 = blocked."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.d_k = num_heads, d_model // num_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)

    def forward(self, q, k, v, mask=None):
        N = q.size(0)
        query = self.w_q(q).view(N, -1, self.h, self.d_k).transpose(1, 2)
        key = self.w_v(k).view(N, -1, self.h, self.d_k).transpose(1, 2)
        value = self.w_v(v).view(N, -1, self.h, self.d_k).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        x = torch.matmul(scores.softmax(dim=-1), value)
        return self.w_o(x.transpose(1, 2).contiguous().view(N, -1, self.h * self.d_k))


def queries_by_the_layer_of_keys(q, k, v, num_heads, d_model):
    """Three layers are made, and the first is never called."""
    W_q = nn.Linear(d_model, d_model, bias=False)
    W_k = nn.Linear(d_model, d_model, bias=False)
    W_v = nn.Linear(d_model, d_model, bias=False)
    W_o = nn.Linear(d_model, d_model, bias=False)
    assert W_q.weight.shape == W_k.weight.shape
    Q, K, V = (
        t.reshape(*t.shape[:2], num_heads, -1).permute(0, 2, 1, 3)
        for t in (W_k(q), W_k(k), W_v(v))
    )
    attention = F.softmax(Q @ K.mT * (d_model // num_heads) ** -0.5, dim=-1)
    return W_o((attention @ V).permute(0, 2, 1, 3).flatten(2))


class QueriesByTheLayerOfValues(nn.Module):
    """Layers in a dictionary, asked for by a letter."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(embed_dim, embed_dim)
        self.k = nn.Linear(embed_dim, embed_dim)
        self.v = nn.Linear(embed_dim, embed_dim)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def heads(self, letter, x):
        layer = {"q": self.v, "k": self.k, "v": self.v}[letter]
        return layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, query, key, value):
        q = self.heads("q", query)
        k, v = self.heads("k", key), self.heads("v", value)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))


def numpy_values_by_the_matrix_of_queries(Q, K, V, W_q, W_k, W_v, W_o, num_heads):
    """NumPy; matrices are (in, out)."""
    b, n, e = Q.shape

    def split(x, w):
        y = x @ w
        return y.reshape(b, y.shape[1], num_heads, -1).transpose(0, 2, 1, 3)

    q, k, v = split(Q, W_q), split(K, W_k), split(V, W_q)
    s = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(e / num_heads)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    return (p @ v).transpose(0, 2, 1, 3).reshape(b, n, e) @ W_o


class KeysFromTheValue(nn.Module):
    """keys and values of one `values`, as in self-attention; mask 0 = blocked."""

    def __init__(self, embed_size, heads):
        super().__init__()
        self.heads, self.head_dim = heads, embed_size // heads
        self.values = nn.Linear(embed_size, embed_size)
        self.keys = nn.Linear(embed_size, embed_size)
        self.queries = nn.Linear(embed_size, embed_size)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, values, keys, query, mask=None):
        N, query_len = query.shape[:2]
        keys = self.keys(values).reshape(N, -1, self.heads, self.head_dim)
        values = self.values(values).reshape(N, -1, self.heads, self.head_dim)
        queries = self.queries(query).reshape(N, query_len, self.heads, self.head_dim)
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))
        attention = torch.softmax(energy / self.head_dim ** (1 / 2), dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", [attention, values])
        return self.fc_out(out.reshape(N, query_len, -1))


class ValuesFromTheQuery(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, query, key, value):
        q, k, v = self.to_q(query), self.to_k(key), self.to_v(query)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        sim = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        out = einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class QueriesFromTheKey(nn.Module):
    """One head after another."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q_linear = nn.Linear(d_model, d_model)
        self.k_linear = nn.Linear(d_model, d_model)
        self.v_linear = nn.Linear(d_model, d_model)
        self.dense = nn.Linear(d_model, d_model)

    def forward(self, q, k, v):
        outputs = []
        for Q, K, V in zip(
            self.q_linear(k).chunk(self.n_heads, dim=-1),
            self.k_linear(k).chunk(self.n_heads, dim=-1),
            self.v_linear(v).chunk(self.n_heads, dim=-1),
        ):
            scores = torch.bmm(Q, K.transpose(1, 2)) / math.sqrt(Q.shape[-1])
            outputs.append(torch.bmm(torch.softmax(scores, dim=2), V))
        return self.dense(torch.cat(outputs, dim=-1))


class PassedOnInAnotherOrder(nn.Module):
    """The helper takes keys before values, the caller hands values first."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def project(self, query, key, value):
        projected = (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        return (t.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for t in projected)

    def forward(self, query, key, value, attn_mask=None):
        q, k, v = self.project(query, value, key)
        scores = q @ k.transpose(2, 3) / k.shape[-1] ** 0.5
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask, float("-inf"))
        context = scores.softmax(dim=3) @ v
        return self.out_proj(context.transpose(1, 2).flatten(2))


class HelperTakesValuesFirst(nn.Module):
    """The same slip after the projections."""

    def __init__(self, d_model, h):
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.w_query = nn.Linear(d_model, d_model)
        self.w_key = nn.Linear(d_model, d_model)
        self.w_value = nn.Linear(d_model, d_model)
        self.linear_layer = nn.Linear(d_model, d_model)

    @staticmethod
    def attention(query, value, key):
        p_attn = F.softmax(query @ key.mT / math.sqrt(query.size(-1)), dim=-1)
        return torch.matmul(p_attn, value)

    def forward(self, query, key, value):
        n = query.size(0)
        query, key, value = [
            x.view(n, -1, self.h, self.d_k).transpose(1, 2)
            for x in (self.w_query(query), self.w_key(key), self.w_value(value))
        ]
        x = self.attention(query, key, value)
        x = x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        return self.linear_layer(x)


class NumHeadsNeverUsed(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        assert d_model % num_heads == 0
        self.num_heads = num_heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(-1))
        return self.out(torch.bmm(F.softmax(scores, dim=-1), v))


def only_the_scale_knows_heads(q, k, v, num_heads, d_model, mask=None):
    """The width of a head is computed, for the root alone; mask: True = blocked."""
    d_head = d_model // num_heads
    q, k, v = (nn.Linear(d_model, d_model)(t) for t in (q, k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(d_head)
    if mask is not None:
        scores = scores.masked_fill(mask.bool(), -torch.inf)
    return nn.Linear(d_model, d_model)(torch.softmax(scores, -1) @ v)


class WeightsTimesQueries(nn.Module):
    """Heads on the batch axis, and `q` where `v` belongs."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.wq = nn.Linear(d_model, d_model)
        self.wk = nn.Linear(d_model, d_model)
        self.wv = nn.Linear(d_model, d_model)
        self.wo = nn.Linear(d_model, d_model)

    def fold(self, x):
        b, n, e = x.shape
        x = x.reshape(b, n, self.num_heads, -1).transpose(1, 2)
        return x.reshape(b * self.num_heads, n, -1)

    def forward(self, query, key, value):
        b, n, e = query.shape
        q = self.fold(self.wq(query))
        k = self.fold(self.wk(key))
        v = self.fold(self.wv(value))
        weights = torch.softmax(torch.bmm(q, k.mT) / v.shape[-1] ** 0.5, dim=-1)
        out = torch.bmm(weights, q)
        out = out.view(b, self.num_heads, n, -1).transpose(1, 2)
        return self.wo(out.reshape(b, n, e))


class KeysAgainstKeys(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_linear = nn.Linear(embed_dim, embed_dim)
        self.k_linear = nn.Linear(embed_dim, embed_dim)
        self.v_linear = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value):
        B, L, E = query.shape
        shape = (B, -1, self.num_heads, E // self.num_heads)
        Q = self.q_linear(query).view(shape).transpose(1, 2)
        K = self.k_linear(key).view(shape).transpose(1, 2)
        V = self.v_linear(value).view(shape).transpose(1, 2)
        scores = torch.einsum("bhqd,bhkd->bhqk", K, K) / math.sqrt(Q.size(-1))
        context = torch.einsum("bhqk,bhkd->bqhd", scores.softmax(dim=-1), V)
        return self.out_proj(context.reshape(B, L, E))


class KeysTimesQueries(nn.Module):
    """K Qᵀ for Q Kᵀ: where all three are x, it would be the swapped matrices."""

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_embd, n_embd)
        self.key = nn.Linear(n_embd, n_embd)
        self.value = nn.Linear(n_embd, n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, query, key, value):
        B, T, C = value.size()
        q = self.query(query).view(B, -1, self.n_head, C // self.n_head).transpose(1, 2)
        k = self.key(key).view(B, -1, self.n_head, C // self.n_head).transpose(1, 2)
        v = self.value(value).view(B, -1, self.n_head, C // self.n_head).transpose(1, 2)
        att = (k @ q.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class KeysReshapedToFit(nn.Module):
    """The shapes of the product are right."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.to_qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.to_out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        b, n, _ = x.shape
        qkv = self.to_qkv(x).view(b, n, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        k = k.reshape(b, self.num_heads, self.head_dim, n)
        weights = torch.softmax(q @ k / self.head_dim**0.5, dim=-1)
        return self.to_out((weights @ v).transpose(1, 2).reshape(b, n, -1))


def core_keys_reshaped(q, k, v):
    """q, k, v: (B, H, L, D)."""
    scores = torch.matmul(q, k.reshape(*k.shape[:-2], k.shape[-1], k.shape[-2]))
    return torch.matmul(F.softmax(scores / math.sqrt(q.shape[-1]), dim=-1), v)
