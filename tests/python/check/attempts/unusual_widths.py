# SPDX-License-Identifier: MIT
"""Layers whose widths are not all one, as classes and as instances of them; right,
and with one fault each."""

import torch
import torch.nn as nn


class MultiHeadAttention(nn.Module):
    """From d_in to d_out features; causal."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        assert d_out % num_heads == 0, "d_out must be divisible by num_heads"
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        ones = torch.ones(context_length, context_length)
        self.register_buffer("mask", torch.triu(ones, diagonal=1))

    def split(self, x):
        b, num_tokens, _ = x.shape
        return x.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)

    def scaled(self, scores):
        return scores / self.head_dim**0.5

    def forward(self, x):
        b, num_tokens, _ = x.shape
        keys = self.split(self.W_key(x))
        queries = self.split(self.W_query(x))
        values = self.split(self.W_value(x))
        scores = queries @ keys.transpose(2, 3)
        future = self.mask.bool()[:num_tokens, :num_tokens]
        scores.masked_fill_(future, -torch.inf)
        weights = self.dropout(torch.softmax(self.scaled(scores), dim=-1))
        context = (weights @ values).transpose(1, 2)
        return self.out_proj(context.contiguous().view(b, num_tokens, self.d_out))


class Unscaled(MultiHeadAttention):
    def scaled(self, scores):
        return scores


class ScaledByAllHeads(MultiHeadAttention):
    def scaled(self, scores):
        return scores / self.d_out**0.5


class ViewedStraightToHeads(MultiHeadAttention):
    def split(self, x):
        b, num_tokens, _ = x.shape
        return x.view(b, self.num_heads, num_tokens, self.head_dim)


class OneTokenAhead(MultiHeadAttention):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__(d_in, d_out, context_length, dropout, num_heads, qkv_bias)
        ones = torch.ones(context_length, context_length)
        self.register_buffer("mask", torch.triu(ones, diagonal=2))


def _built(kind):
    return kind(20, 32, context_length=12, dropout=0.1, num_heads=4)


small = MultiHeadAttention(3, 2, context_length=12, dropout=0.0, num_heads=2)
wide = _built(MultiHeadAttention)
wide_biased = MultiHeadAttention(20, 32, 12, 0.0, 8, qkv_bias=True)
wide_unscaled = _built(Unscaled)
wide_scaled_by_all_heads = _built(ScaledByAllHeads)
wide_viewed_straight = _built(ViewedStraightToHeads)
wide_one_token_ahead = _built(OneTokenAhead)


class SelfAttentionV1(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x):
        keys, queries, values = x @ self.W_key, x @ self.W_query, x @ self.W_value
        scores = queries @ keys.transpose(-2, -1)
        return torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1) @ values


class SelfAttentionV1Unscaled(SelfAttentionV1):
    def forward(self, x):
        keys, queries, values = x @ self.W_key, x @ self.W_query, x @ self.W_value
        return torch.softmax(queries @ keys.transpose(-2, -1), dim=-1) @ values


class CausalAttention(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, qkv_bias=False):
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(dropout)
        ones = torch.ones(context_length, context_length)
        self.register_buffer("mask", torch.triu(ones, diagonal=1))

    def forward(self, x):
        keys, queries, values = self.W_key(x), self.W_query(x), self.W_value(x)
        scores = queries @ keys.transpose(1, 2)
        length = x.shape[1]
        scores.masked_fill_(self.mask.bool()[:length, :length], -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        return self.dropout(weights) @ values


class MultiHeadAttentionWrapper(nn.Module):
    """Single heads side by side, and nothing after them."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        given = d_in, d_out, context_length, dropout, qkv_bias
        self.heads = nn.ModuleList([CausalAttention(*given) for _ in range(num_heads)])

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)


self_attention = SelfAttentionV1(3, 2)
self_attention_unscaled = SelfAttentionV1Unscaled(20, 32)
causal_attention = CausalAttention(20, 32, 12, 0.0)
wrapper = MultiHeadAttentionWrapper(20, 32, 12, 0.0, num_heads=4)


class GeneralForm(nn.Module):
    """Heads of values have a width of their own. mask: 0 = blocked."""

    def __init__(self, n_head, d_model, d_k, d_v, dropout=0.1):
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def split(self, x, width):
        return x.view(x.size(0), -1, self.n_head, width).transpose(1, 2)

    def scaled(self, scores):
        return scores / self.d_k**0.5

    def merge(self, context):
        return context.transpose(1, 2)

    def forward(self, q, k, v, mask=None):
        q_heads = self.split(self.w_qs(q), self.d_k)
        k_heads = self.split(self.w_ks(k), self.d_k)
        v_heads = self.split(self.w_vs(v), self.d_v)
        scores = self.scaled(q_heads @ k_heads.transpose(2, 3))
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        weights = self.dropout(scores.softmax(-1))
        context = self.merge(weights @ v_heads)
        out = self.fc(context.contiguous().view(q.size(0), q.size(1), -1))
        return out, weights


class GeneralUnscaled(GeneralForm):
    def scaled(self, scores):
        return scores


class GeneralScaledByValues(GeneralForm):
    def scaled(self, scores):
        return scores / self.d_v**0.5


class GeneralJoinedStraight(GeneralForm):
    def merge(self, context):
        return context


class GeneralViewedStraight(GeneralForm):
    def split(self, x, width):
        return x.view(x.size(0), self.n_head, -1, width)


general = GeneralForm(4, 32, d_k=8, d_v=6)
general_of_three_heads = GeneralForm(3, 20, d_k=8, d_v=6)
general_of_wide_values = GeneralForm(2, 20, d_k=5, d_v=8)
general_unscaled = GeneralUnscaled(4, 32, d_k=8, d_v=6)
general_scaled_by_values = GeneralScaledByValues(4, 32, d_k=8, d_v=6)
general_joined_straight = GeneralJoinedStraight(4, 32, d_k=8, d_v=6)
general_viewed_straight = GeneralViewedStraight(4, 32, d_k=8, d_v=6)
