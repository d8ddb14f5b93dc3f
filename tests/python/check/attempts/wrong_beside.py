# SPDX-License-Identifier: MIT
"""Wrong, beside other things that are right: norms, blocks, windows, gradients."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from attempts.steps import Attention


class CausalSelfAttention(Attention):
    """So it is called."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        return self.join(self.scores(q, k).softmax(-1) @ v)


class TriangleKept(Attention):
    """A buffer that nobody uses."""

    def __init__(self, d_model, num_heads, max_len=512):
        super().__init__(d_model, num_heads)
        self.register_buffer("tril", torch.tril(torch.ones(max_len, max_len)))

    def forward(self, x):
        q, k, v = self.qkv(x)
        return self.join(self.scores(q, k).softmax(-1) @ v)


class TriangleThrownAway(Attention):
    """masked_fill returns a new tensor."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        later = torch.triu(torch.ones(x.size(1), x.size(1)), diagonal=1).bool()
        scores.masked_fill(later, float("-inf"))
        return self.join(scores.softmax(-1) @ v)


class FusedViewedStraight(nn.Module):
    """(B, L, 3·E) viewed as (3, B, H, L, d), which has the right shape."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(3, B, self.num_heads, N, C // self.num_heads)
        attn = (q @ k.mT * (C // self.num_heads) ** -0.5).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class FusedWithoutPermute(FusedViewedStraight):
    """(B, 3, H, L, d) at once."""

    def forward(self, x):
        B, N, C = x.shape
        shape = (B, 3, self.num_heads, N, C // self.num_heads)
        q, k, v = self.qkv(x).reshape(shape).unbind(1)
        attn = (q @ k.mT * (C // self.num_heads) ** -0.5).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class _Grouped(nn.Module):
    def __init__(self, dim, num_heads, num_kv_heads):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.d = dim // num_heads
        self.q_proj = nn.Linear(dim, num_heads * self.d)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.d)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.d)
        self.o_proj = nn.Linear(num_heads * self.d, dim)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.d)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = self.expand(k, v, self.num_heads // self.num_kv_heads)
        attn = (q @ k.mT / math.sqrt(self.d)).softmax(-1)
        return self.o_proj((attn @ v).transpose(1, 2).flatten(2))


class KeysTiled(_Grouped):
    def expand(self, k, v, n):
        return k.repeat(1, n, 1, 1), v.repeat_interleave(n, dim=1)


class ValuesTiled(_Grouped):
    def expand(self, k, v, n):
        return k.repeat_interleave(n, dim=1), v.repeat(1, n, 1, 1)


class QueryMatrixByItsData(Attention):
    """The matrix is used and never learned."""

    def forward(self, x):
        q = self.split(F.linear(x, self.W_q.weight.data, self.W_q.bias))
        k, v = self.split(self.W_k(x)), self.split(self.W_v(x))
        return self.join(self.scores(q, k).softmax(-1) @ v)


class MatricesDetached(Attention):
    def forward(self, x):
        q, k, v = (
            self.split(F.linear(x, w.weight.detach(), w.bias))
            for w in (self.W_q, self.W_k, self.W_v)
        )
        return self.join(self.scores(q, k).softmax(-1) @ v)


class OutputAlwaysDropped(Attention):
    """Weights are dropped in training, as they should be; the output always."""

    def __init__(self, d_model, num_heads, dropout=0.2):
        super().__init__(d_model, num_heads)
        self.drop = nn.Dropout(dropout)
        self.p = dropout

    def forward(self, x):
        q, k, v = self.qkv(x)
        out = self.join(self.drop(self.scores(q, k).softmax(-1)) @ v)
        return F.dropout(out, self.p)


class ItemsReadAsHeads(Attention):
    """Folded as (B·H, L, d), unfolded as (H, B, L, d)."""

    def forward(self, x):
        q, k, v = (t.flatten(0, 1) for t in self.qkv(x))
        out = torch.bmm(self.scores(q, k).softmax(-1), v)
        out = out.view(self.num_heads, x.size(0), x.size(1), self.d_k)
        return self.W_o(out.permute(1, 2, 0, 3).flatten(2))


class LastHeadCleared(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        out = self.scores(q, k).softmax(-1) @ v
        kept = torch.ones(self.num_heads, 1, 1, dtype=x.dtype)
        kept[-1] = 0
        return self.join(out * kept)


def _blocks(q, k, v, block, correct, whole=False):
    """Attention block by block; `correct` multiplies what is summed up by then."""
    largest = torch.full_like(q[..., :1], float("-inf"))
    total, out = torch.zeros_like(q[..., :1]), torch.zeros_like(q[..., : v.size(-1)])
    length = k.size(-2) // block * block if whole else k.size(-2)
    for start in range(0, length, block):
        some = slice(start, min(start + block, length))
        scores = q @ k[..., some, :].mT / math.sqrt(q.size(-1))
        new = torch.maximum(largest, scores.amax(-1, keepdim=True))
        p = torch.exp(scores - new)
        factor = torch.exp(largest - new)
        total, out = correct(total, out, factor)
        total = total + p.sum(-1, keepdim=True)
        out = out + p @ v[..., some, :]
        largest = new
    return out / total


def online_never_corrected(q, k, v):
    return _blocks(q, k, v, 32, lambda total, out, factor: (total, out))


def online_values_not_corrected(q, k, v):
    return _blocks(q, k, v, 32, lambda total, out, factor: (total * factor, out))


def online_small_blocks(q, k, v):
    """Four keys at a time: so many blocks that a trace is cut before their scores."""
    return _of_parts(q, k.split(4, -2), v.split(4, -2))


def _of_parts(q, keys, values):
    largest = torch.full_like(q[..., :1], float("-inf"))
    total, out = torch.zeros_like(largest), 0.0
    for k, v in zip(keys, values):
        scores = q @ k.mT / math.sqrt(q.size(-1))
        new = torch.maximum(largest, scores.amax(-1, keepdim=True))
        p = torch.exp(scores - new)
        total = total * torch.exp(largest - new) + p.sum(-1, keepdim=True)
        out, largest = out + p @ v, new
    return out / total


def online_whole_blocks_only(q, k, v):
    """257 keys are 8 blocks of 32 and one key."""
    block = min(32, k.size(-2))
    return _blocks(
        q, k, v, block, lambda total, out, factor: (total * factor, out * factor), True
    )


def online_filled_up(q, k, v):
    """The last block is padded with zeros."""
    more = -k.size(-2) % 32
    k, v = F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more))
    return _blocks(
        q, k, v, 32, lambda total, out, factor: (total * factor, out * factor)
    )


class _Windowed(Attention):
    def __init__(self, d_model, num_heads, sliding_window=3):
        super().__init__(d_model, num_heads)
        self.sliding_window = sliding_window

    def forward(self, x):
        q, k, v = self.qkv(x)
        place = torch.arange(x.size(1))
        distance = place - place[:, None]
        scores = self.scores(q, k).masked_fill(self.beyond(distance), float("-inf"))
        return self.join(scores.softmax(-1) @ v)


class WindowTooLong(_Windowed):
    def beyond(self, distance):
        return (distance > 0) | (distance < -self.sliding_window - 1)


class WindowAhead(_Windowed):
    def beyond(self, distance):
        return (distance < 0) | (distance >= self.sliding_window)


class WindowAheadAndAllBefore(_Windowed):
    """torch.tril(ones, diagonal=window - 1)"""

    def beyond(self, distance):
        return distance >= self.sliding_window


class WindowForgotten(_Windowed):
    def forward(self, x):
        q, k, v = self.qkv(x)
        return self.join(self.scores(q, k).softmax(-1) @ v)


class UnscaledAndNormed(Attention):
    """A norm and a residual connection, and no scale."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        q, k, v = self.qkv(x)
        return self.norm(x + self.join((q @ k.mT).softmax(-1) @ v))


class ScaledByEmbeddingBehindANorm(Attention):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x))
        scores = q @ k.mT / math.sqrt(x.size(-1))
        return x + self.join(scores.softmax(-1) @ v)
