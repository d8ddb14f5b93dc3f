# SPDX-License-Identifier: MIT
"""Norms of queries and keys that are written out, or say nothing of what they add to the
mean square."""

import pytest
import torch
from heads import Heads
from torch import nn
from torch.nn import functional as F

import multihead


class Normed(Heads):
    def norm(self, x):
        return F.rms_norm(x, x.shape[-1:], eps=1e-6)

    def scores(self, q, k):
        return q @ k.mT / q.shape[-1] ** 0.5

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merged(self.scores(self.norm(q), self.norm(k)).softmax(-1) @ v)


class WithoutEps(Normed):
    def norm(self, x):
        return F.rms_norm(x, x.shape[-1:])


class ByHand(Normed):
    def norm(self, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()


class WithAGain(Normed):
    """As people write it, with a number of its own."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.gain = nn.Parameter(torch.ones(dim // num_heads))

    def norm(self, x):
        rms = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-8)
        return self.gain * x / rms


class LayersByHand(Normed):
    def norm(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-4)


class Behind(ByHand):
    """As most models have it: behind another norm, of its own kind and eps."""

    first = nn.LayerNorm

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.norm1 = self.first(dim)

    def forward(self, x):
        return x + super().forward(self.norm1(x))


class BehindRms(Behind):
    first = nn.RMSNorm


class BehindRmsWithEps(WithoutEps):
    def forward(self, x):
        return super().forward(F.rms_norm(x, x.shape[-1:], eps=1e-4))


class OnlyBefore(BehindRms):
    def norm(self, x):
        return x


class Guarded(WithoutEps):
    """A small number that no norm adds."""

    def norm(self, x):
        x = super().norm(x)
        return x * (100 / (x.norm(dim=-1, keepdim=True) + 1e-3)).clamp(max=1)


class Whole(Normed):
    """Of all heads together, without a weight."""

    def forward(self, x):
        q, k = (self.cut(self.norm(y)) for y in (self.q(x), self.k(x)))
        return self.merged(self.scores(q, k).softmax(-1) @ self.cut(self.v(x)))


class WholeByHand(Whole):
    norm = LayersByHand.norm


class Merged(Normed):
    """What the heads return, side by side, as sub-LayerNorm has it."""

    def forward(self, x):
        q, k, v = self.heads(x)
        context = (self.scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.o(F.layer_norm(context, context.shape[-1:]))


class ByHandFirst(LayersByHand):
    """The input alone, in a norm that is written out, with an eps of its own."""

    def forward(self, x):
        q, k, v = self.heads(super().norm(x))
        return self.merged(self.scores(q, k).softmax(-1) @ v)


class HeadByHead(Normed):
    """One head after the other, each of whose queries and keys are normed and scaled."""

    def forward(self, x):
        q, k, v = self.heads(x)
        found = []
        for i in range(self.num_heads):
            one, other = self.norm(q[:, i]), self.norm(k[:, i])
            one, other = (y / y.shape[-1] ** 0.25 for y in (one, other))
            found.append((one @ other.mT).softmax(-1) @ v[:, i])
        return self.o(torch.cat(found, -1))


class SharedKeys(nn.Module):
    """Keys are normed behind what repeats them for the queries that share them."""

    def __init__(self, dim, num_heads, num_kv_heads=2):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.d = dim // num_heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.d)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.d)
        self.o_proj = nn.Linear(dim, dim)

    def forward(self, x):
        split = (-1, self.d)
        q = self.q_proj(x).unflatten(-1, split).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, split).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, split).transpose(1, 2)
        n = self.num_heads // self.num_kv_heads
        k, v = (y.repeat_interleave(n, dim=1) for y in (k, v))
        q, k = (F.layer_norm(y, y.shape[-1:], eps=1e-3) for y in (q, k))
        context = (q @ k.mT / self.d**0.5).softmax(-1) @ v
        return self.o_proj(context.transpose(1, 2).flatten(2))


class OfBothEnds(Merged):
    """Behind another norm of the same width, each with gains of its own."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.ln, self.inner = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x):
        q, k, v = self.heads(self.ln(x))
        context = (self.scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.o(self.inner(context))


NORMS = [
    OfBothEnds,
    Normed,
    WithoutEps,
    ByHand,
    WithAGain,
    LayersByHand,
    Whole,
    WholeByHand,
]
NORMS += [Merged, ByHandFirst, HeadByHead, SharedKeys]
NORMS += [Behind, BehindRms, BehindRmsWithEps, OnlyBefore, Guarded]


@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_queries_and_keys(kind):
    report = multihead.check(kind)
    assert report.judgement == "right", str(report)


class Unscaled(ByHand):
    def scores(self, q, k):
        return q @ k.mT / q.shape[-1]


def test_faults_beside_norms_have_their_names():
    assert multihead.check(Unscaled).cause == "scale_not_root"


class Cosines(Normed):
    """Queries and keys of length 1, whose scale is a constant."""

    def norm(self, x):
        return F.normalize(x, dim=-1)

    def scores(self, q, k):
        return 10 * (q @ k.mT)


def test_the_scale_of_cosines_is_up_to_the_code():
    report = multihead.check(Cosines)
    assert report.judgement == "right_if", str(report)


class MatricesBehindANorm(nn.Module):
    """x @ W behind a norm, and what ALiBi adds to scores."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.first = nn.LayerNorm(dim)
        self.w_q = nn.Parameter(torch.randn(dim, dim) / dim**0.5)
        self.w_k = nn.Parameter(torch.randn(dim, dim) / dim**0.5)
        self.w_v = nn.Parameter(torch.randn(dim, dim) / dim**0.5)
        self.w_o = nn.Parameter(torch.randn(dim, dim) / dim**0.5)

    def forward(self, x):
        x = self.first(x)
        q, k, v = (
            (x @ w).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for w in (self.w_q, self.w_k, self.w_v)
        )
        places = torch.arange(x.shape[1])
        distance = (places[:, None] - places).abs()
        slopes = 2.0 ** (-8 * torch.arange(1, self.num_heads + 1) / self.num_heads)
        scores = q @ k.mT / q.shape[-1] ** 0.5 - slopes.view(-1, 1, 1) * distance
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ self.w_o


def test_how_matrices_lie_is_told_behind_a_norm_beside_a_bias():
    report = multihead.check(MatricesBehindANorm)
    assert report.judgement == "right", str(report)


class Resampler(nn.Module):
    """Latents ask images and themselves, each behind a norm of its own, as Flamingo's."""

    def __init__(self, dim, heads=8):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, latents):
        """x: image features (B, n, D); latents: (B, m, D)"""
        x, latents = self.norm1(x), self.norm2(latents)
        q = self.to_q(latents)
        k, v = self.to_kv(torch.cat((x, latents), dim=-2)).chunk(2, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        context = (q @ k.mT * self.scale).softmax(-1) @ v
        return self.to_out(context.transpose(1, 2).flatten(2))


def test_norms_of_two_inputs_are_told_by_what_they_meet():
    report = multihead.check(Resampler)
    assert report.judgement == "right", str(report)


class OfValues(Heads):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.last_norm = nn.LayerNorm(dim // num_heads)

    def forward(self, x):
        q, k, v = self.heads(x)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.merged(weights @ self.last_norm(v).relu())


def test_a_norm_that_nothing_explains_is_a_layer_beside():
    report = multihead.check(OfValues)
    assert report.judgement == "right_if", str(report)
    assert report.conditions[0]["name"] == "layers_beside"
