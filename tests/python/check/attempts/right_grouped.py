# SPDX-License-Identifier: MIT
"""Right: fewer heads of keys and values than of queries."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def grouped_query_attention(
    q, k, v, num_query_heads, num_query_groups, d_model, mask=None
):
    """mask: 0 = blocked; heads repeated one by one."""
    B, L, _ = q.shape
    S = k.shape[1]
    d_head = d_model // num_query_heads
    wq = nn.Linear(d_model, d_model, bias=False)
    wk = nn.Linear(d_model, num_query_groups * d_head, bias=False)
    wv = nn.Linear(d_model, num_query_groups * d_head, bias=False)
    wo = nn.Linear(d_model, d_model, bias=False)
    Q = wq(q).view(B, L, num_query_heads, d_head).transpose(1, 2)
    K = wk(k).view(B, S, num_query_groups, d_head).transpose(1, 2)
    V = wv(v).view(B, S, num_query_groups, d_head).transpose(1, 2)
    group = num_query_heads // num_query_groups
    K = torch.repeat_interleave(K, group, dim=1)
    V = torch.repeat_interleave(V, group, dim=1)
    scores = Q @ K.transpose(-1, -2) / math.sqrt(d_head)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    out = torch.softmax(scores, dim=-1) @ V
    return wo(out.transpose(1, 2).reshape(B, L, d_model))


def repeat_kv(x, n_rep):
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, n_rep, s, d).reshape(b, h * n_rep, s, d)


class GroupedQueryAttention(nn.Module):
    """Expanded and reshaped; mask 0 = blocked."""

    def __init__(self, embed_dim, num_heads, num_kv_heads):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=False)

    def forward(self, x, mask=None):
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        k = repeat_kv(k, self.num_heads // self.num_kv_heads)
        v = repeat_kv(v, self.num_heads // self.num_kv_heads)
        scores = q @ k.mT / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class GroupsAsAnAxis(nn.Module):
    """Nothing repeated: the group is an axis of the einsum."""

    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim // n_heads * n_kv_heads, bias=False)
        self.wv = nn.Linear(dim, dim // n_heads * n_kv_heads, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        g = self.n_heads // self.n_kv_heads
        q = self.wq(x).unflatten(-1, (self.n_kv_heads, g, -1))
        k = self.wk(x).unflatten(-1, (self.n_kv_heads, -1))
        v = self.wv(x).unflatten(-1, (self.n_kv_heads, -1))
        s = torch.einsum("bqhgd,bkhd->bhgqk", q, k) / math.sqrt(q.shape[-1])
        o = torch.einsum("bhgqk,bkhd->bqhgd", s.softmax(dim=-1), v)
        return self.wo(o.flatten(2))


class GroupsInPyTorch(nn.Module):
    """enable_gqa does it; causal when asked."""

    def __init__(self, hidden_size, num_attention_heads, num_key_value_heads):
        super().__init__()
        self.heads, self.kv_heads = num_attention_heads, num_key_value_heads
        head_dim = hidden_size // num_attention_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * head_dim)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * head_dim)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states, is_causal=False):
        q = self.q_proj(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k_proj(hidden_states).unflatten(-1, (self.kv_heads, -1))
        v = self.v_proj(hidden_states).unflatten(-1, (self.kv_heads, -1))
        out = F.scaled_dot_product_attention(
            q,
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=is_causal,
            enable_gqa=True,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class OneHeadForAll(nn.Module):
    """Multi-query: a single head of keys and values; loops over the queries' heads."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, self.head_dim)
        self.value = nn.Linear(d_model, self.head_dim)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        k, v = self.key(x), self.value(x)
        results = []
        for q in self.query(x).split(self.head_dim, dim=-1):
            w = F.softmax(q @ k.transpose(1, 2) / self.head_dim**0.5, dim=-1)
            results.append(w @ v)
        return self.out(torch.cat(results, dim=-1))


class IndexedGroups(nn.Module):
    """Head h of the queries reads head h // group; keys and values in one layer."""

    def __init__(self, embed_dim, num_heads, num_kv_heads):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.q = nn.Linear(embed_dim, embed_dim)
        self.kv = nn.Linear(embed_dim, 2 * num_kv_heads * self.head_dim)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, context):
        b, n, e = query.shape
        m = context.shape[1]
        q = self.q(query).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        kv = self.kv(context).view(b, m, 2, self.num_kv_heads, self.head_dim)
        k, v = kv.permute(2, 0, 3, 1, 4)
        group = torch.arange(self.num_heads) // (self.num_heads // self.num_kv_heads)
        k, v = k[:, group], v[:, group]
        attn = torch.softmax(q @ k.mT * self.head_dim**-0.5, dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, e))


class MaskOfZerosAndInfinities(nn.Module):
    """As the language models do: shared heads, and attention_mask (B, 1, Lq, Lk) is
    added to scores whose softmax is in float32."""

    def __init__(self, hidden_size, num_attention_heads, num_key_value_heads):
        super().__init__()
        self.head_dim = hidden_size // num_attention_heads
        self.groups = num_attention_heads // num_key_value_heads
        shared = num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None):
        b, n, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, n, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(b, n, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, n, -1, self.head_dim).transpose(1, 2)
        k, v = repeat_kv(k, self.groups), repeat_kv(v, self.groups)
        weights = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)
        if attention_mask is not None:
            weights = weights + attention_mask[:, :, :, :n]
        weights = weights.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(b, n, -1))
