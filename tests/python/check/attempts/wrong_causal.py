# SPDX-License-Identifier: MIT
"""Wrong: causal masks and padding."""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class _SelfAttention(nn.Module):
    """A fused layer; subclasses hide keys."""

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def heads(self, x):
        return (
            t.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for t in self.c_attn(x).chunk(3, dim=-1)
        )

    def scores(self, q, k):
        return q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))

    def finish(self, att, v):
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().flatten(2))


class FlagNeverRead(_SelfAttention):
    def forward(self, x, is_causal=False):
        q, k, v = self.heads(x)
        return self.finish(self.scores(q, k), v)


class BufferNeverRead(_SelfAttention):
    """The triangle is there; nobody uses it."""

    def __init__(self, n_embd, n_head, block_size=64):
        super().__init__(n_embd, n_head)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.finish(self.scores(q, k), v)


class UpperTriangleKept(_SelfAttention):
    """triu where the comparison with zero wants tril."""

    def forward(self, x, is_causal=False):
        q, k, v = self.heads(x)
        att = self.scores(q, k)
        if is_causal:
            upper = torch.triu(torch.ones(x.size(1), x.size(1)))
            att = att.masked_fill(upper == 0, float("-inf"))
        return self.finish(att, v)


class LowerTriangleBlocked(_SelfAttention):
    """tril where True means blocked; the last token sees nothing."""

    def forward(self, x, is_causal=False):
        q, k, v = self.heads(x)
        att = self.scores(q, k)
        if is_causal:
            lower = torch.tril(torch.ones_like(att[0, 0])).bool()
            att = att.masked_fill(lower, -1e9)
        return self.finish(att, v)


def aligned_at_the_end(q, k, v, is_causal=False):
    """As with a cache of keys, where PyTorch aligns at the start."""
    L, S = q.size(-2), k.size(-2)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if is_causal:
        keep = torch.ones(L, S, dtype=torch.bool).tril(diagonal=S - L)
        scores = scores.masked_fill(~keep, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


class DiagonalBlocked(_SelfAttention):
    """triu without diagonal=1 hides the token itself."""

    def forward(self, x, is_causal=False):
        q, k, v = self.heads(x)
        att = self.scores(q, k)
        if is_causal:
            future = torch.triu(torch.ones(x.size(1), x.size(1), dtype=torch.bool))
            att = att.masked_fill(future, float("-inf"))
        return self.finish(att, v)


def diagonal_blocked_core(query, key, value, is_causal=False):
    """tril(-1): strictly lower."""
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / query.size(-1) ** 0.5
    if is_causal:
        keep = torch.ones(scores.shape[-2:]).tril(-1)
        scores = scores.masked_fill(keep == 0, torch.finfo(scores.dtype).min)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), value)


def numpy_diagonal_blocked(Q, K, V, mask=False):
    """triu() blocks the diagonal, too; what is added leaves the first row as it is."""
    scores = Q @ K.swapaxes(-1, -2) / np.sqrt(Q.shape[-1])
    if mask:
        scores = scores + np.triu(np.ones(scores.shape[-2:])) * -1e9
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ V


class OneTokenAhead(_SelfAttention):
    """diagonal=2 lets every token see the next."""

    def forward(self, x, is_causal=False):
        q, k, v = self.heads(x)
        att = self.scores(q, k)
        if is_causal:
            n = x.size(1)
            future = torch.triu(torch.full((n, n), float("-inf")), diagonal=2)
            att = att + future.to(att)
        return self.finish(att, v)


class TriangleOfOneRow(_SelfAttention):
    """The triangle is made before the lengths are known, of one row."""

    def forward(self, x):
        q, k, v = self.heads(x)
        past = torch.tril(torch.ones(1, 1, 1, x.size(1)))
        att = self.scores(q, k).masked_fill(past == 0, float("-inf"))
        return self.finish(att, v)


class OneTokenAheadAlways(_SelfAttention):
    """A causal layer whose triangle has one diagonal too many."""

    def __init__(self, n_embd, n_head, block_size=64):
        super().__init__(n_embd, n_head)
        keep = torch.tril(torch.ones(block_size, block_size), diagonal=1)
        self.register_buffer("tril", keep)

    def forward(self, x):
        T = x.size(1)
        q, k, v = self.heads(x)
        att = self.scores(q, k)
        att = att.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return self.finish(att, v)


class PaddingNeverUsed(_SelfAttention):
    """key_padding_mask and attn_mask: True = blocked."""

    def forward(self, x, key_padding_mask=None, attn_mask=None):
        q, k, v = self.heads(x)
        att = self.scores(q, k)
        if attn_mask is not None:
            att = att.masked_fill(attn_mask, float("-inf"))
        return self.finish(att, v)


class CausalAndPadding(_SelfAttention):
    """`&` of two masks in which True = blocked."""

    def forward(self, x, key_padding_mask=None):
        q, k, v = self.heads(x)
        att = self.scores(q, k)
        blocked = torch.ones(att.shape[-2:], dtype=torch.bool).triu(1)
        if key_padding_mask is not None:
            blocked = blocked & key_padding_mask[:, None, None, :]
        return self.finish(att.masked_fill(blocked, float("-inf")), v)


class PaddingOnRows(_SelfAttention):
    """Padded queries are blocked, padded keys are seen."""

    def forward(self, x, key_padding_mask=None):
        q, k, v = self.heads(x)
        att = self.scores(q, k)
        if key_padding_mask is not None:
            att = att.masked_fill(key_padding_mask[:, None, :, None], -1e9)
        return self.finish(att, v)


class PaddingFromTheSecond(_SelfAttention):
    """The first padded key is seen."""

    def moved(self, blocked):
        return torch.cat((blocked[:, :1], blocked[:, :-1]), 1)

    def forward(self, x, key_padding_mask=None):
        q, k, v = self.heads(x)
        att = self.scores(q, k)
        if key_padding_mask is not None:
            blocked = self.moved(key_padding_mask)
            att = att.masked_fill(blocked[:, None, None, :], -1e9)
        return self.finish(att, v)


class PaddingFromTheLast(PaddingFromTheSecond):
    """The last token is hidden."""

    def moved(self, blocked):
        return torch.cat((blocked[:, 1:], blocked[:, -1:]), 1)


class PaddingOnRowsWithInfinity(nn.Module):
    """unsqueeze(-1) for unsqueeze(-2); rows of padding become NaN."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, key_padding_mask=None):
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.num_heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.num_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.num_heads, -1).transpose(1, 2)
        s = q @ k.mT / math.sqrt(q.size(-1))
        if key_padding_mask is not None:
            hidden = key_padding_mask.unsqueeze(1).unsqueeze(-1)
            s = s.masked_fill(hidden, float("-inf"))
        return self.out_proj((s.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


class PaddingReadAsTokens(_SelfAttention):
    """key_padding_mask: True = padding, but the zeros are blocked."""

    def forward(self, x, key_padding_mask=None, attn_mask=None):
        q, k, v = self.heads(x)
        att = self.scores(q, k)
        if attn_mask is not None:
            att = att.masked_fill(attn_mask, float("-inf"))
        if key_padding_mask is not None:
            hidden = key_padding_mask[:, None, None, :] == 0
            att = att.masked_fill(hidden, float("-inf"))
        return self.finish(att, v)


class PaddingReadAsRows(_SelfAttention):
    """(B, L) broadcasts against (B, H, L, L) as if it were (L, L)."""

    def forward(self, x, key_padding_mask=None):
        q, k, v = self.heads(x)
        att = self.scores(q, k)
        if key_padding_mask is not None:
            att = att.masked_fill(key_padding_mask, float("-inf"))
        return self.finish(att, v)
