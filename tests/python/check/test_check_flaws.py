# SPDX-License-Identifier: MIT
"""What runs show at once: biases of relative positions that follow another query than
their own, heads that compute the same."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import multihead


def conditions(report) -> list[str]:
    return [condition["name"] for condition in report.conditions]


class OfAllDistances(nn.Module):
    """The shift of Transformer-XL, with all that it needs: 2L - 1 distances."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.heads, self.width = num_heads, dim // num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.place = nn.Linear(dim, dim, bias=False)

    def distances(self, length: int):
        return torch.arange(length - 1, -length, -1)

    def embedded(self, length: int):
        at = self.distances(length).to(self.place.weight)[:, None]
        waves = at / 10 ** (torch.arange(self.heads * self.width).to(at) / self.width)
        return self.place(waves.sin()).view(-1, self.heads, self.width).transpose(0, 1)

    def shifted(self, scores, length: int):
        batch, heads, queries, count = scores.shape
        padded = F.pad(scores, (1, 0)).view(batch, heads, count + 1, queries)
        return padded[:, :, 1:].reshape(scores.shape)[..., :length]

    def hidden(self, scores, mask):
        return scores

    def forward(self, x):
        return self.attend(x, None)

    def attend(self, x, mask):
        length = x.shape[1]
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        placed = self.shifted(q @ self.embedded(length).mT, length)
        scores = (q @ k.mT + placed) / self.width**0.5
        weights = self.hidden(scores, mask).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class OfEarlierDistances(OfAllDistances):
    """L distances, as for code that hides later keys, which this does not."""

    def distances(self, length: int):
        return torch.arange(length - 1, -1, -1)


class HidesLaterKeys(OfEarlierDistances):
    def hidden(self, scores, mask):
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf"))


class AddsLittleEnough(OfEarlierDistances):
    """What hides later keys is no more than -10000."""

    def hidden(self, scores, mask):
        later = torch.ones(scores.shape[-2:]).triu(1)
        return scores + later * -10000.0


class HidesThemIfAsked(OfEarlierDistances):
    def forward(self, x, is_causal: bool = True):
        self.is_causal = is_causal
        return self.attend(x, None)

    def hidden(self, scores, mask):
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later & self.is_causal, float("-inf"))


class MayHideLaterKeys(OfEarlierDistances):
    def hidden(self, scores, mask):
        return scores if mask is None else scores.masked_fill(mask, float("-inf"))

    def forward(self, x, mask=None):
        """mask: True blocks."""
        return self.attend(x, mask)


@pytest.mark.parametrize("kind", [OfAllDistances, HidesLaterKeys, AddsLittleEnough])
def test_a_shift_of_as_many_distances_as_are_seen_is_right(kind):
    report = multihead.check(kind)
    assert report.judgement in ("right", "right_if"), str(report)
    assert "bias_of_another_query" not in (*conditions(report), *report.causes)


def test_a_bias_of_the_next_query_is_named():
    assert multihead.check(OfEarlierDistances).cause == "bias_of_another_query"


@pytest.mark.parametrize("kind", [MayHideLaterKeys, HidesThemIfAsked])
def test_a_mask_may_hide_the_bias_of_the_next_query(kind):
    report = multihead.check(kind)
    assert report.judgement == "right_if", str(report)
    assert "bias_of_another_query" in conditions(report)


class OneForAll(nn.Module):
    """All heads of the loop have the same projections."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.heads, width = num_heads, dim // num_heads
        self.q, self.k, self.v = (nn.Linear(dim, width) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        heads = []
        for _ in range(self.heads):
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            heads.append(weights @ v)
        return self.out(torch.cat(heads, -1))


class CopiedHeads(nn.Module):
    """Heads of their own, which begin with the same numbers."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        one = nn.Linear(dim, 3 * dim // num_heads)
        self.heads = nn.ModuleList(copy.deepcopy(one) for _ in range(num_heads))
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        heads = []
        for head in self.heads:
            q, k, v = head(x).chunk(3, -1)
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            heads.append(weights @ v)
        return self.out(torch.cat(heads, -1))


class FallsWithDistance(nn.Module):
    """A loop over heads, each of which has a slope of its own (Press et al. 2022)."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        parts = (f(x).chunk(self.heads, -1) for f in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1])
        far = (places[:, None] - places).abs()
        heads = []
        for number, (q, k, v) in enumerate(zip(*parts), 1):
            scores = q @ k.mT / q.shape[-1] ** 0.5 - far * 2.0**-number
            heads.append(scores.softmax(-1) @ v)
        return self.o(torch.cat(heads, -1))


@pytest.mark.parametrize("kind", [CopiedHeads, FallsWithDistance])
def test_heads_of_a_loop_that_differ_are_right(kind):
    report = multihead.check(kind)
    assert report.judgement in ("right", "right_if"), str(report)


def test_heads_that_are_alike_are_named():
    assert multihead.check(OneForAll).cause == "heads_alike"
