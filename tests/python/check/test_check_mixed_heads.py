# SPDX-License-Identifier: MIT
"""Talking heads (Shazeer et al., 2020): learned sums of all heads, before the softmax or
behind it."""

import torch
from heads import Heads
from torch import nn

import multihead


class Talking(Heads):
    """As in CaiT: both."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.proj_l = nn.Linear(num_heads, num_heads)
        self.proj_w = nn.Linear(num_heads, num_heads)

    def scores(self, q, k):
        return q @ k.mT / q.shape[-1] ** 0.5

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = self.proj_l(self.scores(q, k).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = self.weights(scores).permute(0, 2, 3, 1)
        return self.merged(self.proj_w(weights).permute(0, 3, 1, 2) @ v)

    def weights(self, scores):
        return scores.softmax(-1)


class TalkingUnscaled(Talking):
    def scores(self, q, k):
        return q @ k.mT


class TalkingOfQueries(Talking):
    def weights(self, scores):
        return scores.softmax(-2)


class ByConvolution(Heads):
    """Before the softmax alone, and masked behind that."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.talk = nn.Conv2d(num_heads, num_heads, 1, bias=False)

    def forward(self, x, mask=None):
        """mask: True = may attend"""
        q, k, v = self.heads(x)
        scores = self.talk(q @ k.mT / q.shape[-1] ** 0.5)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return self.merged(scores.softmax(-1) @ v)


class ByEinsum(Heads):
    """Behind the softmax alone, as in DeepViT without its norm."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.reattention = nn.Parameter(torch.randn(num_heads, num_heads))

    def forward(self, x):
        q, k, v = self.heads(x)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        weights = torch.einsum("bhij,hg->bgij", weights, self.reattention)
        return self.merged(weights @ v)


def test_talking_heads_are_known():
    for kind in (Talking, ByConvolution, ByEinsum):
        report = multihead.check(kind)
        assert report.judgement == "right", str(report)
        assert "(talking heads)" in " ".join(str(report).split())


def test_faults_of_talking_heads_have_their_names():
    assert multihead.check(TalkingUnscaled).cause == "scale_missing"
    assert multihead.check(TalkingOfQueries).cause == "softmax_over_queries"
