# SPDX-License-Identifier: MIT
"""Attention in many styles, for the tests of `check`."""

import math

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from multihead.check.sandbox.guard import Guard, Outcome
from multihead.check.subject.target import describe


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)


def layers_inside(q, k, v, num_heads, d_model, mask=None):
    w_q, w_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
    w_v, w_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
    q, k, v = (split(w(x), num_heads) for w, x in zip((w_q, w_k, w_v), (q, k, v)))
    scores = q @ k.mT / math.sqrt(d_model // num_heads)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return w_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def matrices_inside(q, k, v, num_heads, d_model):
    W_q, W_k, W_v, W_o = (torch.randn(d_model, d_model) for _ in range(4))
    q, k, v = (split(x @ w, num_heads) for x, w in zip((q, k, v), (W_q, W_k, W_v)))
    return attend(q, k, v) @ W_o


def made_by_a_helper(q, k, v, num_heads, d_model):
    def project(x):
        return split(nn.Linear(d_model, d_model, bias=False)(x), num_heads)

    mixed = attend(project(q), project(k), project(v))
    return nn.Linear(d_model, d_model, bias=False)(mixed)


def loop_over_heads(q, k, v, num_heads, d_model):
    outs = []
    for _ in range(num_heads):
        a, b, c = (nn.Linear(d_model, d_model // num_heads) for _ in range(3))
        scores = a(q) @ b(k).mT / math.sqrt(d_model // num_heads)
        outs.append(scores.softmax(-1) @ c(v))
    last = nn.Linear(d_model, d_model)
    return last(torch.cat(outs, dim=-1))


def weights_passed(x, W_q, W_k, W_v, W_o, num_heads):
    q, k, v = (split(x @ w, num_heads) for w in (W_q, W_k, W_v))
    return attend(q, k, v) @ W_o


def in_numpy(Q, K, V, W_q, W_k, W_v, W_o, num_heads):
    def heads(x, w):
        return (x @ w).reshape(*x.shape[:2], num_heads, -1).transpose(0, 2, 1, 3)

    q, k, v = heads(Q, W_q), heads(K, W_k), heads(V, W_v)
    scores = numpy.exp(q @ k.transpose(0, 1, 3, 2) / numpy.sqrt(q.shape[-1]))
    mixed = scores / scores.sum(-1, keepdims=True) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(Q.shape) @ W_o


def grouped(q, k, v, num_heads, num_kv_heads, d_model):
    d = d_model // num_heads
    w_q, w_o = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
    w_k, w_v = (nn.Linear(d_model, num_kv_heads * d) for _ in range(2))
    k, v = split(w_k(k), num_kv_heads), split(w_v(v), num_kv_heads)
    times = num_heads // num_kv_heads
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    return w_o(attend(split(w_q(q), num_heads), k, v))


class Fused(nn.Module):
    def __init__(self, dim, heads, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(dropout)
        nn.init.zeros_(self.c_attn.bias)
        nn.init.zeros_(self.c_proj.bias)

    def forward(self, x):
        q, k, v = (split(t, self.heads) for t in self.c_attn(x).chunk(3, dim=-1))
        weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)
        out = self.attn_drop(weights) @ v
        return self.c_proj(out.transpose(1, 2).flatten(2))


class Numbered(nn.Module):
    """Layers whose names say nothing, as in the Annotated Transformer."""

    def __init__(self, h, d_model):
        super().__init__()
        self.h = h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value):
        q, k, v = (
            split(linear(x), self.h)
            for linear, x in zip(self.linears, (query, key, value))
        )
        return self.linears[-1](attend(q, k, v))


class HeadsInTheWeights(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        shape = (n_heads, d_model, d_model // n_heads)
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(shape)) for _ in "qkv")
        self.W_O = nn.Parameter(torch.randn(n_heads, shape[2], d_model))
        self.b_Q = nn.Parameter(torch.zeros(n_heads, shape[2]))

    def forward(self, x):
        q, k, v = (
            torch.einsum("ble,hed->bhld", x, w) for w in (self.W_Q, self.W_K, self.W_V)
        )
        q = q + self.b_Q[:, None]
        weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)
        return torch.einsum("bhld,hde->ble", weights @ v, self.W_O)


class Wraps(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)

    def forward(self, x, context):
        return self.attn(x, context, context)


class Configured(nn.Module):
    """Takes what it needs from one object."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.flash = getattr(config, "flash", "absent")
        self.rate = config.get("drop_rate", 0.0)
        self.c_attn = nn.Linear(config["n_embd"], 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):
        assert self.flash == "absent" and self.rate > 0 and self.c_attn.bias is not None
        q, k, v = (split(t, self.n_head) for t in self.c_attn(x).chunk(3, dim=-1))
        return self.c_proj(attend(q, k, v))


class AnyLength(nn.Module):
    """Equal lengths only, and its own width only."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.num_heads, self.drop = num_heads, nn.Dropout(dropout)
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        causal = torch.ones(context_length, context_length).triu(1)
        self.register_buffer("mask", causal)

    def forward(self, x):
        q, k, v = (
            split(w(x), self.num_heads)
            for w in (self.W_query, self.W_key, self.W_value)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        length = x.shape[1]
        scores = scores.masked_fill(self.mask.bool()[:length, :length], -torch.inf)
        weights = self.drop(scores.softmax(-1))
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class LengthsFirst(nn.Module):
    """(L, B, E), scores (Lq, Lk, B, H), arguments by keyword only."""

    def __init__(self, heads, d_model, dropout_prob=0.1):
        super().__init__()
        self.heads, self.scale = heads, (d_model // heads) ** -0.5
        self.query, self.key, self.value, self.output = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )
        self.dropout = nn.Dropout(dropout_prob)

    def forward(self, *, query, key, value, mask=None):
        seq_len, batch_size, _ = query.shape
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1))
            for layer, x in ((self.query, query), (self.key, key), (self.value, value))
        )
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * self.scale
        if mask is not None:
            scores = scores.masked_fill(mask[:, :, None, None] == 0, float("-inf"))
        out = torch.einsum("ijbh,jbhd->ibhd", self.dropout(scores.softmax(1)), v)
        return self.output(out.reshape(seq_len, batch_size, -1))


def core(query, key, value, attn_mask=None):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)


def core_of_one_head(q, k, v):
    B, L, D = q.shape
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D)
    return torch.bmm(torch.softmax(scores, dim=2), v), torch.softmax(scores, dim=2)


def subject_of(folder, source):
    """The function `attention` of a file with this text."""
    file = folder / "attention.py"
    file.write_text(source)
    scope = {}
    exec(compile(source, file, "exec"), scope)
    return describe(scope["attention"])


def call(function, *arguments, time_limit: float = 5.0) -> Outcome:
    with Guard(time_limit) as guard:
        return guard.call(function, *arguments)


def only(outcome: Outcome):
    (finding,) = outcome.findings
    assert outcome.error is not None
    return finding
