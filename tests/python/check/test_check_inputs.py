# SPDX-License-Identifier: MIT
"""How `check` calls what takes its sequences in an unusual form."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead


def checked(target, **stated):
    return multihead.check(target, **stated)


class OfAnImage(nn.Module):
    """A block of a network for images: a norm over groups of channels, one head."""

    def __init__(self, in_channels):
        super().__init__()
        self.norm = nn.GroupNorm(4, in_channels)
        self.q, self.k, self.v, self.proj = (
            nn.Conv2d(in_channels, in_channels, 1) for _ in range(4)
        )

    def forward(self, x):
        b, c, h, w = x.shape
        normed = self.norm(x)
        q, k, v = (p(normed).flatten(2) for p in (self.q, self.k, self.v))
        weights = (q.transpose(1, 2) @ k / math.sqrt(c)).softmax(-1)
        return x + self.proj((weights @ v.transpose(1, 2)).transpose(1, 2).view(b, c, h, w))


def test_a_norm_over_groups_of_channels():
    report = checked(OfAnImage)
    assert report.cause is None, str(report)


class WithOneNumber(nn.Module):
    """It holds a parameter of no axes, which is 0 at first."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.offset = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        return self.attn(x, x, x)[0] + 0 * self.offset


def test_a_parameter_of_no_axes():
    report = checked(WithOneNumber)
    assert report.cause is None, str(report)
