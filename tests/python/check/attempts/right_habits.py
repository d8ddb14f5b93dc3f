# SPDX-License-Identifier: MIT
"""Right: habits that look unusual and change nothing but the last bits."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import vmap


class ScaleOnBothSides(nn.Module):
    """Queries and keys by the fourth root each; mask True = attend."""

    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x, xa=None, mask=None):
        xa = x if xa is None else xa
        q, k, v = self.query(x), self.key(xa), self.value(xa)
        scale = (q.shape[-1] // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if mask is not None:
            qk = qk.masked_fill(mask.logical_not(), -torch.inf)
        w = F.softmax(qk, dim=-1)
        return self.out((w @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


class EinsumWithHeadsInTheWeights(nn.Module):
    """Parameters (H, E, D) and (H, D, E), one einsum per step."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        d_head = d_model // n_heads
        self.W_Q = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_K = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_V = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_O = nn.Parameter(torch.empty(n_heads, d_head, d_model))
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))
        for w in (self.W_Q, self.W_K, self.W_V, self.W_O):
            nn.init.normal_(w, std=0.02)

    def forward(self, x):
        q = torch.einsum("bpe,ned->bpnd", x, self.W_Q) + self.b_Q
        k = torch.einsum("bpe,ned->bpnd", x, self.W_K) + self.b_K
        v = torch.einsum("bpe,ned->bpnd", x, self.W_V) + self.b_V
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) / q.shape[-1] ** 0.5
        z = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), v)
        return torch.einsum("bqnd,nde->bqe", z, self.W_O) + self.b_O


class LongRearrangements(nn.Module):
    """Heads into the batch by movedim and flatten, and out again."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        batch = x.shape[0]
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (
            t.unflatten(2, (self.heads, -1)).movedim(2, 1).flatten(0, 1)
            for t in (q, k, v)
        )
        attn = torch.bmm(q, k.mT).mul(q.shape[-1] ** -0.5).softmax(dim=-1)
        out = torch.bmm(attn, v).unflatten(0, (batch, self.heads))
        return self.to_out(out.movedim(1, 2).flatten(2))


class Vmapped(nn.Module):
    """One head of one item written down, mapped over both."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value):
        def one(q, k, v):
            return F.softmax(q @ k.T / math.sqrt(q.shape[-1]), dim=-1) @ v

        def heads(x):
            return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        out = vmap(vmap(one))(heads(q), heads(k), heads(v))
        return self.out_proj(out.transpose(1, 2).flatten(2))


class MaskPerHead(nn.Module):
    """mask: (B, H, Lq, Lk) or less, 1 = blocked; returns weights per head."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.h, self.d = num_heads, embed_dim // num_heads
        self.Wq = nn.Linear(embed_dim, embed_dim)
        self.Wk = nn.Linear(embed_dim, embed_dim)
        self.Wv = nn.Linear(embed_dim, embed_dim)
        self.Wo = nn.Linear(embed_dim, embed_dim)

    def forward(self, q, k, v, mask=None):
        q = self.Wq(q).view(*q.shape[:2], self.h, self.d).transpose(1, 2)
        k = self.Wk(k).view(*k.shape[:2], self.h, self.d).transpose(1, 2)
        v = self.Wv(v).view(*v.shape[:2], self.h, self.d).transpose(1, 2)
        s = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.d)
        if mask is not None:
            s = s.masked_fill(mask != 0, torch.finfo(s.dtype).min)
        p = torch.softmax(s, dim=-1)
        return self.Wo((p @ v).transpose(1, 2).flatten(2)), p


class PaddingAndMask(nn.Module):
    """key_padding_mask and attn_mask, True = blocked; weights averaged over heads."""

    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, key_padding_mask=None, attn_mask=None):
        B, L, E = x.shape
        qkv = self.in_proj(x).view(B, L, 3, self.num_heads, E // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask, float("-inf"))
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], float("-inf"))
        weights = self.dropout(scores.softmax(dim=-1))
        out = self.out_proj((weights @ v).transpose(1, 2).reshape(B, L, E))
        return out, weights.mean(dim=1)


class SoftmaxInFloat32(nn.Module):
    """The softmax of half precision models, written for them in float32."""

    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bsz, seqlen, self.n_heads, self.head_dim).transpose(1, 2)
        xk = xk.view(bsz, seqlen, self.n_heads, self.head_dim).transpose(1, 2)
        xv = xv.view(bsz, seqlen, self.n_heads, self.head_dim).transpose(1, 2)
        scores = torch.matmul(xq, xk.transpose(2, 3)) / math.sqrt(self.head_dim)
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, xv)
        return self.wo(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class AlwaysFloat32(SoftmaxInFloat32):
    """Everything between the projections in float32, whatever comes."""

    def forward(self, x):
        split = (*x.shape[:2], self.n_heads, self.head_dim)
        q, k, v = (w(x).view(split).float() for w in (self.wq, self.wk, self.wv))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.head_dim)
        out = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v)
        return self.wo(out.flatten(2).type_as(x))


class DropoutOfTheResult(nn.Module):
    """Drops elements of the result and no weights, as vision models may."""

    def __init__(self, dim, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(dropout)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = ((q * q.size(-1) ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj_drop(self.proj((attn @ v).transpose(1, 2).reshape(B, N, C)))
