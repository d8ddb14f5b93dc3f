# SPDX-License-Identifier: MIT
"""Wrong: scores multiplied by something else than one over the root of D."""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def never_scaled(q, k, v, num_heads, d_model, mask=None):
    """mask: 0 = blocked."""
    B = q.size(0)
    d = d_model // num_heads
    q = nn.Linear(d_model, d_model)(q).view(B, -1, num_heads, d).transpose(1, 2)
    k = nn.Linear(d_model, d_model)(k).view(B, -1, num_heads, d).transpose(1, 2)
    v = nn.Linear(d_model, d_model)(v).view(B, -1, num_heads, d).transpose(1, 2)
    scores = q @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    out = (scores.softmax(dim=-1) @ v).transpose(1, 2).contiguous()
    return nn.Linear(d_model, d_model)(out.view(B, -1, d_model))


class HeadWithoutScale(nn.Module):
    def __init__(self, n_embd, head_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)

    def forward(self, x):
        wei = self.query(x) @ self.key(x).transpose(-2, -1)
        return F.softmax(wei, dim=-1) @ self.value(x)


class HeadsWithoutScale(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.heads = nn.ModuleList(
            [HeadWithoutScale(n_embd, n_embd // n_head) for _ in range(n_head)]
        )
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


def unscaled_attention(Q, K, V):
    """The formula without its root."""
    return torch.softmax(Q @ K.transpose(-2, -1), dim=-1) @ V


class ScaledByEmbedding(nn.Module):
    """values, keys, query: the order of a well-known video; mask 0 = blocked."""

    def __init__(self, embed_size, heads):
        super().__init__()
        self.embed_size, self.heads = embed_size, heads
        self.head_dim = embed_size // heads
        self.values = nn.Linear(embed_size, embed_size)
        self.keys = nn.Linear(embed_size, embed_size)
        self.queries = nn.Linear(embed_size, embed_size)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, values, keys, query, mask=None):
        N = query.shape[0]
        values = self.values(values).reshape(N, -1, self.heads, self.head_dim)
        keys = self.keys(keys).reshape(N, -1, self.heads, self.head_dim)
        queries = self.queries(query).reshape(N, -1, self.heads, self.head_dim)
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))
        attention = torch.softmax(energy / (self.embed_size ** (1 / 2)), dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", [attention, values])
        return self.fc_out(out.flatten(2))


def root_of_d_model(q, k, v, num_heads, d_model, mask=None):
    """mask: True = blocked."""
    bs, n, _ = q.shape
    w = [nn.Linear(d_model, d_model, bias=False) for _ in range(4)]
    q, k, v = (
        lin(t).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for lin, t in zip(w, (q, k, v))
    )
    a = torch.matmul(q, k.mT) / np.sqrt(d_model)
    if mask is not None:
        a = a.masked_fill(mask.bool(), -torch.inf)
    return w[3]((a.softmax(-1) @ v).transpose(1, 2).reshape(bs, n, d_model))


class _Fused(nn.Module):
    """qkv and proj; subclasses say what multiplies the scores."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.dim, self.num_heads = dim, num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def heads(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim)
        return qkv.permute(2, 0, 3, 1, 4)

    def join(self, attn, v):
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class RootForgotten(_Fused):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.join(q @ k.transpose(-2, -1) / self.head_dim, v)


class RootOfTheLength(_Fused):
    """size(-2) of (B, H, L, D)."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.join(q @ k.transpose(-2, -1) / math.sqrt(k.size(-2)), v)


class RootOfTheHeads(_Fused):
    """size(1) is the number of heads by now."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.join(q @ k.transpose(-2, -1) / k.size(1) ** 0.5, v)


class ScaledOnceMore(_Fused):
    """PyTorch's function scales by itself."""

    def forward(self, x):
        q, k, v = self.heads(x)
        q = q * self.head_dim**-0.5
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))


class TimesTheRoot(_Fused):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.join(q @ k.transpose(-2, -1) * self.head_dim**0.5, v)


class WholeEmbedding(_Fused):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.join(torch.matmul(q, k.mT) / self.dim, v)


class ScaledWithTheQueriesAndTheScores(_Fused):
    def forward(self, x):
        q, k, v = self.heads(x)
        q = q / math.sqrt(self.head_dim)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(self.head_dim)
        return self.join(scores, v)


def root_of_the_keys_length(query, key, value):
    """key.size(1), after unbatched examples where it was the width."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(key.size(-2))
    return torch.matmul(F.softmax(scores, dim=-1), value)


def numpy_divides_by_d(Q, K, V, W_q, W_k, W_v, W_o, num_heads):
    """NumPy; forgets the root."""
    b, n, e = Q.shape
    d = e // num_heads
    q = (Q @ W_q).reshape(b, -1, num_heads, d).transpose(0, 2, 1, 3)
    k = (K @ W_k).reshape(b, -1, num_heads, d).transpose(0, 2, 1, 3)
    v = (V @ W_v).reshape(b, -1, num_heads, d).transpose(0, 2, 1, 3)
    scores = q @ k.transpose(0, 1, 3, 2) / d
    e_x = np.exp(scores - scores.max(-1, keepdims=True))
    weights = e_x / e_x.sum(-1, keepdims=True)
    return (weights @ v).transpose(0, 2, 1, 3).reshape(b, n, e) @ W_o


class ScaledByHiddenSize(nn.Module):
    """As in BERT, whose attention_mask is added."""

    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.heads, self.hidden_size = num_attention_heads, hidden_size
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, attention_mask=None):
        q, k, v = (
            layer(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.mT / math.sqrt(self.hidden_size)
        if attention_mask is not None:
            scores = scores + attention_mask
        return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


class FourthRootOfTheQueriesAlone(_Fused):
    """Queries and keys were to get half of the scale each."""

    def forward(self, x):
        q, k, v = self.heads(x)
        q = q * self.head_dim**-0.25
        return self.join(q @ k.transpose(-2, -1), v)


def squared_for_rooted(query, key, value, h, d_model):
    """** 2 for ** 0.5."""
    q, k, v = (
        torch.stack(nn.Linear(d_model, d_model)(t).chunk(h, dim=-1), dim=1)
        for t in (query, key, value)
    )
    p_attn = torch.softmax(torch.matmul(q, k.mT) / q.size(-1) ** 2, dim=-1)
    return nn.Linear(d_model, d_model)(torch.cat((p_attn @ v).unbind(1), dim=-1))


class WeightsDividedByTheRoot(_Fused):
    """A bracket in the wrong place."""

    def forward(self, x):
        q, k, v = self.heads(x)
        attn = F.softmax(q @ k.mT, dim=-1) / math.sqrt(self.head_dim)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


def divided_by_eight(Q, K, V, mask=None):
    """The root of the paper's 64, as a number; mask: True = may attend."""
    scores = torch.einsum("...id,...jd->...ij", Q, K) / 8.0
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf)
    return torch.einsum("...ij,...jd->...id", scores.softmax(-1), V)


class Temperature(_Fused):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.join(q @ k.mT * self.head_dim**-0.5 / 0.7, v)
