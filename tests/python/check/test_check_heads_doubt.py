# SPDX-License-Identifier: MIT
"""What heads show is not taken for more than it is: scales that are lost or learned,
cosines, divisions behind the products, heads that nothing uses."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead


class _Gated(nn.Module):
    """Queries, keys and values (B, H, L, D), and an output behind a gate."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.gate = nn.Linear(dim, dim)
        self.tau = nn.Parameter(torch.tensor(0.7))

    def heads(self, x):
        return [
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        ]

    def finished(self, x, heads):
        out = self.o(heads.transpose(1, 2).flatten(2))
        return out * torch.sigmoid(self.gate(x))

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
    """`mask` holds 0 and -inf, which nothing says."""

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


class RotatedAfterScaling(nn.Module):
    """Queries are scaled before they are turned, as in ESM-2."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        width = q.size(-1)
        speed = 10000.0 ** (-torch.arange(0, width, 2).to(x) / width)
        angle = torch.arange(x.size(1)).to(x)[:, None] * speed
        cos, sin = (torch.cat((t, t), -1) for t in (angle.cos(), angle.sin()))
        q = q * width**-0.5
        q, k = (t * cos + _turned(t) * sin for t in (q, k))
        return self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_positions_after_the_scale():
    report = multihead.check(RotatedAfterScaling)
    assert report.judgement == "right", str(report)


class AnyAxes(nn.Module):
    """Takes (B, C, ...) with any number of axes behind the channels."""

    def __init__(self, channels, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = (
            nn.Linear(channels, 3 * channels),
            nn.Linear(channels, channels),
        )

    def forward(self, x):
        b, c, *spatial = x.shape
        tokens = x.reshape(b, c, -1).mT
        q, k, v = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(out).mT.reshape(b, c, *spatial)


class _Base(nn.Module):
    def __init__(self, n_head, d_model):
        super().__init__()
        self.n_head = n_head
        self.qkv, self.out = (
            nn.Linear(d_model, 3 * d_model),
            nn.Linear(d_model, d_model),
        )


class HandsItsArgumentsOn(_Base):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

    def forward(self, x):
        b, n, _, heads = *x.shape, self.n_head
        q, k, v = self.qkv(x).view(b, n, 3, heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))


class PaddingOfAnotherName(_Base):
    """Not the very name of PyTorch's mask, and True is a token."""

    def forward(self, x, key_padding_masks=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_head, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mask = None if key_padding_masks is None else key_padding_masks[:, None, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("target", [AnyAxes, HandsItsArgumentsOn, PaddingOfAnotherName])
def test_it_is_called_as_a_person_would(target):
    report = multihead.check(target)
    assert report.judgement in ("right", "right_if"), str(report)
