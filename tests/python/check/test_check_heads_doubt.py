# SPDX-License-Identifier: MIT
"""What heads show is not taken for more than it is: scales that are lost or learned,
cosines, divisions behind the products, heads that nothing uses."""

import math

import pytest
import torch
import torch.nn.functional as F
from heads import Heads
from torch import nn

import multihead


class _Gated(Heads):
    """An output behind a gate."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.gate = nn.Linear(dim, dim)
        self.tau = nn.Parameter(torch.tensor(0.7))

    def finished(self, x, heads):
        return self.merged(heads) * torch.sigmoid(self.gate(x))

    def forward(self, x):
        return self.finished(x, self.attend(*self.heads(x)))


class ScaledThenShifted(_Gated):
    def attend(self, q, k, v):
        q = q * q.size(-1) ** -0.5 + 0.1
        return (q @ k.mT).softmax(-1) @ v


class Cosines(_Gated):
    def attend(self, q, k, v):
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return (10 * q @ k.mT).softmax(-1) @ v


class LearnedOnScores(_Gated):
    def attend(self, q, k, v):
        return (q @ k.mT / self.tau.abs()).softmax(-1) @ v


class DividedBehind(_Gated):
    def attend(self, q, k, v):
        weights = (q @ k.mT / math.sqrt(q.size(-1))).exp()
        return (weights @ v) / weights.sum(-1, keepdim=True)


class PartScaledInPlace(_Gated):
    def attend(self, q, k, v):
        both = torch.cat((q, k), -1)
        both[..., : q.size(-1)].mul_(q.size(-1) ** -0.5)
        q, k = both.chunk(2, -1)
        return (q @ k.mT).softmax(-1) @ v


class KeysFirst(_Gated):
    """The product has keys as rows, and the softmax is over them."""

    def attend(self, q, k, v):
        weights = (k @ q.mT / math.sqrt(q.size(-1))).softmax(-2)
        return torch.einsum("bhkq,bhkd->bhqd", weights, v)


RIGHT = [
    ScaledThenShifted,
    Cosines,
    LearnedOnScores,
    DividedBehind,
    PartScaledInPlace,
    KeysFirst,
]


@pytest.mark.parametrize("target", RIGHT)
def test_nothing_is_blamed_on_what_is_right(target):
    report = multihead.check(target)
    assert report.judgement != "wrong", str(report)


class HeadsForNothing(_Gated):
    def forward(self, x):
        self.finished(x, self.attend(*self.heads(x)))
        return x + torch.sigmoid(self.gate(x))

    def attend(self, q, k, v):
        return (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v


class QueriesWithQueries(_Gated):
    def attend(self, q, k, v):
        return (q @ q.mT / math.sqrt(q.size(-1))).softmax(-1) @ v


class NoScale(_Gated):
    def attend(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("target", [HeadsForNothing, QueriesWithQueries, NoScale])
def test_nothing_wrong_is_right_beside_a_gate(target):
    report = multihead.check(target, allow="all")
    assert not report.passed, str(report)
    assert target is not NoScale or report.cause == "scale_missing"


class MasksAdded(_Gated):
    """What `mask` holds, nothing says."""

    def forward(self, x, mask=None):
        q, k, v = self.heads(x)
        scores = q @ k.mT / math.sqrt(q.size(-1))
        scores = scores if mask is None else scores + mask
        return self.finished(x, scores.softmax(-1) @ v)


def test_added_masks_beside_a_gate():
    report = multihead.check(MasksAdded)
    names = [condition["name"] for condition in report.conditions]
    assert names == ["mask_additive", "layers_beside"], str(report)


def _turned(x):
    one, other = x.chunk(2, -1)
    return torch.cat((-other, one), -1)


class RotatedAfterScaling(Heads):
    """Queries are scaled before they are turned, as in ESM-2."""

    def forward(self, x):
        q, k, v = self.heads(x)
        width = q.size(-1)
        speed = 10000.0 ** (-torch.arange(0, width, 2).to(x) / width)
        angle = torch.arange(x.size(1)).to(x)[:, None] * speed
        cos, sin = (torch.cat((t, t), -1) for t in (angle.cos(), angle.sin()))
        q = q * width**-0.5
        q, k = (t * cos + _turned(t) * sin for t in (q, k))
        return self.merged((q @ k.mT).softmax(-1) @ v)


def test_positions_after_the_scale():
    report = multihead.check(RotatedAfterScaling)
    assert report.judgement == "right", str(report)


class AnyAxes(Heads):
    """Takes (B, C, ...) with any number of axes behind the channels."""

    def forward(self, x):
        b, c, *spatial = x.shape
        q, k, v = self.heads(x.reshape(b, c, -1).mT)
        out = self.merged(F.scaled_dot_product_attention(q, k, v))
        return out.mT.reshape(b, c, *spatial)


class HandsItsArgumentsOn(Heads):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

    def forward(self, x):
        b, n, _, heads = *x.shape, self.num_heads
        layers = (self.q, self.k, self.v)
        q, k, v = (layer(x).view(b, n, heads, -1).transpose(1, 2) for layer in layers)
        return self.merged(F.scaled_dot_product_attention(q, k, v))


class PaddingOfAnotherName(Heads):
    """Not the very name of PyTorch's mask, and True is a token."""

    def forward(self, x, key_padding_masks=None):
        mask = None if key_padding_masks is None else key_padding_masks[:, None, None]
        heads = self.heads(x)
        return self.merged(F.scaled_dot_product_attention(*heads, attn_mask=mask))


@pytest.mark.parametrize("target", [AnyAxes, HandsItsArgumentsOn, PaddingOfAnotherName])
def test_it_is_called_as_a_person_would(target):
    report = multihead.check(target)
    assert report.judgement in ("right", "right_if"), str(report)
