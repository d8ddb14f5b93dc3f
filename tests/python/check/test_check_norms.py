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


NORMS = [Normed, WithoutEps, ByHand, WithAGain, LayersByHand]
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
