# SPDX-License-Identifier: MIT
"""Code that computes its attention in two ways, by a fused function and step by step: an
attribute chooses, and both are judged."""

import math

import pytest
import torch
from heads import Heads
from torch.nn import functional as F

import multihead


class TwoWays(Heads):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.flash = hasattr(F, "scaled_dot_product_attention")

    def forward(self, x, mask=None):
        """mask: True = may attend."""
        q, k, v = self.heads(x)
        if self.flash:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out = self.filled(self.scores(q, k), mask).softmax(-1) @ v
        return self.merged(out)

    def scores(self, q, k):
        return q @ k.mT / math.sqrt(q.shape[-1])

    def filled(self, scores, mask):
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


class StepsUnscaled(TwoWays):
    def scores(self, q, k):
        return q @ k.mT


class StepsInverted(TwoWays):
    def filled(self, scores, mask):
        return scores if mask is None else scores.masked_fill(mask, -torch.inf)


class StepsOfPadding(TwoWays):
    """Of another mask than the fused function takes."""

    def filled(self, scores, mask):
        if mask is None:
            return scores
        return scores.masked_fill(~mask[:, None, None, :], -torch.inf)


class StepsAdding(TwoWays):
    def filled(self, scores, mask):
        return scores if mask is None else scores + mask


class StepsThatAreNotThere(TwoWays):
    """What they need is made only where they are on."""

    def scores(self, q, k):
        return q @ k.mT * self.factor


@pytest.mark.parametrize("target", [TwoWays, StepsAdding, StepsThatAreNotThere])
def test_two_ways_that_agree(target):
    report = multihead.check(target, allow="all")
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        (StepsUnscaled, "scale_missing"),
        (StepsInverted, "mask_inverted"),
        (StepsOfPadding, "paths_disagree"),
    ],
)
def test_the_way_that_is_off_is_judged_too(target, fault):
    report = multihead.check(target)
    assert report.cause == fault, str(report)
    assert "flash" in " ".join(str(report).split())


def test_inputs_of_a_user_are_given_to_both():
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    report = multihead.check(TwoWays(16, 4), inputs=(x, keep))
    assert report.passed, str(report)
