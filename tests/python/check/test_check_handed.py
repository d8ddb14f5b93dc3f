# SPDX-License-Identifier: MIT
"""What a module is handed beside its input: tables of rotary positions, an object that
turns by them, a cache of the file's own class."""

import pytest
import torch
from attempts.steps import Attention

import multihead


def turned(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Handed(Attention):
    """Turns queries and keys by tables of its caller's."""

    def turn(self, q, k, v, cos, sin):
        return turned(q, cos, sin), turned(k, cos, sin), v

    def forward(self, x, cos, sin):
        q, k, v = self.turn(*self.qkv(x), cos, sin)
        return self.join(self.scores(q, k).softmax(-1) @ v)


class HandedForQueries(Handed):
    def turn(self, q, k, v, cos, sin):
        return turned(q, cos, sin), k, v


class HandedBackwards(Handed):
    def turn(self, q, k, v, cos, sin):
        return turned(q, cos, sin), turned(k, cos, -sin), v


class HandedThenNormed(Handed):
    """Norms with gains, which do not commute with a turn."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.q_norm, self.k_norm = (torch.nn.RMSNorm(self.d_k) for _ in range(2))

    def turn(self, q, k, v, cos, sin):
        q, k, v = super().turn(q, k, v, cos, sin)
        return self.q_norm(q), self.k_norm(k), v


class HandedAngles(Handed):
    """By angles, as lucidrains' rotary_pos_emb."""

    def forward(self, x, rotary_pos_emb):
        cos, sin = rotary_pos_emb.cos(), rotary_pos_emb.sin()
        return super().forward(x, cos, sin)


class HandedComplex(Handed):
    """By complex numbers, as LLaMA's own code."""

    turns_keys = True

    def forward(self, x, freqs_cis):
        def spun(x):
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * freqs_cis).flatten(-2)

        q, k, v = self.qkv(x)
        k = spun(k) if self.turns_keys else k
        return self.join(self.scores(spun(q), k).softmax(-1) @ v)


class HandedComplexForQueries(HandedComplex):
    turns_keys = False


class Rope:
    def __init__(self, head_dim, max_seq_len, theta=10000.0):
        speed = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.outer(torch.arange(max_seq_len).float(), speed)
        self.angles = torch.cat((angle, angle), -1)

    def spin(self, x):
        angles = self.angles[: x.size(-2)].to(x.dtype)
        return turned(x, angles.cos(), angles.sin())


class HandedAnObject(Attention):
    def forward(self, x, rope: Rope):
        q, k, v = self.qkv(x)
        return self.join(self.scores(rope.spin(q), rope.spin(k)).softmax(-1) @ v)


@pytest.mark.parametrize(
    "target",
    [Handed, HandedThenNormed, HandedAngles, HandedComplex, HandedAnObject],
)
def test_positions_that_a_module_is_handed_turn_queries_and_keys(target):
    report = multihead.check(target)
    assert report.judgement == "right", str(report)
    assert "rotary_positions" in [fact["name"] for fact in report.assumptions]


@pytest.mark.parametrize(
    "target", [HandedForQueries, HandedBackwards, HandedComplexForQueries]
)
def test_positions_that_turn_only_some_are_a_fault(target):
    assert multihead.check(target).cause == "rotary_misapplied"


class KVCache:
    def __init__(self):
        self.k = self.v = None

    def update(self, k, v):
        self.k = k if self.k is None else torch.cat((self.k, k), 2)
        self.v = v if self.v is None else torch.cat((self.v, v), 2)
        return self.k, self.v


class OnItsCache(Attention):
    """Causal."""

    ahead = True

    def forward(self, x, cache=None):
        q, k, v = self.qkv(x)
        if cache is not None:
            k, v = cache.update(k, v)
        scores = self.scores(q, k)
        first = k.size(2) - q.size(2) if self.ahead else 0
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + first)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.join(weights @ v)


class OnItsCacheFromTheFirst(OnItsCache):
    """Causal: each call begins at the first position."""

    ahead = False


def test_a_cache_of_the_files_own_class():
    report = multihead.check(OnItsCache)
    assert report.judgement == "right", str(report)
    assert "the last token, on a cache" in [case["name"] for case in report.cases]
    assert multihead.check(OnItsCacheFromTheFirst).cause == "cache_differs"


class GroupsExchanged(Attention):
    """Keys are repeated as many times as there are groups."""

    def __init__(self, d_model, num_heads, num_kv_heads):
        super().__init__(d_model, num_heads)
        self.groups = num_kv_heads
        width = num_kv_heads * self.d_k
        self.W_k = torch.nn.Linear(d_model, width)
        self.W_v = torch.nn.Linear(d_model, width)

    def forward(self, x):
        q = self.split(self.W_q(x))
        k, v = (
            w(x).unflatten(-1, (self.groups, self.d_k)).transpose(1, 2)
            for w in (self.W_k, self.W_v)
        )
        k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        return self.join(self.scores(q, k).softmax(-1) @ v)


def test_code_that_fits_only_as_many_groups_as_heads_in_each():
    report = multihead.check(GroupsExchanged)
    assert report.cause == "raises" and report.judgement == "wrong", str(report)
    assert "as many groups as heads in each" in report.findings[0].sentence


class OwnMatrices(torch.nn.Module):
    """Plain parameters, of which the last is stored the other way."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (
            torch.nn.Parameter(torch.randn(d_model, d_model)) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (
            (x @ w).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for w in (self.W_q, self.W_k, self.W_v)
        )
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2) @ self.W_o.T


def test_matrices_of_its_own_may_be_stored_in_either_way():
    report = multihead.check(OwnMatrices)
    assert report.judgement == "right", str(report)
    assert "output_weight_otherwise" in [f["name"] for f in report.assumptions]


class BuiltWithPositions(Attention):
    """Constructed with an object that turns queries and keys."""

    def __init__(self, d_model, num_heads, rotary_embeddings):
        super().__init__(d_model, num_heads)
        self.rot = rotary_embeddings

    def forward(self, x):
        q, k, v = self.qkv(x)
        q, k = self.rot(q, k)
        return self.join(self.scores(q, k).softmax(-1) @ v)


class BuiltWithPositionsUnscaled(BuiltWithPositions):
    def scores(self, q, k):
        return q @ k.mT


def test_positions_that_turn_nothing_hide_no_fault():
    assert multihead.check(BuiltWithPositions).cause is None
    assert multihead.check(BuiltWithPositionsUnscaled).cause == "scale_missing"
