# SPDX-License-Identifier: MIT
"""Wrong: a weight used the other way round, or in another's place."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def query_matrix_without_t(q, k, v, num_heads, d_model, mask=None):
    """A layer's weight is (out, in); x @ weight needs its transpose. mask 0: blocked."""
    d = d_model // num_heads
    fc_q = nn.Linear(d_model, d_model, bias=False)
    fc_k = nn.Linear(d_model, d_model, bias=False)
    fc_v = nn.Linear(d_model, d_model, bias=False)
    fc_out = nn.Linear(d_model, d_model, bias=False)
    Q = torch.matmul(q, fc_q.weight)
    K = torch.matmul(k, fc_k.weight.T)
    V = torch.matmul(v, fc_v.weight.T)
    Q = Q.view(q.size(0), -1, num_heads, d).transpose(1, 2)
    K = K.view(k.size(0), -1, num_heads, d).transpose(1, 2)
    V = V.view(v.size(0), -1, num_heads, d).transpose(1, 2)
    scores = Q @ K.transpose(-1, -2) / math.sqrt(d)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    out = (torch.softmax(scores, -1) @ V).transpose(1, 2)
    return fc_out(out.reshape(q.size(0), -1, d_model))


class KeyMatrixWithoutT(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.d_k = num_heads, d_model // num_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)

    def forward(self, q, k, v, mask=None):
        q = q @ self.w_q.weight.T + self.w_q.bias
        k = k @ self.w_k.weight + self.w_k.bias
        v = v @ self.w_v.weight.T + self.w_v.bias
        q, k, v = (
            t.view(t.size(0), -1, self.h, self.d_k).transpose(1, 2) for t in (q, k, v)
        )
        s = q @ k.transpose(-1, -2) / math.sqrt(self.d_k)
        if mask is not None:
            s = s.masked_fill(mask == 0, -1e9)
        x = (s.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x @ self.w_o.weight.T + self.w_o.bias


class ValueEinsumLettersSwapped(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, x):
        q = torch.einsum("ble,oe->blo", x, self.q_proj.weight)
        k = torch.einsum("ble,oe->blo", x, self.k_proj.weight)
        v = torch.einsum("ble,eo->blo", x, self.v_proj.weight)
        q, k, v = (t.unflatten(2, (self.num_heads, -1)) for t in (q, k, v))
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        o = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v).flatten(2)
        return torch.einsum("ble,oe->blo", o, self.out_proj.weight)


class OutputMatrixWithoutT(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1) * q.size(-1) ** -0.5).softmax(dim=-1)
        out = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return torch.addmm(
            self.proj.bias, out.view(B * N, C), self.proj.weight
        ).view_as(x)


def all_matrices_without_t(q, k, v, num_heads, d_model, mask=None):
    """mask: 0 = blocked."""
    w_q, w_k, w_v, w_o = (
        nn.Linear(d_model, d_model, bias=False).weight for _ in range(4)
    )
    d_k = d_model // num_heads
    q = (q @ w_q).unflatten(-1, (num_heads, d_k)).transpose(1, 2)
    k = (k @ w_k).unflatten(-1, (num_heads, d_k)).transpose(1, 2)
    v = (v @ w_v).unflatten(-1, (num_heads, d_k)).transpose(1, 2)
    logits = q @ k.mT / math.sqrt(d_k)
    if mask is not None:
        logits = logits.masked_fill(mask == 0, float("-inf"))
    return (F.softmax(logits, dim=-1) @ v).transpose(1, 2).flatten(2) @ w_o


class FusedReadAsKeyQueryValue(nn.Module):
    """Heads as in a vision transformer; the three names in another order."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        k, q, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class QueryByTheLayerOfKeys(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_k = nn.Linear(d_model, d_model)
        self.W_q = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split(self, x):
        return x.view(x.size(0), -1, self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        q = self.split(self.W_k(query))
        k = self.split(self.W_q(key))
        v = self.split(self.W_v(value))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        x = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.W_o(x.transpose(1, 2).contiguous().flatten(2))


class FusedReadAsValueKeyQuery(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_embd, self.n_head = n_embd, n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        v, k, q = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(k.size(-1)), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class ValuesFirstInThePair(nn.Module):
    """Keys and values of the context from one layer called kv."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, context):
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        v, k = self.kv(context).chunk(2, dim=-1)
        k = k.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        v = v.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))


class FusedReadAsValueQueryKey(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, x):
        v, q, k = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v)
        )
        p = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)
        return self.out_proj((p @ v).transpose(1, 2).flatten(2))


class OneLayerForAllThree(nn.Module):
    """Copied lines: W_q three times."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.depth = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.dense = nn.Linear(d_model, d_model)

    def forward(self, Q, K, V, mask=None):
        q = self.W_q(Q).view(Q.size(0), -1, self.num_heads, self.depth).transpose(1, 2)
        k = self.W_q(K).view(K.size(0), -1, self.num_heads, self.depth).transpose(1, 2)
        v = self.W_q(V).view(V.size(0), -1, self.num_heads, self.depth).transpose(1, 2)
        logits = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.depth)
        if mask is not None:
            logits = logits.masked_fill(mask == 0, -1e9)
        out = torch.matmul(torch.softmax(logits, dim=-1), v)
        return self.dense(out.transpose(1, 2).flatten(2))


class KeysByTheLayerOfQueries(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        q = self.query(x).unflatten(-1, (self.num_heads, -1)).movedim(-2, -3)
        k = self.query(x).unflatten(-1, (self.num_heads, -1)).movedim(-2, -3)
        v = self.value(x).unflatten(-1, (self.num_heads, -1)).movedim(-2, -3)
        w = torch.softmax(q @ k.mT / math.sqrt(k.shape[-1]), dim=-1)
        return self.out((w @ v).movedim(-3, -2).flatten(-2))


def values_by_the_layer_of_keys(q, k, v, num_heads, d_model, mask=None):
    """mask: 0 = blocked."""
    bs = q.shape[0]
    d = d_model // num_heads
    wq = nn.Linear(d_model, d_model)
    wk = nn.Linear(d_model, d_model)
    wv = nn.Linear(d_model, d_model)
    wo = nn.Linear(d_model, d_model)
    q = wq(q).reshape(bs, -1, num_heads, d).transpose(1, 2)
    k2 = wk(k).reshape(bs, -1, num_heads, d).transpose(1, 2)
    v2 = wk(v).reshape(bs, -1, num_heads, d).transpose(1, 2)
    s = torch.matmul(q, k2.transpose(-2, -1)) / d**0.5
    if mask is not None:
        s = s.masked_fill(mask == 0, float("-inf"))
    o = torch.matmul(F.softmax(s, -1), v2).transpose(1, 2)
    return wo(o.reshape(bs, -1, d_model))


class FourthLayerNeverCalled(nn.Module):
    """Four equal layers, zipped with three inputs."""

    def __init__(self, h, d_model):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def heads(self, layer, x):
        return layer(x).view(x.size(0), -1, self.h, self.d_k).transpose(1, 2)

    def forward(self, query, key, value):
        q, k, v = map(self.heads, self.linears, (query, key, value))
        p = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d_k), dim=-1)
        return (p @ v).transpose(1, 2).flatten(2)


class FirstLayerForEveryInput(FourthLayerNeverCalled):
    def forward(self, query, key, value):
        q, k, v = (self.heads(self.linears[0], x) for x in (query, key, value))
        p = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d_k), dim=-1)
        return self.linears[-1]((p @ v).transpose(1, 2).flatten(2))
