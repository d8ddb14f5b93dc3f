# SPDX-License-Identifier: MIT
"""What calls and constructors are handed: fused weights that are kept apart, objects of
the file's own classes, switches, heads before items."""

import pytest
import torch
from heads import Heads
from test_check_unusual import conditions
from torch import nn

import multihead


def of_three(x, w_qkv, w_out, b_out, heads):
    """x: (batch, length, dim); w_qkv: (3, dim, dim), applied as x @ w"""
    q, k, v = (x @ w for w in w_qkv)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2) @ w_out + b_out


def of_three_straight(x, w_qkv, w_out, b_out, heads):
    """x: (batch, length, dim); w_qkv: (3, dim, dim), applied as x @ w"""
    q, k, v = (x @ w for w in w_qkv)
    q, k, v = (t.reshape(len(x), heads, x.shape[1], -1) for t in (q, k, v))
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return (weights @ v).reshape(x.shape) @ w_out + b_out


def test_fused_weights_that_are_apart():
    assert multihead.check(of_three).judgement == "right"
    assert multihead.check(of_three_straight).cause == "heads_not_transposed"


class NoCache:
    def __call__(self, keys):
        return keys


class Cache(NoCache):
    def __init__(self, size):
        self.size = size


class Remembers(Heads):
    """x: (batch, length, dim)"""

    def forward(self, x, kept: Cache | NoCache):
        q, k, v = self.heads(kept(x))
        return self.merged((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)


class RemembersUnscaled(Remembers):
    def forward(self, x, kept: Cache | NoCache):
        q, k, v = self.heads(kept(x))
        return self.merged((q @ k.mT).softmax(-1) @ v)


def test_an_object_that_needs_nothing_to_be_made():
    assert multihead.check(Remembers).judgement == "right"
    assert multihead.check(RemembersUnscaled).cause == "scale_missing"


class Slides(Heads):
    """Causal, and with a window if it is asked for one."""

    def __init__(self, dim, num_heads, use_sliding_window=False, sliding_window=4096):
        super().__init__(dim, num_heads)
        self.use_sliding_window, self.size = use_sliding_window, sliding_window

    def hidden(self, length):
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        if self.use_sliding_window:
            later |= self.far(length)
        return later

    def far(self, length):
        return torch.ones(length, length, dtype=torch.bool).tril(-self.size)

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(self.hidden(x.shape[1]), -torch.inf)
        return self.merged(scores.softmax(-1) @ v)


class SlidesTooFar(Slides):
    def far(self, length):
        return torch.ones(length, length, dtype=torch.bool).tril(-self.size - 2)


def test_a_switch_of_windows_is_on():
    report = multihead.check(Slides)
    assert report.judgement == "right", str(report)
    assert "use_sliding_window=True" in str(report)
    assert multihead.check(SlidesTooFar).cause == "window_off_by_one"


def one_by_one(q, k, v, lengths):
    """q, k, v: (heads, batch, length, width); lengths: of each item"""
    heads, batch, length, width = q.shape
    out = torch.zeros_like(q)
    for item in range(batch):
        n = int(lengths[item])
        for head in range(heads):
            scores = q[head, item, :n] @ k[head, item, :n].T / width**0.5
            out[head, item, :n] = scores.softmax(-1) @ v[head, item, :n]
    return out


def one_more(q, k, v, lengths):
    """q, k, v: (heads, batch, length, width); lengths: of each item"""
    return one_by_one(q, k, v, lengths + 1)


def test_heads_may_come_before_items():
    report = multihead.check(one_by_one)
    assert conditions(report) == ["equal_lengths_only"], str(report)
    assert multihead.check(one_more).judgement == "wrong"


class OfMemories(nn.Module):
    """w: (qlen, bsz, d_model)"""

    def __init__(self, n_head, d_model, d_head):
        super().__init__()
        self.n_head, self.d_head = n_head, d_head
        self.qkv_net = nn.Linear(d_model, 3 * n_head * d_head, bias=False)
        self.o_net = nn.Linear(n_head * d_head, d_model, bias=False)

    def forward(self, w, mems=None):
        qlen, bsz = w.size(0), w.size(1)
        kept = w if mems is None else torch.cat([mems, w], 0)
        q, k, v = self.qkv_net(kept).chunk(3, -1)
        q, k, v = (t.view(-1, bsz, self.n_head, self.d_head) for t in (q[-qlen:], k, v))
        scores = torch.einsum("ibnd,jbnd->ijbn", q, k) / self.d_head**0.5
        out = torch.einsum("ijbn,jbnd->ibnd", scores.softmax(1), v)
        return self.o_net(out.flatten(2))


def test_lengths_before_items_by_their_names():
    report = multihead.check(OfMemories)
    assert report.judgement == "right", str(report)
    assert "tensors as (L, B, E)" in str(report)


class Blocks(Heads):
    """Blocks of a sequence, each of which attends to itself."""

    scales = True

    def __init__(self, dim, num_heads, block_size=32):
        super().__init__(dim, num_heads)
        self.block_size = block_size

    def forward(self, x):
        B, N, C = x.shape
        assert N % self.block_size == 0
        cut = (B, self.num_heads, N // self.block_size, self.block_size, -1)
        q, k, v = (t.reshape(cut) for t in self.heads(x))
        scores = q @ k.mT / (q.shape[-1] ** 0.5 if self.scales else 1)
        return self.together(scores.softmax(-1) @ v, B, N, C)

    def together(self, x, B, N, C):
        return self.o(x.permute(0, 2, 3, 1, 4).reshape(B, N, C))


class UnscaledBlocks(Blocks):
    scales = False


class BlocksAsTheyLie(Blocks):
    def together(self, x, B, N, C):
        return self.o(x.reshape(B, N, C))


def test_blocks_of_a_sequence():
    assert multihead.check(Blocks).judgement == "right", str(multihead.check(Blocks))
    assert multihead.check(UnscaledBlocks).cause == "scale_missing"
    assert multihead.check(BlocksAsTheyLie).cause == "merge_not_transposed"


class OfOneSequence(Heads):
    """(L, dim), returned as one item."""

    def forward(self, query, key, value):
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
            for t in (self.q(query), self.k(key), self.v(value))
        )
        context = torch.bmm((torch.bmm(q, k.mT) / q.shape[-1] ** 0.5).softmax(-1), v)
        context = context.transpose(0, 1).contiguous()
        return self.o(context.view(query.shape[0], -1, query.shape[1]))


def test_one_sequence_may_come_back_as_one_item():
    report = multihead.check(OfOneSequence)
    assert report.judgement == "right", str(report)


class LengthsBeforeItems(Heads):
    """Sequences first, whatever its helpers call their axes."""

    def cut(self, x):
        B, L, E = x.shape
        return x.view(B, L, self.num_heads, -1).transpose(1, 2)

    def forward(self, x):
        length, batch = x.size(0), x.size(dim=1)
        q, k, v = self.heads(x.transpose(0, 1))
        out = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.merged(out).view(batch, length, -1).transpose(0, 1)


def test_sizes_that_the_entry_counts_tell_the_layout():
    report = multihead.check(LengthsBeforeItems)
    assert report.judgement == "right", str(report)


class SlidesInLaterLayers(Slides):
    """As in Qwen2, whose first layers see all."""

    def __init__(
        self,
        dim,
        num_heads,
        use_sliding_window=False,
        sliding_window=4096,
        layer_idx=0,
        max_window_layers=28,
    ):
        slides = use_sliding_window and layer_idx >= max_window_layers
        super().__init__(dim, num_heads, slides, sliding_window)


class KeepsItsWindow(Heads):
    """Causal, with a window in later layers."""

    def __init__(
        self, dim, num_heads, sliding_window=4, use_sliding_window=False, layer_idx=0
    ):
        super().__init__(dim, num_heads)
        self.window = sliding_window if use_sliding_window and layer_idx else None

    def forward(self, x):
        q, k, v = self.heads(x)
        places = torch.arange(x.shape[1])
        far = places[:, None] - places
        hidden = (far < 0) | (far >= (self.window or len(places)))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        return self.merged(scores.softmax(-1) @ v)


@pytest.mark.parametrize("kind", [SlidesInLaterLayers, KeepsItsWindow])
def test_a_switch_of_some_layers_stays_off(kind):
    assert multihead.check(kind).judgement == "right"
