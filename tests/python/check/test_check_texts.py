# SPDX-License-Identifier: MIT
"""What names, docstrings and decorators say of masks, windows, heads and training."""

import pytest
import torch
from attempts.steps import Attention
from test_check_strays import named
from torch import nn
from torch.nn import functional as F

import multihead


class AsTransformersSays(Attention):
    def hidden(self, attention_mask):
        return attention_mask[:, None, None, :] == 0

    def forward(self, hidden_states, attention_mask=None):
        """
        Args:
            attention_mask (`torch.LongTensor` of shape `(batch_size, sequence_length)`):
                Mask to avoid performing attention on padding. Values in `[0, 1]`:
                - 1 for tokens that are **not masked**,
                - 0 for tokens that are **masked**.
        """
        q, k, v = self.qkv(hidden_states)
        scores = self.scores(q, k)
        if attention_mask is not None:
            scores = scores.masked_fill(self.hidden(attention_mask), float("-inf"))
        return self.join(scores.softmax(-1) @ v)


def test_tokens_that_are_not_masked():
    assert multihead.check(AsTransformersSays).judgement == "right"


class OfAWindow(Attention):
    """Each query sees `window` keys, itself among them, and none that is later."""

    more = 0

    def __init__(self, d_model, num_heads, window=3):
        super().__init__(d_model, num_heads)
        self.window = window

    def forward(self, x):
        q, k, v = self.qkv(x)
        places = torch.arange(x.shape[1])
        behind = places[:, None] - places
        seen = (behind >= 0) & (behind < self.window + self.more)
        scores = self.scores(q, k).masked_fill(~seen, float("-inf"))
        return self.join(scores.softmax(-1) @ v)


class OfAWindowAndOneMore(OfAWindow):
    """Attends to the last `window` tokens including itself."""

    more = 1


def test_windows_that_count_their_own_key():
    assert multihead.check(OfAWindow).judgement == "right"
    assert multihead.check(OfAWindowAndOneMore).cause == "window_off_by_one"


class LengthMaskedAttention(Attention):
    def forward(self, x, lengths):
        q, k, v = self.qkv(x)
        padded = torch.arange(x.shape[1]) >= lengths[:, None]
        scores = self.scores(q, k).masked_fill(padded[:, None, None], float("-inf"))
        return self.join(scores.softmax(-1) @ v)


class MaskedSelfAttention(Attention):
    """Of padding, not causal."""

    def forward(self, x, n_valid):
        q, k, v = self.qkv(x)
        padded = torch.arange(x.shape[1]) >= n_valid[:, None]
        scores = self.scores(q, k).masked_fill(padded[:, None, None], float("-inf"))
        return self.join(scores.softmax(-1) @ v)


class ServesAlone(Attention):
    @torch.inference_mode()
    def forward(self, x):
        return self.attend(x, x, x)


class OfHeadChannels(nn.Module):
    """(B, C, X, Y): num_head_channels features in each head, scores in float32."""

    def __init__(self, channels, num_heads=1, num_head_channels=-1):
        super().__init__()
        given = num_head_channels == -1
        self.heads = num_heads if given else channels // num_head_channels
        self.norm = nn.GroupNorm(4, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.out = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        b, c, *sides = x.shape
        x = x.reshape(b, c, -1)
        cut = self.qkv(self.norm(x)).reshape(b, self.heads, -1, x.shape[-1])
        q, k, v = cut.chunk(3, 2)
        scores = (q.mT @ k / q.shape[2] ** 0.5).float()
        weights = scores.softmax(-1).to(v.dtype)
        return (x + self.out((v @ weights.mT).reshape(b, c, -1))).reshape(b, c, *sides)


@pytest.mark.parametrize(
    "target", [LengthMaskedAttention, MaskedSelfAttention, ServesAlone, OfHeadChannels]
)
def test_what_names_and_decorators_say(target):
    report = multihead.check(target)
    assert report.judgement in ("right", "right_if"), str(report)


class PrefixLMAttention(Attention):
    """Causal, but all see the first `prefix_len` tokens."""

    def __init__(self, d_model, num_heads, prefix_len=2):
        super().__init__(d_model, num_heads)
        self.prefix_len = prefix_len

    def forward(self, x):
        q, k, v = self.qkv(x)
        i = torch.arange(x.shape[1])
        seen = (i <= i[:, None]) | (i < self.prefix_len)
        return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))


def test_a_prefix_that_all_see_is_of_another_kind():
    assert multihead.check(PrefixLMAttention).cause == "outside"


def multi_query_attention(x, wq, wk, wv, wo, n_heads):
    """wq, wo: (E, E); wk, wv: (E, E / n_heads)."""
    q = (x @ wq).unflatten(-1, (n_heads, -1)).transpose(1, 2)
    k, v = (x @ wk).unsqueeze(1), (x @ wv).unsqueeze(1)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2) @ wo


def multi_query_attention_unscaled(x, wq, wk, wv, wo, n_heads):
    q = (x @ wq).unflatten(-1, (n_heads, -1)).transpose(1, 2)
    k, v = (x @ wk).unsqueeze(1), (x @ wv).unsqueeze(1)
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2) @ wo


def test_matrices_of_one_head_of_keys():
    report = multihead.check(multi_query_attention)
    assert report.judgement in ("right", "right_if"), str(report)
    assert multihead.check(multi_query_attention_unscaled).cause == "scale_missing"


class OfOneTokenMore(Attention):
    """Tokens behind `lengths` are hidden, but for the first of them."""

    def forward(self, x, context, lengths):
        q, k = self.split(self.W_q(x)), self.split(self.W_k(context))
        hidden = torch.arange(context.shape[1]) > lengths[:, None]
        scores = self.scores(q, k).masked_fill(hidden[:, None, None], float("-inf"))
        return self.join(scores.softmax(-1) @ self.split(self.W_v(context)))


def test_no_key_behind_a_length_is_read():
    assert multihead.check(OfOneTokenMore).cause == "padding_off_by_one"


class TurnedWithoutItsSign(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        q, k = self.rope(q), self.rope(k)
        return self.join(self.scores(q, k).softmax(-1) @ v)

    def rope(self, x):
        length, width = x.shape[-2:]
        speed = 10000.0 ** (-torch.arange(0, width, 2).to(x.dtype) / width)
        angle = torch.outer(torch.arange(length).to(x.dtype), speed).repeat(1, 2)
        first, second = x.chunk(2, -1)
        return x * angle.cos() + torch.cat((second, first), -1) * angle.sin()


def test_a_turn_without_its_sign():
    assert named(multihead.check(TurnedWithoutItsSign)) == ["rotary_misapplied"]


class PoolsByItsOwn(nn.Module):
    """d features, heads, and k queries of its own."""

    def __init__(self, d, n_heads, k=4):
        super().__init__()
        self.asks, self.heads = nn.Parameter(torch.randn(1, k, d)), n_heads
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        parts = self.q(self.asks.expand(len(x), -1, -1)), self.k(x), self.v(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        out = F.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(2)


def test_a_letter_with_a_default_is_no_width():
    report = multihead.check(PoolsByItsOwn)
    assert report.judgement in ("right", "right_if"), str(report)
