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


class CutsTheLastRow(HidesLaterKeys):
    """In the place of the first, which holds what was padded."""

    def shifted(self, scores, length: int):
        batch, heads, queries, count = scores.shape
        padded = F.pad(scores, (1, 0)).view(batch, heads, count + 1, queries)
        return padded[:, :, :-1]


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


@pytest.mark.parametrize("kind", [OfEarlierDistances, CutsTheLastRow])
def test_a_bias_of_the_query_beside_it_is_named(kind):
    assert multihead.check(kind).cause == "bias_of_another_query"


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


class ItemsInRows(nn.Module):
    """Views that flatten items with positions: one matrix of scores for the batch."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.scale = (dim // num_heads) ** -0.5
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, context):
        batch, length, dim = x.shape
        q = self.q(x).reshape(length, -1)
        k = self.k(context).reshape(-1, context.shape[1])
        v = self.v(context).reshape(-1, context.shape[1])
        weights = (q @ k * self.scale).softmax(-1)
        return self.o((weights @ v.T).reshape(batch, length, dim))


class AlongItems(nn.Module):
    """Attention of the items to each other is that of sequence-first code, but for what
    is behind it, which no fault explains; positions do not mix."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.inner = nn.MultiheadAttention(dim, num_heads)

    def forward(self, x):
        return self.inner(x, x, x)[0].sin()


def test_items_that_are_mixed_are_named_where_no_fault_explains_it():
    assert multihead.check(ItemsInRows).cause == "items_mixed"
    assert multihead.check(AlongItems).cause != "items_mixed"


class Additive(nn.Module):
    """Additive attention of a learned vector, as in SwiftFormer (Shaker et al. 2023)."""

    axis = -1

    def __init__(self, in_dims: int, token_dim: int, num_heads: int):
        super().__init__()
        width = token_dim * num_heads
        self.to_query, self.to_key = (
            nn.Linear(in_dims, width),
            nn.Linear(in_dims, width),
        )
        self.w_g = nn.Parameter(torch.randn(width, 1))
        self.scale_factor = token_dim**-0.5
        self.final = nn.Linear(width, in_dims)

    def forward(self, x):
        query, key = self.to_query(x), self.to_key(x)
        weights = (query @ self.w_g * self.scale_factor).softmax(self.axis)
        summed = (weights * query).sum(1, keepdim=True)
        return self.final(summed * key + query)


class AlongTokens(Additive):
    axis = 1


def test_a_softmax_of_one_number_is_named():
    report = multihead.check(Additive)
    assert report.cause == "softmax_of_one", str(report)
    report = multihead.check(AlongTokens)
    assert "scores_given" in {one["name"] for one in report.conditions}, str(report)


class RoundsItsScores(nn.Module):
    """In steps, whose gradient is 0: queries and keys have a part in it all the same."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.heads = num_heads
        self.fc_q, self.fc_k = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.fc_v, self.fc_o = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        parts = self.fc_q(x), self.fc_k(x), self.fc_v(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        places = torch.arange(x.shape[1], dtype=x.dtype)
        scores = q @ k.mT / q.shape[-1] ** 0.5 - (places[:, None] - places).abs() / 8
        return self.fc_o((scores.floor().softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_projections_behind_steps_are_not_said_to_be_unused():
    report = multihead.check(RoundsItsScores)
    assert report.judgement == "wrong", str(report)
    assert "projection_unused" not in report.causes, str(report)
