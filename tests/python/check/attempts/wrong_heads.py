# SPDX-License-Identifier: MIT
"""Wrong: heads cut or joined along the wrong axis; heads shared the wrong way."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def view_straight_to_heads(q, k, v, num_heads, d_model, mask=None):
    """mask: 0 = blocked."""
    B, L, E = q.shape
    S = k.shape[1]
    D = d_model // num_heads
    Q = nn.Linear(d_model, d_model)(q).view(B, num_heads, L, D)
    K = nn.Linear(d_model, d_model)(k).view(B, num_heads, S, D)
    V = nn.Linear(d_model, d_model)(v).view(B, num_heads, S, D)
    scores = Q @ K.transpose(-2, -1) / math.sqrt(D)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    out = torch.softmax(scores, dim=-1) @ V
    return nn.Linear(d_model, d_model)(out.transpose(1, 2).reshape(B, L, E))


class ReshapeInsteadOfTranspose(nn.Module):
    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.num_heads = num_attention_heads
        self.head_size = hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def to_heads(self, x):
        return x.reshape(x.size(0), self.num_heads, x.size(1), self.head_size)

    def forward(self, hidden_states):
        q = self.to_heads(self.query(hidden_states))
        k = self.to_heads(self.key(hidden_states))
        v = self.to_heads(self.value(hidden_states))
        probs = F.softmax(q @ k.transpose(-1, -2) / math.sqrt(self.head_size), dim=-1)
        return self.dense((probs @ v).permute(0, 2, 1, 3).flatten(2))


class HeadsInTheLastAxis(nn.Module):
    """The channels are read as (D, H) instead of (H, D)."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.wq = nn.Linear(d_model, d_model)
        self.wk = nn.Linear(d_model, d_model)
        self.wv = nn.Linear(d_model, d_model)
        self.wo = nn.Linear(d_model, d_model)

    def forward(self, q, k, v, mask=None):
        q = self.wq(q).view(*q.shape[:2], self.d_head, self.n_heads).permute(0, 3, 1, 2)
        k = self.wk(k).view(*k.shape[:2], self.d_head, self.n_heads).permute(0, 3, 1, 2)
        v = self.wv(v).view(*v.shape[:2], self.d_head, self.n_heads).permute(0, 3, 1, 2)
        s = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            s = s.masked_fill(mask == 0, float("-inf"))
        o = torch.einsum("bhqk,bhkd->bqhd", s.softmax(-1), v)
        return self.wo(o.flatten(2))


class StridedHeads(nn.Module):
    """Head h takes every n-th channel."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        heads = []
        for h in range(self.num_heads):
            qh, kh, vh = (t[..., h :: self.num_heads] for t in (q, k, v))
            a = torch.softmax(qh @ kh.mT / math.sqrt(qh.shape[-1]), dim=-1)
            heads.append(a @ vh)
        return self.out_proj(torch.cat(heads, dim=-1))


class JoinedWithoutTranspose(nn.Module):
    """mask: 0 = blocked."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.qkv_layer = nn.Linear(d_model, 3 * d_model)
        self.linear_layer = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        batch_size, length, d_model = x.size()
        qkv = self.qkv_layer(x)
        qkv = qkv.reshape(batch_size, length, self.num_heads, 3 * self.head_dim)
        q, k, v = qkv.permute(0, 2, 1, 3).chunk(3, dim=-1)
        scaled = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        if mask is not None:
            scaled = scaled.masked_fill(mask == 0, float("-inf"))
        values = torch.matmul(F.softmax(scaled, dim=-1), v)
        values = values.reshape(batch_size, length, d_model)
        return self.linear_layer(values)


class FoldedAndNotUnfolded(nn.Module):
    """(B H, L, D) viewed as (B, L, E) at once."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def shape(self, x, bsz):
        x = x.view(bsz, -1, self.num_heads, self.head_dim).transpose(1, 2)
        return x.contiguous().view(bsz * self.num_heads, -1, self.head_dim)

    def forward(self, query, key, value):
        bsz, tgt_len, embed_dim = query.size()
        q = self.shape(self.q_proj(query), bsz)
        k = self.shape(self.k_proj(key), bsz)
        v = self.shape(self.v_proj(value), bsz)
        weights = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(self.head_dim)
        out = torch.bmm(weights.softmax(dim=-1), v)
        return self.out_proj(out.view(bsz, tgt_len, embed_dim))


class JoinedChannelFirst(nn.Module):
    """einsum leaves (B, L, D, H)."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)) for t in self.to_qkv(x).chunk(3, dim=-1)
        )
        dots = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        out = torch.einsum("bhij,bjhd->bidh", dots.softmax(dim=-1), v)
        return self.to_out(out.flatten(2))


class HeadsAveraged(nn.Module):
    """The heads are averaged where they should stand side by side."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(self.d_k, d_model)

    def forward(self, x):
        B, L, _ = x.shape
        q = self.w_q(x).view(B, L, self.num_heads, self.d_k).transpose(1, 2)
        k = self.w_k(x).view(B, L, self.num_heads, self.d_k).transpose(1, 2)
        v = self.w_v(x).view(B, L, self.num_heads, self.d_k).transpose(1, 2)
        attn = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d_k), dim=-1)
        return self.w_o((attn @ v).mean(dim=1))


class WeightsAveraged(nn.Module):
    """The heads' weights are averaged before the values are collected."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.Linear(embed_dim, embed_dim)
        self.W_k = nn.Linear(embed_dim, embed_dim)
        self.W_v = nn.Linear(embed_dim, embed_dim)
        self.W_o = nn.Linear(embed_dim, embed_dim)

    def forward(self, q, k, v, mask=None):
        """mask: 0 = blocked."""
        q = self.W_q(q).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.W_k(k).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        v = self.W_v(v).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        s = q @ k.mT / math.sqrt(q.size(-1))
        if mask is not None:
            s = s.masked_fill(mask == 0, -1e9)
        attn = s.softmax(dim=-1).mean(dim=1, keepdim=True)
        return self.W_o((attn @ v).transpose(1, 2).flatten(2))


class WeightsTheWrongWayRound(nn.Module):
    """einsum sums over queries where it should over keys."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)) for t in self.qkv(x).chunk(3, dim=-1)
        )
        attn = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
        attn = attn.softmax(dim=-1)
        return self.proj(torch.einsum("bhij,bihd->bjhd", attn, v).flatten(2))


def transposed_attention(Q, K, V):
    """Weights of queries and keys exchanged."""
    scores = torch.matmul(Q, K.transpose(-1, -2)) / math.sqrt(Q.size(-1))
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights.transpose(-1, -2), V)
