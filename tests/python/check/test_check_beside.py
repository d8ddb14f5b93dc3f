# SPDX-License-Identifier: MIT
"""What stands beside attention in modules that people publish: norms of what asks,
queries among the keys, gains of heads, windows that others apply, masks whose last axis
is the batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multihead


class Normed(nn.Module):
    """Keys are made of what asks where no context is given, as it is normed."""

    def __init__(self, dim, heads=8):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context=None):
        x = self.norm(x)
        return self.attend(x, x if context is None else context)

    def attend(self, x, context):
        parts = self.to_q(x), *self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class OfClasses(Normed):
    def forward(self, x, context=None):
        x = self.norm(x)
        return self.attend(x, x if context is None else torch.cat((x, context), dim=1))


class Resampler(Normed):
    def __init__(self, dim, heads=8):
        super().__init__(dim, heads)
        self.norm_media, self.norm_latents = nn.LayerNorm(dim), nn.LayerNorm(dim)
        del self.norm

    def forward(self, x, latents):
        latents, media = self.norm_latents(latents), self.norm_media(x)
        return self.attend(latents, torch.cat((media, latents), dim=1))


class RawWhereAlone(Normed):
    """What asks is normed, and the keys are not, be they the same."""

    def forward(self, x, context=None):
        return self.attend(self.norm(x), x if context is None else context)


@pytest.mark.parametrize("module", [Normed, OfClasses, Resampler, RawWhereAlone])
def test_what_a_norm_and_the_queries_are_among_is_no_fault(module):
    report = multihead.check(module)
    assert report.judgement == "right", str(report)
    names = {assumption["name"] for assumption in report.assumptions}
    joined = module in (OfClasses, Resampler)
    assert ("queries_among_keys" in names) is joined, names


def test_a_fault_behind_such_a_norm_is_named():
    class Unscaled(Normed):
        def attend(self, x, context):
            parts = self.to_q(x), *self.to_kv(context).chunk(2, dim=-1)
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
            weights = (q @ k.transpose(-1, -2)).softmax(-1)
            return self.to_out((weights @ v).transpose(1, 2).flatten(2))

    assert multihead.check(Unscaled).cause == "scale_missing"


class Local(Normed):
    def attend(self, x, context):
        parts = self.to_q(x), *self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        own = torch.eye(scores.shape[-1], dtype=torch.bool)
        weights = scores.masked_fill(own, -torch.finfo(scores.dtype).max).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x):
        return super().forward(x)


class TooStrictlyEarlier(Local):
    """Causal attention."""

    def attend(self, x, context):
        parts = self.to_q(x), *self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(0)
        weights = scores.masked_fill(later, -torch.finfo(scores.dtype).max).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


def test_that_no_query_sees_its_own_key_is_a_condition():
    report = multihead.check(Local)
    assert report.judgement == "right_if", str(report)
    assert [c["name"] for c in report.conditions] == ["own_key_blocked"]
    assert multihead.check(TooStrictlyEarlier).cause == "causal_misses_diagonal"


class Gains(nn.Module):
    """Queries and keys pass norms, beside a norm of the input that is as wide as all
    heads together."""

    by_head, scaled = True, True

    def __init__(self, dim, heads=8):
        super().__init__()
        self.heads, width = heads, dim // heads
        shape = (heads, 1, width) if self.by_head else (width,)
        self.q_gain = nn.Parameter(torch.ones(shape))
        self.k_gain = nn.Parameter(torch.ones(shape))
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        parts = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        root = q.shape[-1] ** 0.5
        q = F.normalize(q, dim=-1) * root * self.q_gain
        k = F.normalize(k, dim=-1) * root * self.k_gain
        scores = q @ k.transpose(-1, -2)
        weights = (scores / root if self.scaled else scores).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class GainsOfAll(Gains):
    by_head = False


class GainsForScale(GainsOfAll):
    scaled = False


def test_norms_of_heads_by_hand_beside_a_norm_of_the_input():
    for module in (Gains, GainsOfAll):
        report = multihead.check(module)
        assert report.judgement == "right", str(report)
        names = {assumption["name"] for assumption in report.assumptions}
        assert {"norm_first", "norm_of_heads"} <= names


def test_gains_of_heads_may_hold_the_scale():
    report = multihead.check(GainsForScale)
    assert report.judgement == "right_if", str(report)
    assert [c["name"] for c in report.conditions] == ["scale_in_gains"]


class Windowed(nn.Module):
    """Causal attention. Its window is only that of another kind, and not applied."""

    def __init__(self, dim, heads=8, sliding_window=None, kind="full"):
        super().__init__()
        self.heads = heads
        self.sliding_window = self.kept(sliding_window, kind)
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.to_out = nn.Linear(dim, dim)

    def kept(self, window, kind):
        return window if kind == "sliding" else None

    def attend(self, x, blocked):
        parts = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(blocked, -torch.inf).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))

    def later(self, x):
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        return ones.triu(1)

    def forward(self, x):
        return self.attend(x, self.later(x))


class InMasks(Windowed):
    """Attention. mask: True = blocked."""

    def kept(self, window, kind):
        return window

    def forward(self, x, mask=None):
        nothing = torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool)
        return self.attend(x, nothing if mask is None else mask)


class OfCache(Windowed):
    def kept(self, window, kind):
        return window or 64

    def forward(self, x, use_cache=False):
        if use_cache and x.shape[1] > self.sliding_window:
            raise ValueError("more than the cache holds")
        return self.attend(x, self.later(x))


class Forgotten(OfCache):
    def forward(self, x):
        assert self.sliding_window > 0
        return self.attend(x, self.later(x))


def test_a_window_that_another_setting_switches_off_is_none():
    report = multihead.check(Windowed, causal=True)
    assert report.judgement == "right", str(report)


@pytest.mark.parametrize("module", [InMasks, OfCache])
def test_a_window_that_others_apply_is_a_condition(module):
    report = multihead.check(module, allow="causal_by_itself")
    names = [condition["name"] for condition in report.conditions]
    assert report.cause is None and "window_elsewhere" in names, str(report)


def test_a_window_that_nobody_applies_is_a_fault():
    assert multihead.check(Forgotten, causal=True).cause == "window_ignored"


class ItemsLast(nn.Module):
    """query, key, value: (L, B, E). mask: (Lq, Lk, B), True = may attend."""

    keeps = True

    def __init__(self, dim, heads=8):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.to_v, self.to_out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, query, key, value, mask=None):
        given = zip((self.to_q, self.to_k, self.to_v), (query, key, value))
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)) for layer, x in given)
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            assert mask.shape[2] in (1, query.shape[1])
            blocked = mask == 0 if self.keeps else mask != 0
            scores = scores.masked_fill(blocked.unsqueeze(-1), -torch.inf)
        context = torch.einsum("ijbh,jbhd->ibhd", scores.softmax(1), v)
        return self.to_out(context.flatten(2))


class ItemsLastInverted(ItemsLast):
    """query, key, value: (L, B, E). mask: (Lq, Lk, B), True = may attend."""

    keeps = False


def test_masks_whose_last_axis_is_the_batch():
    report = multihead.check(ItemsLast, mask="keep")
    assert report.judgement == "right", str(report)
    assert "mask (Lq, Lk, B)" in {case["name"] for case in report.cases}
    assert multihead.check(ItemsLastInverted, mask="keep").cause == "mask_inverted"
