# SPDX-License-Identifier: MIT
"""Weights that PyTorch does not know of, and triangles of ones that are added."""

import math

import pytest
import torch
from test_check_strays import named
from torch import nn

import multihead


class Head(nn.Module):
    def __init__(self, dim: int, width: int, masked: bool = False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, width) for _ in range(3))
        self.masked = masked

    def forward(self, x):
        scores = self.q(x) @ self.k(x).mT / math.sqrt(self.q.out_features)
        if self.masked:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(-1) @ self.v(x)


class InAModuleList(nn.Module):
    flag = False

    def __init__(self, dim: int, num_heads: int, masked: bool = False):
        super().__init__()
        given = masked and self.flag
        heads = [Head(dim, dim // num_heads, given) for _ in range(num_heads)]
        self.keep(heads)
        self.out = nn.Linear(dim, dim)

    def keep(self, heads):
        self.heads = nn.ModuleList(heads)

    def each(self):
        return self.heads

    def forward(self, x):
        return self.out(torch.cat([head(x) for head in self.each()], -1))


class InAList(InAModuleList):
    flag = True

    def keep(self, heads):
        self.heads = heads


class InADictionary(InAList):
    def keep(self, heads):
        self.heads = dict(enumerate(heads))

    def each(self):
        return self.heads.values()


class InBoth(InAList):
    """What is registered may be in a list, too."""

    def keep(self, heads):
        self.heads, self.registered = heads, nn.ModuleList(heads)


class OneIsHidden(InAList):
    """A module of the caller's, which is trained elsewhere, hidden in a list."""

    def keep(self, heads):
        self.heads, self.hidden = nn.ModuleList(heads[1:]), [heads[0]]

    def each(self):
        return [*self.hidden, *self.heads]


class InPairs(InAList):
    """Lists of lists."""

    def keep(self, heads):
        self.heads = [[head, head] for head in heads]

    def each(self):
        return [pair[0] for pair in self.heads]


class OfParameters(nn.Module):
    """nn.Parameter in a list, where nobody looks for it."""

    def __init__(self, dim: int):
        super().__init__()
        self.matrices = [nn.Parameter(torch.randn(dim, dim) / 7) for _ in range(3)]

    def forward(self, x):
        q, k, v = (x @ matrix for matrix in self.matrices)
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


class ParametersAreKnown(InAList):
    """The layers are in a list, and their parameters are registered."""

    def keep(self, heads):
        self.heads = heads
        self.known = nn.ParameterList(p for head in heads for p in head.parameters())


class OfTensors(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.w_q, self.w_k, self.w_v = (torch.randn(dim, dim) / 7 for _ in range(3))

    def forward(self, x):
        q, k, v = x @ self.w_q, x @ self.w_k, x @ self.w_v
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


@pytest.mark.parametrize("kind", [InAList, InADictionary, InPairs, OfParameters])
def test_layers_that_are_no_part_of_their_module(kind):
    report = multihead.check(kind)
    assert named(report) == ["unregistered"] and report.judgement == "wrong"
    assert report.verdict["faults"] == []


@pytest.mark.parametrize("kind", [InBoth, OneIsHidden, ParametersAreKnown])
def test_layers_in_a_list_that_are_no_mistake(kind):
    assert named(multihead.check(kind)) == []


def test_tensors_that_are_no_parameters_are_remarked():
    report = multihead.check(OfTensors)
    assert report.judgement == "right" and named(report) == []
    assert "Its weights `w_q`, `w_k`, `w_v` are no parameters" in report.to_json()


def test_a_flag_that_says_masked_and_does_nothing():
    assert multihead.check(InAModuleList).causes == ["causal_ignored"]


# ---- Triangles of ones ---------------------------------------------------------------


class Added(nn.Module):
    """A mask of floats is added by PyTorch's layer."""

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.mha = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)

    def mask(self, length: int):
        return torch.ones(length, length).tril()

    def forward(self, x):
        return self.mha(x, x, x, attn_mask=self.mask(x.shape[1]))[0]


class AddedAbove(Added):
    def mask(self, length: int):
        return torch.ones(length, length).triu(1)


class OneSided(Added):
    """A bias that leaves 0 for later keys, which blocks nothing."""

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__(embed_dim, num_heads)
        self.table = nn.Parameter(torch.randn(64, 64))

    def mask(self, length: int):
        return self.table[:length, :length].tril()


class Infinite(Added):
    def mask(self, length: int):
        return torch.full((length, length), -torch.inf).triu(1)


seq_len = 8


class Block(Added):
    """Of one length, and with another attention."""

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__(embed_dim, num_heads)
        self.cross = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)
        self.norm, self.last = nn.LayerNorm(embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x, memory):
        x = self.norm(x + self.mha(x, x, x, attn_mask=self.mask(seq_len))[0])
        x = self.norm(x + self.cross(x, memory, memory)[0])
        return self.norm(x + self.last(x))


@pytest.mark.parametrize("kind", [Added, AddedAbove, OneSided, Block])
def test_a_triangle_of_ones_that_is_added_blocks_nothing(kind):
    report = multihead.check(kind)
    assert report.judgement == "wrong", str(report)
    assert set(report.causes) <= {"causal_without_effect", "mask_sentinel_leaks"}
    assert report.causes


def test_a_triangle_of_infinities_does():
    report = multihead.check(Infinite)
    assert [c["name"] for c in report.conditions] == ["causal_by_itself"]
