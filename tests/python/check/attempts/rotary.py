# SPDX-License-Identifier: MIT
"""Rotary positions as published models have them: pairs, signs, tables and places of
their own; and what goes wrong with them."""

import torch
import torch.nn.functional as F
from attempts.steps import Attention


def turn(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Turned(Attention):
    """By a base of its own, in float32."""

    base = 500000.0

    def tables(self, length, width):
        speed = self.base ** (-torch.arange(0, width, 2) / width)
        angle = torch.outer(torch.arange(length).float(), speed)
        return angle.cos(), angle.sin()

    def turn(self, x):
        return turn(x, *self.tables(x.size(-2), x.size(-1)))

    def places(self, q, k, v):
        return self.turn(q), self.turn(k), v

    def forward(self, x):
        q, k, v = self.places(*self.qkv(x))
        return self.join(self.scores(q, k).softmax(-1) @ v)


class TurnedBackwards(Turned):
    """As in small models of today: the norm first, tables in bfloat16."""

    def tables(self, length, width):
        cos, sin = super().tables(length, width)
        return cos.bfloat16(), -sin.bfloat16()

    def places(self, q, k, v):
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        return super().places(q, k, v)


class TurnedInPart(Turned):
    """The first four features of each head."""

    def turn(self, x):
        return torch.cat((super().turn(x[..., :4]), x[..., 4:]), dim=-1)


class ScaledAndTurned(Turned):
    def scores(self, q, k):
        return q @ k.mT

    def turn(self, x):
        return super().turn(x * self.d_k**-0.25)


def half_turned(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class TurnedBySums(Turned):
    """The usual text, x·cos + x'·sin: neither part is a turn."""

    def turn(self, x):
        first, second = (
            torch.cat((t, t), -1) for t in self.tables(x.size(-2), self.d_k)
        )
        return x * first + half_turned(x) * second


class TurnedForOneKey(Turned):
    """Multi-query attention: one head of keys and values."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.W_k = torch.nn.Linear(d_model, self.d_k)
        self.W_v = torch.nn.Linear(d_model, self.d_k)

    def split(self, x):
        return x.unflatten(-1, (-1, self.d_k)).transpose(1, 2)


class OfOneHead(Turned):
    def __init__(self, d_model):
        super().__init__(d_model, 1)


class TablesOfItems(Attention):
    """cos and sin (B, L, d), which stand before the heads."""

    def forward(self, hidden_states, position_embeddings):
        q, k, v = self.qkv(hidden_states)
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        q, k = (
            x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin
            for x in (q, k)
        )
        weights = self.scores(q, k).softmax(-1, dtype=torch.float32).to(v.dtype)
        return self.join(weights @ v)


class TablesBesideHeads(Attention):
    """cos and sin (1, L, 1, d / 2), for heads (B, L, H, d)."""

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, self.d_k))

    def forward(self, x, cos_sin):
        q, k, v = self.qkv(x)
        q, k = turn(q, *cos_sin), turn(k, *cos_sin)
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.join(context)


class TurnsByHead(Turned):
    """Tables along the heads: each score turns by nothing."""

    def turn(self, x):
        return super().turn(x.transpose(1, 2)).transpose(1, 2)


class ValuesTurnedToo(Turned):
    def places(self, q, k, v):
        return self.turn(q), self.turn(k), self.turn(v)


class RotatedQueriesOnly(Turned):
    def places(self, q, k, v):
        return self.turn(q), k, v


class ValuesTurnedForKeys(Turned):
    def places(self, q, k, v):
        return self.turn(q), k, self.turn(v)


class OneSumTurnedBackwards(TurnedBySums):
    def places(self, q, k, v):
        q = self.turn(q)
        first, second = (
            torch.cat((t, t), -1) for t in self.tables(k.size(-2), self.d_k)
        )
        return q, k * first - half_turned(k) * second, v


class TablesOfOtherPairs(TurnedBySums):
    """Tables for (i, i + d/2), and (2i, 2i + 1) that are turned."""

    def turn(self, x):
        first, second = (
            torch.cat((t, t), -1) for t in self.tables(x.size(-2), self.d_k)
        )
        a, b = x[..., ::2], x[..., 1::2]
        return x * first + torch.stack((-b, a), -1).flatten(-2) * second


class TablesOfOtherHalves(TurnedBySums):
    def turn(self, x):
        first, second = (
            t.repeat_interleave(2, -1) for t in self.tables(x.size(-2), self.d_k)
        )
        return x * first + half_turned(x) * second


class KeysTurnedBackwards(Turned):
    """A sign that one of the two lost."""

    def places(self, q, k, v):
        cos, sin = self.tables(k.size(-2), k.size(-1))
        return self.turn(q), turn(k, cos, -sin), v


class TurnedAndUnscaled(Turned):
    def scores(self, q, k):
        return q @ k.mT
