# SPDX-License-Identifier: MIT
"""Causal code: by a switch of its constructor, and by numbers that meet those of padding."""

import math

import pytest
import torch
from attempts.steps import Attention
from torch.nn import functional as F

import multihead


class Switched(Attention):
    """Causal if it is built so."""

    def __init__(self, d_model, num_heads, is_causal=False):
        super().__init__(d_model, num_heads)
        self.is_causal = is_causal
        self.register_buffer("seen", torch.ones(64, 64).tril().bool()[None, None])

    def blocked(self, length):
        return ~self.seen[:, :, :length, :length]

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        if self.is_causal:
            scores = scores.masked_fill(self.blocked(x.size(1)), float("-inf"))
        return self.join(scores.softmax(-1) @ v)


class SwitchedShifted(Switched):
    """A query sees the next key, too."""

    def blocked(self, length):
        shifted = super().blocked(length).roll(1, -1)
        shifted[..., 0] = False
        return shifted


class SwitchedInOneSize(Switched):
    """The triangle keeps all its columns."""

    def blocked(self, length):
        return ~self.seen[:, :length, :length]


class SwitchedInVain(Switched):
    """Nothing reads the switch."""

    def blocked(self, length):
        return torch.zeros(length, length, dtype=torch.bool)


class SwitchedByItsCaller(Attention):
    """The switch is for whoever makes the mask."""

    def __init__(self, d_model, num_heads, causal=False):
        super().__init__(d_model, num_heads)
        self.causal = causal

    def forward(self, x, mask=None):
        """mask: True = may attend."""
        q, k, v = self.qkv(x)
        scores = self.scores(q, k)
        if mask is not None:
            scores = scores.masked_fill(~mask.bool(), float("-inf"))
        return self.join(scores.softmax(-1) @ v)


class SwitchedWithATriangle(Switched):
    """The switch alone is not enough."""

    def __init__(self, d_model, num_heads, is_causal=False, triangle=None):
        super().__init__(d_model, num_heads, is_causal)
        self.seen = triangle.bool() if is_causal else None


class SwitchedInside(Switched):
    def forward(self, x):
        q, k, v = self.qkv(x)
        attend = F.scaled_dot_product_attention
        return self.join(attend(q, k, v, is_causal=self.is_causal))


@pytest.mark.parametrize(
    "kind", [Switched, SwitchedInside, SwitchedByItsCaller, SwitchedWithATriangle]
)
def test_a_switch_of_the_constructor_makes_it_causal(kind):
    report = multihead.check(kind)
    assert report.passed, report
    has_case = any("in the constructor" in case["name"] for case in report.cases)
    assert has_case == (kind in (Switched, SwitchedInside))


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (SwitchedShifted, "causal_one_too_far"),
        (SwitchedInVain, "causal_ignored"),
        (SwitchedInOneSize, "raises"),
    ],
)
def test_what_a_switch_of_the_constructor_makes_wrong(kind, cause):
    report = multihead.check(kind)
    assert report.cause == cause, report


class TwoNumbers(Attention):
    """A triangle that replaces scores by a number, and padding (B, L) that adds one, as
    GPT-2 and models of decisions have it."""

    number = -1e4

    def block(self, scores, later):
        return scores.masked_fill(later, self.number)

    def forward(self, x, mask):
        """mask: 1 = a token, 0 = padding."""
        q, k, v = self.qkv(x)
        later = torch.ones(x.size(1), x.size(1)).triu(1).bool()
        scores = self.block(self.scores(q, k), later)
        scores = scores + (1.0 - mask.view(len(x), 1, 1, -1)) * self.number
        return self.join(scores.softmax(-1) @ v)


class TwoLargeNumbers(TwoNumbers):
    number = -1e9


class TwoLeast(TwoNumbers):
    number = torch.finfo(torch.float32).min


class TwoAdded(TwoNumbers):
    def block(self, scores, later):
        return scores + later * self.number


class OneInfinite(TwoNumbers):
    def block(self, scores, later):
        return scores.masked_fill(later, -math.inf)


class TwoTooSmall(TwoNumbers):
    number = -5.0


@pytest.mark.parametrize(
    "kind", [TwoNumbers, TwoLargeNumbers, TwoLeast, TwoAdded, OneInfinite]
)
def test_rows_that_two_numbers_block_are_up_to_the_code(kind):
    report = multihead.check(kind, allow=["causal_by_itself"])
    assert report.judgement in ("right", "right_if"), report


def test_numbers_that_are_too_small_are_no_masks():
    report = multihead.check(TwoTooSmall)
    assert report.judgement == "wrong", report


class NonCausalSelfAttention(Attention):
    """Its name says that it is none."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        return self.join(self.scores(q, k).softmax(-1) @ v)


class CausalSelfAttention(NonCausalSelfAttention):
    pass


def test_names_that_say_causal():
    assert multihead.check(NonCausalSelfAttention).judgement == "right"
    assert multihead.check(CausalSelfAttention).cause == "causal_without_effect"


class CausalByItsMask(Attention):
    """attention_mask is added, of any shape, and may hide later keys."""

    def seen(self, scores):
        return scores

    def forward(self, x, attention_mask):
        q, k, v = self.qkv(x)
        scores = self.seen(self.scores(q, k) + attention_mask)
        return self.join(scores.softmax(-1) @ v)


class CausalBesidePadding(CausalByItsMask):
    """attention_mask: [bs, 1, 1, seq_len], 0 or -inf."""


class CausalItselfBesidePadding(CausalByItsMask):
    """attention_mask: [bs, 1, 1, seq_len], 0 or -inf."""

    def seen(self, scores):
        length = scores.size(-1)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf"))


class CausalByItsCaller(CausalByItsMask):
    """attention_mask: [bs, 1, 1, seq_len], to which the decoder adds look-ahead."""


class MaskedAttention(CausalByItsMask):
    """attention_mask: [bs, 1, 1, seq_len], -1e9 at [PAD]."""


class CausalInferenceAttention(CausalByItsMask):
    """Of treatments. attention_mask: [bs, 1, 1, seq_len], 0 or -inf."""


def test_a_mask_of_one_row_for_all_queries_makes_nothing_causal():
    report = multihead.check(CausalBesidePadding)
    assert report.causes == ["causal_without_effect"], str(report)


@pytest.mark.parametrize(
    "kind",
    [
        CausalByItsMask,
        CausalItselfBesidePadding,
        CausalByItsCaller,
        MaskedAttention,
        CausalInferenceAttention,
    ],
)
def test_a_mask_that_may_hide_later_keys_promises_nothing(kind):
    report = multihead.check(kind)
    assert report.judgement != "wrong", str(report)
