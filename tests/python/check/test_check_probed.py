# SPDX-License-Identifier: MIT
"""Arguments that code insists on and that nobody knows: they are given what lets it run, so
that the rest can be judged."""

import math

import pytest
import torch
from heads import Heads
from torch import nn

import multihead


def _conditions(report):
    return [condition["name"] for condition in report.conditions]


class EdgeBias(Heads):
    """A bias of the features of each pair, as in graph transformers."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.bias = nn.Linear(dim, num_heads)

    def forward(self, x, edge_feats):
        q, k, v = self.heads(x)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = scores + self.bias(edge_feats).permute(0, 3, 1, 2)
        return self.merged(scores.softmax(-1) @ v)


class EdgeBiasByEmbedDim(EdgeBias):
    def forward(self, x, edge_feats):
        q, k, v = self.heads(x)
        scores = q @ k.mT * x.shape[-1] ** -0.5
        scores = scores + self.bias(edge_feats).permute(0, 3, 1, 2)
        return self.merged(scores.softmax(-1) @ v)


class RelativeTables(Heads):
    """Keys and values of relative positions, which the caller looks up (Shaw et al.,
    2018)."""

    def forward(self, x, rel_k, rel_v):
        q, k, v = self.heads(x)
        scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, rel_k)
        weights = (scores * q.shape[-1] ** -0.5).softmax(-1)
        return self.merged(weights @ v + torch.einsum("bhij,ijd->bhid", weights, rel_v))


class Modulated(Heads):
    """A gain and a bias of each item."""

    def forward(self, x, gamma, beta):
        q, k, v = self.heads(x * gamma.unsqueeze(1) + beta.unsqueeze(1))
        return self.merged((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v)


class OfKinds(Heads):
    def forward(self, x, attention_type):
        q, k, v = self.heads(x)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if attention_type == "decoder":
            hidden = torch.ones_like(scores).triu(1).bool()
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        elif attention_type == "encoder":
            weights = scores.softmax(-1)
        return self.merged(weights @ v)


class Times(Heads):
    """Rotary positions at any times."""

    def turned(self, x, times):
        a, b = x.chunk(2, -1)
        speeds = 100.0 ** -torch.linspace(0, 1, a.shape[-1], dtype=x.dtype)
        angles = (times[..., None] * speeds).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, x, timestamps):
        q, k, v = self.heads(x)
        q, k = self.turned(q, timestamps), self.turned(k, timestamps)
        return self.merged((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v)


@pytest.mark.parametrize(
    "subject", [EdgeBias, RelativeTables, Modulated, OfKinds, Times]
)
def test_what_is_made_of_them_is_a_condition(subject):
    report = multihead.check(subject)
    assert report.judgement == "right_if", str(report)
    assert "other_arguments" in _conditions(report)


def test_the_rest_is_judged():
    report = multihead.check(EdgeBiasByEmbedDim)
    assert report.cause == "scale_by_embed_dim", str(report)
    assert "edge_feats given as zeros, (B, L, S, E)" in " ".join(str(report).split())


class MaskedByTime(Heads):
    """Keys and values with the time between each two tokens (Li et al., 2020)."""

    def blocked(self, scores, time_mask):
        return scores.masked_fill(time_mask[:, None, None], -1e9)

    def forward(self, x, time_mask, time_matrix_k, time_matrix_v):
        q, k, v = self.heads(x)
        of_pairs = [self.of_heads(t) for t in (time_matrix_k, time_matrix_v)]
        scores = q @ k.mT + (of_pairs[0] @ q.unsqueeze(-1)).squeeze(-1)
        weights = self.blocked(scores * q.shape[-1] ** -0.5, time_mask).softmax(-1)
        return self.merged(
            weights @ v + (weights.unsqueeze(-2) @ of_pairs[1]).squeeze(-2)
        )

    def of_heads(self, pairs):
        return pairs.unflatten(-1, (self.num_heads, -1)).permute(0, 3, 1, 2, 4)


class MasksQueriesByTime(MaskedByTime):
    def blocked(self, scores, time_mask):
        return scores.masked_fill(time_mask[:, None, :, None], -1e9)


def test_a_mask_beside_them_stays_one():
    right, wrong = (multihead.check(one) for one in (MaskedByTime, MasksQueriesByTime))
    assert right.judgement == "right_if", str(right)
    assert wrong.cause == "padding_on_queries", str(wrong)


class Gated(Heads):
    """What zeros would make means of all values."""

    def forward(self, x, gate):
        q, k, v = self.heads(x)
        scores = q @ k.mT * q.shape[-1] ** -0.5 * gate[:, None]
        return self.merged(scores.softmax(-1) @ v)


class Whole(Heads):
    """Keys and values of a sequence with what was before it, as the caller joins them."""

    def forward(self, x, full_input):
        q = self.heads(x)[0]
        _, k, v = self.heads(full_input)
        return self.merged((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v)


def test_zeros_that_change_more_are_not_taken():
    assert multihead.check(Gated).judgement != "wrong"
    assert multihead.check(Whole).judgement.startswith("right")


class OfWindows(Heads):
    """Words of which one alone needs the window that it is told."""

    def __init__(self, dim, num_heads, window=3):
        super().__init__(dim, num_heads)
        self.window = window

    def forward(self, x, attention_type):
        q, k, v = self.heads(x)
        place = torch.arange(x.shape[1])
        distance = place[:, None] - place
        if attention_type == "full":
            seen = torch.ones_like(distance, dtype=torch.bool)
        elif attention_type == "local":
            seen = distance.abs() <= self.window
        else:
            raise ValueError(attention_type)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return self.merged(scores.masked_fill(~seen, -math.inf).softmax(-1) @ v)


class OfWindowsByDefault(OfWindows):
    """What is asked for by a word that is not the default."""

    def forward(self, x, pattern="global"):
        return super().forward(x, "local" if pattern == "window" else "full")


class OfNone(Heads):
    """Words of which one leaves attention out; behind a norm."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, attention_type):
        if attention_type == "none":
            return x
        if attention_type == "joint":
            q, k, v = self.heads(self.norm(x))
            weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
            return x + self.merged(weights @ v)
        raise ValueError(attention_type)


class Directed(Heads):
    """Words of which either is half of what is meant (Shen et al., 2018)."""

    def forward(self, x, direction):
        q, k, v = self.heads(x)
        hidden = torch.ones(x.shape[1], x.shape[1]).bool()
        hidden = hidden.tril(-1) if direction == "backward" else hidden.triu(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -math.inf)
        return self.merged(scores.softmax(-1) @ v)


class ByAge(Heads):
    """Numbers whose order means something."""

    def forward(self, x, ages):
        q, k, v = self.heads(x)
        older = (ages[:, None, :] >= ages[:, :, None]).unsqueeze(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~older, -math.inf)
        return self.merged(scores.softmax(-1) @ v)


@pytest.mark.parametrize(
    "subject", [OfWindows, OfWindowsByDefault, OfNone, Directed, ByAge]
)
def test_one_way_of_several_is_no_fault(subject):
    report = multihead.check(subject)
    assert report.judgement != "wrong", str(report)
