# SPDX-License-Identifier: MIT
"""A token on the keys and values of calls before must give what one pass gives, also
with positions, and where the module itself keeps them."""

import pytest
import torch
from attempts.rotary import half_turned
from attempts.steps import Attention
from torch import nn

import multihead


def tables(start, length, width):
    speed = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.outer(torch.arange(start, start + length).double(), speed)
    return angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)


class Turned(Attention):
    """Causal, with rotary positions that go on where the cache ends."""

    def start(self, past):
        return 0 if past is None else past[0].size(2)

    def forward(self, x, past=None):
        q, k, v = self.qkv(x)
        cos, sin = tables(self.start(past), x.size(1), self.d_k)
        q, k = (t * cos + half_turned(t) * sin for t in (q, k))
        if past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v)))
        scores = self.scores(q, k)
        ahead = k.size(2) - q.size(2)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + ahead)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.join(weights @ v), (k, v)


class SeesAllAtOnce(Turned):
    """On a cache nothing is blocked, as for one token, whatever comes."""

    def forward(self, x, past=None):
        if past is None:
            return super().forward(x)
        q, k, v = self.qkv(x)
        cos, sin = tables(self.start(past), x.size(1), self.d_k)
        q, k = (t * cos + half_turned(t) * sin for t in (q, k))
        k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v)))
        return self.join(self.scores(q, k).softmax(-1) @ v), (k, v)


class ForLater(Attention):
    """In training it has no use for its cache, and tokens see later ones."""

    def __init__(self, d_model: int, num_heads: int):
        super().__init__(d_model, num_heads)
        self.cache_k = self.cache_v = None

    def forward(self, x):
        q, k, v = self.qkv(x)
        if not self.training and self.cache_k is not None:
            k, v = (torch.cat(p, 2) for p in ((self.cache_k, k), (self.cache_v, v)))
        return self.join(self.scores(q, k).softmax(-1) @ v)


def test_a_cache_for_later_calls_is_for_one_token_at_a_time():
    report = multihead.check(ForLater)
    assert [c["name"] for c in report.conditions] == ["one_token_on_cache"], str(report)


def test_several_tokens_at_once_on_a_cache():
    report = multihead.check(SeesAllAtOnce)
    names = [condition["name"] for condition in report.conditions]
    assert "one_token_on_cache" in names, str(report)
    report = multihead.check(Turned)
    names = [condition["name"] for condition in report.conditions]
    assert "one_token_on_cache" not in names, str(report)


class TurnedFromTheFirst(Turned):
    """Each call counts its positions from 0."""

    def start(self, past):
        return 0


class TurnedWhereTheCallerSays(Turned):
    """Where a call begins is said by an argument of which nothing is known."""

    def forward(self, x, past=None, index_of_first=0):
        self.first = index_of_first
        return super().forward(x, past)

    def start(self, past):
        return self.first


class Kept(Attention):
    """As in LLaMA: the module keeps keys and values, start_pos says where it is."""

    def __init__(self, d_model, num_heads, max_batch_size=8, max_seq_len=300):
        super().__init__(d_model, num_heads)
        shape = max_batch_size, max_seq_len, num_heads, self.d_k
        self.register_buffer("cache_k", torch.zeros(shape))
        self.register_buffer("cache_v", torch.zeros(shape))

    def places(self, start, length):
        return slice(start, start + length)

    def forward(self, x, start_pos=0):
        q, *new = self.qkv(x)
        batch, end = x.size(0), start_pos + x.size(1)
        for cache, part in zip((self.cache_k, self.cache_v), new):
            cache[:batch, self.places(start_pos, x.size(1))] = part.transpose(1, 2)
        k, v = (c[:batch, :end].transpose(1, 2) for c in (self.cache_k, self.cache_v))
        later = torch.ones(x.size(1), end, dtype=torch.bool).triu(1 + start_pos)
        weights = self.scores(q, k).masked_fill(later, -torch.inf).softmax(-1)
        return self.join(weights @ v)


class KeptAtTheFront(Kept):
    """New tokens take the place of the first ones."""

    def places(self, start, length):
        return slice(length)


class Appended(Attention):
    """Causal. The module keeps what it has seen, and nothing clears it."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.cache = None

    def forward(self, x):
        return self.joined(*self.qkv(x))

    def joined(self, q, k, v):
        if self.cache is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(self.cache, (k, v)))
        self.cache = k, v
        return self.seen(q, k, v, k.size(2) - q.size(2))

    def seen(self, q, k, v, ahead):
        later = torch.ones(q.size(2), k.size(2), dtype=torch.bool).triu(1 + ahead)
        weights = self.scores(q, k).masked_fill(later, -torch.inf).softmax(-1)
        return self.join(weights @ v)


class AppendedElsewhere(Appended):
    """Under a name that says nothing of a cache."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        del self.cache
        self.seen_before = None

    @property
    def cache(self):
        return self.seen_before

    @cache.setter
    def cache(self, value):
        self.seen_before = value

    @cache.deleter
    def cache(self):
        pass


class AppendedInHalf(Appended):
    def joined(self, q, k, v):
        if self.cache is not None:
            self.cache = tuple(x.to(q.dtype) for x in self.cache)
        out = super().joined(q, k, v)
        self.cache = tuple(x.bfloat16() for x in self.cache)
        return out


class AppendedWhereAsked(Appended):
    def forward(self, x, use_cache=False):
        q, k, v = self.qkv(x)
        return self.joined(q, k, v) if use_cache else self.seen(q, k, v, 0)


class AppendedIfTold(AppendedWhereAsked):
    def forward(self, x, use_kv_cache: bool):
        return super().forward(x, use_kv_cache)


class AppendedIfSwitchedOn(AppendedWhereAsked):
    def forward(self, x, enable_kv_cache=False):
        return super().forward(x, enable_kv_cache)


class AppendedAsTheFirst(AppendedWhereAsked):
    """The newest query sees the first key alone."""

    def seen(self, q, k, v, ahead):
        return super().seen(q, k, v, 0)


class AppendedIfToldAsTheFirst(AppendedAsTheFirst):
    def forward(self, x, use_kv_cache: bool):
        return super().forward(x, use_kv_cache)


class SwitchedOnAsTheFirst(AppendedAsTheFirst):
    def forward(self, x, enable_kv_cache=False):
        return super().forward(x, enable_kv_cache)


class CountedByItself(Kept):
    """The module counts the tokens that it has kept."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.index = 0

    def forward(self, x, caching=False):
        start = self.index if caching else 0
        out = super().forward(x, start)
        self.index = start + x.size(1) if caching else self.index
        return out


class CountedAtTheFront(KeptAtTheFront, CountedByItself):
    """It counts, and does not go by it."""


class AtItsPositions(Kept):
    """As in gpt-fast: the positions (L,) say where."""

    def forward(self, x, input_pos):
        assert input_pos.dim() == 1
        return super().forward(x, int(input_pos[0]))


class OnlyTheNewestReturned(Turned):
    """The first step is right, the next one sees two keys."""

    def forward(self, x, past=None):
        out, kept = super().forward(x, past)
        return out, tuple(t[:, :, -x.size(1) :] for t in kept)


class BesideAnotherLayer(TurnedFromTheFirst):
    """Only its heads are judged, beside a layer of which nothing is known."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.extra = nn.Linear(d_model, d_model)

    def forward(self, x, past=None):
        return super().forward(x + self.extra(x).tanh(), past)


class OfTheContext(Attention):
    """Keys and values of a context, which are computed once."""

    def forward(self, x, context=None, cache=None):
        if cache is None:
            source = x if context is None else context
            cache = self.split(self.W_k(source)), self.split(self.W_v(source))
        k, v = cache
        weights = self.scores(self.split(self.W_q(x)), k).softmax(-1)
        return self.join(weights @ v), cache


class CappedOnACache(Turned):
    """Only the trace of one pass shows the cap."""

    def scores(self, q, k):
        return 5 * torch.tanh(super().scores(q, k) / 5)


class KeptInHalf(Turned):
    """What is kept is rounded, and not the same."""

    def forward(self, x, past=None):
        past = past and tuple(t.double() for t in past)
        out, kept = super().forward(x, past)
        return out, tuple(t.bfloat16() for t in kept)


@pytest.mark.parametrize(
    "target",
    [
        Turned,
        TurnedWhereTheCallerSays,
        Kept,
        Appended,
        AppendedElsewhere,
        AppendedInHalf,
        AppendedWhereAsked,
        AppendedIfTold,
        AppendedIfSwitchedOn,
        CountedByItself,
        AtItsPositions,
        OfTheContext,
        CappedOnACache,
        KeptInHalf,
    ],
)
def test_what_goes_on_where_a_cache_ends_is_right(target):
    report = multihead.check(target)
    assert report.cause is None and report.judgement != "not_judged", str(report)


@pytest.mark.parametrize(
    "target",
    [
        Kept,
        Appended,
        AppendedElsewhere,
        AppendedWhereAsked,
        AppendedIfTold,
        AppendedIfSwitchedOn,
        CountedByItself,
        AtItsPositions,
    ],
)
def test_a_token_on_what_a_module_keeps_is_a_case(target):
    names = [case["name"] for case in multihead.check(target).cases]
    assert "the last token, on a cache" in names


class JoinedAlongHeads(Turned):
    def forward(self, x, past=None):
        if past is not None:
            torch.cat((past[0], past[0].transpose(1, 2)), 1)
        return super().forward(x, past)


def test_a_call_on_its_cache_that_raises_is_told():
    report = multihead.check(JoinedAlongHeads)
    assert report.cause is None, str(report)
    assert "on its cache was not judged: RuntimeError" in str(report)


class WritesIntoRoom(Attention):
    """Causal; kv_cache: [k, v] with room for all tokens."""

    def first_row(self, start):
        return start

    def forward(self, x, start_pos=0, kv_cache=None):
        q, k, v = self.qkv(x)
        end = start_pos + x.size(1)
        if kv_cache is not None:
            keys, values = kv_cache
            keys[:, :, start_pos:end] = k
            values[:, :, start_pos:end] = v
            k, v = keys[:, :, :end], values[:, :, :end]
        row = self.first_row(start_pos)
        hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
        hidden = hidden[row : row + x.size(1), : k.size(2)]
        scores = self.scores(q, k).masked_fill(hidden, -torch.inf)
        return self.join(scores.softmax(-1) @ v)


class SeesAsTheFirstRows(WritesIntoRoom):
    def first_row(self, start):
        return 0


class WritesIntoBoth(WritesIntoRoom):
    """Causal, with positions before heads in its caches."""

    def forward(self, x, k_cache, v_cache, start_pos=0):
        q, k, v = self.qkv(x)
        end = start_pos + x.size(1)
        k_cache[:, start_pos:end] = k.transpose(1, 2)
        v_cache[:, start_pos:end] = v.transpose(1, 2)
        k, v = (t[:, :end].transpose(1, 2) for t in (k_cache, v_cache))
        row = self.first_row(start_pos)
        hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
        hidden = hidden[row : row + x.size(1), :end]
        scores = self.scores(q, k).masked_fill(hidden, -torch.inf)
        return self.join(scores.softmax(-1) @ v)


class SeesInBothAsTheFirstRows(WritesIntoBoth):
    def first_row(self, start):
        return 0


@pytest.mark.parametrize("target", [WritesIntoRoom, WritesIntoBoth])
def test_room_for_all_tokens_is_written_into(target):
    report = multihead.check(target)
    assert report.judgement == "right", str(report)


@pytest.mark.parametrize(
    "target",
    [
        SeesAsTheFirstRows,
        SeesInBothAsTheFirstRows,
        TurnedFromTheFirst,
        KeptAtTheFront,
        CountedAtTheFront,
        AppendedAsTheFirst,
        AppendedIfToldAsTheFirst,
        SwitchedOnAsTheFirst,
        OnlyTheNewestReturned,
        BesideAnotherLayer,
    ],
)
def test_what_differs_on_a_cache_is_a_fault(target):
    report = multihead.check(target)
    assert report.cause == "cache_differs", str(report)
    assert "than in one pass" in str(report)
