# SPDX-License-Identifier: MIT
"""Right: one layer for queries, keys and values; and what calls PyTorch's own."""

import dataclasses
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclasses.dataclass
class Config:
    n_embd: int = 24
    n_head: int = 4
    block_size: int = 32
    dropout: float = 0.0
    bias: bool = True


class CausalSelfAttention(nn.Module):
    """Built from a configuration; causal by a buffer named bias."""

    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        size = config.block_size
        tril = torch.tril(torch.ones(size, size)).view(1, 1, size, size)
        self.register_buffer("bias", tril)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


nano = CausalSelfAttention(Config())


class VisionAttention(nn.Module):
    """Rows of qkv are (3, H, D)."""

    def __init__(self, dim, num_heads=8, qkv_bias=True, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.attn_drop(attn.softmax(dim=-1))
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class DropsTheOutput(nn.Module):
    """The first vision transformers drop no weights."""

    def __init__(self, dim, heads=8, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.to_qkv(x).chunk(3, dim=-1)
        )
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class HeadsOutside(nn.Module):
    """Rows of qkv_proj are (H, 3, D); mask 0 = blocked; may return the attention."""

    def __init__(self, input_dim, embed_dim, num_heads):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.qkv_proj = nn.Linear(input_dim, 3 * embed_dim)
        self.o_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.xavier_uniform_(self.qkv_proj.weight)

    def forward(self, x, mask=None, return_attention=False):
        batch_size, seq_length, _ = x.size()
        qkv = self.qkv_proj(x)
        qkv = qkv.reshape(batch_size, seq_length, self.num_heads, 3 * self.head_dim)
        q, k, v = qkv.permute(0, 2, 1, 3).chunk(3, dim=-1)
        logits = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            logits = logits.masked_fill(mask == 0, -9e15)
        attention = F.softmax(logits, dim=-1)
        values = (attention @ v).permute(0, 2, 1, 3)
        o = self.o_proj(values.reshape(batch_size, seq_length, self.embed_dim))
        return (o, attention) if return_attention else o


class TransposedFused(nn.Module):
    """qkv as a bare parameter (in, 3E), and the output as (in, out)."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Parameter(torch.randn(d_model, 3 * d_model) * 0.02)
        self.out = nn.Parameter(torch.randn(d_model, d_model) * 0.02)

    def forward(self, x):
        b, n, e = x.shape
        qkv = (x @ self.qkv).view(b, n, 3, self.num_heads, e // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        p = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1)
        return (p @ v).transpose(1, 2).reshape(b, n, e) @ self.out


class OnPyTorchsFunction(nn.Module):
    """F.scaled_dot_product_attention inside; mask bool, True = attend."""

    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None):
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, dim=-1)
        )
        p = self.dropout if self.training else 0.0
        if mask is not None:
            mask = mask.bool()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        return self.proj(out.transpose(1, 2).flatten(-2))


class OwnsPyTorchs(nn.Module):
    """nn.MultiheadAttention inside; mask True = blocked."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)

    def forward(self, x, mask=None):
        out, _ = self.attn(x, x, x, attn_mask=mask, need_weights=False)
        return out


class IsPyTorchs(nn.MultiheadAttention):
    """A subclass with another default."""

    def __init__(self, embed_dim, num_heads, **kwargs):
        super().__init__(embed_dim, num_heads, batch_first=True, **kwargs)


class LikePyTorchs(nn.Module):
    """Same parameters, arguments and result as nn.MultiheadAttention, by baddbmm."""

    def __init__(self, embed_dim, num_heads, dropout=0.0, bias=True, batch_first=False):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(
        self,
        query,
        key,
        value,
        key_padding_mask=None,
        need_weights=True,
        attn_mask=None,
        average_attn_weights=True,
    ):
        if self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        (L, B, E), S, H = query.shape, key.shape[0], self.num_heads
        w_q, w_k, w_v = self.in_proj_weight.chunk(3)
        biases = (
            (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        )
        q = F.linear(query, w_q, biases[0]).view(L, B * H, E // H).transpose(0, 1)
        k = F.linear(key, w_k, biases[1]).view(S, B * H, E // H).transpose(0, 1)
        v = F.linear(value, w_v, biases[2]).view(S, B * H, E // H).transpose(0, 1)
        bias = q.new_zeros(B, H, L, S)
        if attn_mask is not None:
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.view(B, H, L, S)
            bias = self._add(bias, attn_mask)
        if key_padding_mask is not None:
            bias = self._add(bias, key_padding_mask[:, None, None, :])
        scores = torch.baddbmm(
            bias.view(B * H, L, S), q, k.mT, alpha=1 / math.sqrt(E // H)
        )
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        out = torch.bmm(weights, v).transpose(0, 1).reshape(L, B, E)
        out = self.out_proj(out)
        if self.batch_first:
            out = out.transpose(0, 1)
        if not need_weights:
            return out, None
        weights = weights.view(B, H, L, S)
        return out, weights.mean(1) if average_attn_weights else weights

    @staticmethod
    def _add(bias, mask):
        if mask.dtype == torch.bool:
            return bias.masked_fill(mask, -torch.inf)
        return bias + mask
