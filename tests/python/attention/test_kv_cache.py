# SPDX-License-Identifier: MIT
"""KVCache: what it holds after any sequence of calls, files, graphs, errors."""

import copy
import mmap
import re
from pathlib import Path

import pytest
import torch
from equal import assert_equal
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from safetensors.torch import load_file, save_file

import multihead

attention = multihead.scaled_dot_product_attention
G, D, DV = 2, 4, 3


def tokens(rows, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, G, count, width, generator=generator) for width in (D, DV)
    ]


class Held:
    """What a cache should hold: for each row, key (G, L, D) and value (G, L, Dv)."""

    def __init__(self, rows):
        self.rows = rows

    @classmethod
    def empty(cls, batch):
        return cls([(torch.empty(G, 0, D), torch.empty(G, 0, DV))] * batch)

    def lengths(self):
        return [row[0].shape[1] for row in self.rows]


def stored(x, dtype):
    return multihead.to_mxint8(x) if dtype == torch.int8 else x.to(dtype)


def check(cache, held):
    """The same tokens, and attention over them has the bits of the tokens alone."""
    lengths = held.lengths()
    assert cache.lengths().tolist() == lengths and len(cache) == max(lengths)
    assert cache.key().shape[2] == max(lengths) <= cache.capacity
    query = torch.linspace(-2, 2, 2 * G * D).view(1, 2 * G, 1, D)
    out = attention(
        query.expand(len(lengths), -1, -1, -1),
        cache.key(),
        cache.value(),
        key_lengths=cache.lengths(),
        enable_gqa=True,
    )
    for row, tensors in enumerate(held.rows):
        key, value = (stored(x, cache.key().dtype) for x in tensors)
        n = key.shape[1]
        assert torch.equal(cache.key()[row, :, :n], key)
        assert torch.equal(cache.value()[row, :, :n], value)
        alone = attention(query, key[None], value[None], enable_gqa=True)
        assert torch.equal(out[row], alone[0])


class Guard:
    """Frames the room of a cache in larger tensors, which nothing may write to, and
    fills what no row has with NaN, which nothing may read."""

    def __init__(self, cache):
        self.cache, self.frames = cache, {}

    def renew(self):
        cache = self.cache
        beyond = torch.arange(cache.capacity) >= cache.lengths()[:, None]
        for name in ("_keys", "_values"):
            room, frame = getattr(cache, name), self.frames.get(name)
            if frame is not None:
                assert (frame[:, :, [0, -1]] == 7).all()
            if frame is None or room.data_ptr() != frame[:, :, 1:].data_ptr():
                frame = torch.nn.functional.pad(room, (0, 0, 1, 1), value=7.0)
                self.frames[name] = frame
                room = frame[:, :, 1:-1]
                setattr(cache, name, room)
            nan = torch.nan if room.is_floating_point() else -1  # a scale that is NaN
            room.masked_fill_(beyond[:, None, :, None], nan)


class Caches(RuleBasedStateMachine):
    """Caches that grow and that do not, of every dtype, and copies made on the way."""

    def __init__(self):
        super().__init__()
        self.held = Held.empty(3)
        self.caches = [
            multihead.KVCache(3, G, D, DV),
            multihead.KVCache(3, G, D, DV, max_length=60),
            multihead.KVCache(3, G, D, DV, dtype=torch.bfloat16),
            multihead.KVCache(3, G, D, DV, dtype=torch.int8),
        ]
        self.copies = []
        self.guards = []

    @rule(count=st.integers(0, 9), seed=st.integers(0, 99), data=st.data())
    def append(self, count, seed, data):
        batch = len(self.held.rows)
        room = 60 - max(self.held.lengths())
        count = min(count, room)
        new = tokens(batch, count, seed)
        each = data.draw(
            st.none() | st.lists(st.integers(0, count), min_size=batch, max_size=batch)
        )
        for cache in self.caches:
            cache.append(*new, None if each is None else torch.tensor(each))
        counts = [count] * batch if each is None else each
        self.held = Held(
            [
                tuple(torch.cat([x, y[b, :, :n]], 1) for x, y in zip(row, new))
                for b, (row, n) in enumerate(zip(self.held.rows, counts))
            ]
        )

    @rule(data=st.data())
    def truncate(self, data):
        kept = [data.draw(st.integers(0, n)) for n in self.held.lengths()]
        for cache in self.caches:
            cache.truncate(kept)
        self.held = Held(
            [
                tuple(x[:, :n] for x in row)
                for row, n in zip(self.held.rows, kept, strict=True)
            ]
        )

    @rule(data=st.data())
    def reorder(self, data):
        last = len(self.held.rows) - 1
        rows = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=4))
        for cache in self.caches:
            cache.reorder(rows)
        self.held = Held([self.held.rows[row] for row in rows])

    @rule()
    def copy(self):
        self.copies = [(cache.clone(), self.held) for cache in self.caches]

    @rule()
    def go_on_with_a_copy(self):
        if self.copies:
            self.caches = [cache.clone() for cache, _ in self.copies]
            self.held = self.copies[0][1]

    @rule()
    def reset(self):
        for cache in self.caches:
            cache.reset()
        self.held = Held.empty(len(self.held.rows))

    @rule(length=st.integers(1, 9))
    def one_too_many(self, length):
        """An error leaves everything as it was."""
        room = 60 - max(self.held.lengths())
        key, value = tokens(len(self.held.rows), room + length, 1)
        with pytest.raises(ValueError, match="max_length"):
            self.caches[1].append(key, value)

    @invariant()
    def holds(self):
        all_caches = [*self.caches, *(cache for cache, _ in self.copies)]
        self.guards = [
            next((g for g in self.guards if g.cache is cache), Guard(cache))
            for cache in all_caches
        ]
        for guard in self.guards:
            guard.renew()
        multihead.reset_stats()
        for cache in self.caches:
            check(cache, self.held)
        for cache, held in self.copies:
            check(cache, held)
        stats = multihead.stats()
        assert stats.calls("fused") == stats.calls() > 0


TestCaches = Caches.TestCase
TestCaches.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def filled(lengths=(5, 0, 3), **options):
    cache = multihead.KVCache(len(lengths), G, D, DV, **options)
    cache.append(*tokens(len(lengths), 7, 0), torch.tensor(lengths))
    return cache


def test_it_doubles():
    cache, capacities = multihead.KVCache(1, G, D, DV), set()
    for _ in range(100):
        cache.append(*tokens(1, 1, 0))
        capacities.add(cache.capacity)
    assert capacities == {1, 2, 4, 8, 16, 32, 64, 128}
    assert cache.nbytes == 128 * G * (D + DV) * 4
    cache.reserve(1000)
    assert cache.capacity == 1000 and len(cache) == 100
    cache.reserve(3)
    assert cache.capacity == 1000


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_share_nothing(copied):
    cache = filled()
    held = cache.clone()
    other = copied(cache)
    other.append(*tokens(3, 4, 1))
    assert other.lengths().tolist() == [9, 4, 7]
    assert cache.lengths().tolist() == [5, 0, 3] and cache.capacity == held.capacity
    assert torch.equal(cache.key()[0], held.key()[0])


def test_repr():
    assert repr(filled(max_length=9, dtype=torch.bfloat16)) == (
        "KVCache(batch_size=3, num_kv_heads=2, head_dim=4, value_dim=3, "
        "dtype=bfloat16, lengths=0–5, capacity=9, max_length=9, bytes=756)"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_length", [None, 9])
def test_files(tmp_path, dtype, max_length):
    cache = filled(max_length=max_length, dtype=dtype)
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    again = multihead.KVCache.load(path)
    assert again.max_length == max_length
    assert again.capacity == (max_length or 5)
    theirs = load_file(path)
    assert theirs["lengths"].tolist() == [5, 0, 3]
    for name, ours in (("key", again.key()), ("value", again.value())):
        assert ours.dtype == dtype and torch.equal(ours, theirs[name])
        # Beyond a length lies what was in memory; files do not tell it.
        assert not theirs[name][1].any() and not theirs[name][2, :, 3:].any()
        assert torch.equal(ours[0], getattr(cache, name)()[0])
    again.append(*(x.to(dtype) for x in tokens(3, 2, 1)))
    assert again.lengths().tolist() == [7, 2, 5]


def test_files_that_hold_no_cache(tmp_path):
    path = tmp_path / "cache.safetensors"
    key, value = torch.zeros(2, G, 4, D), torch.zeros(2, G, 4, DV)
    whole = {"key": key, "value": value, "lengths": torch.tensor([4, 1])}
    for change, text in (
        ({"key": None}, "KVCache.load: the file must have a tensor named key"),
        ({"lengths": torch.tensor([5, 1])}, "lengths must be between 0 and 4, got 5"),
        ({"lengths": torch.tensor([4, -1])}, "lengths must be between 0 and 4, got -1"),
        ({"lengths": torch.tensor([4])}, r"lengths must be int64 of the shape \(2,\)"),
        ({"key": key[:1].clone()}, "key and value must be"),
    ):
        content = {k: v for k, v in (whole | change).items() if v is not None}
        save_file(content, path)
        with pytest.raises(ValueError, match=text):
            multihead.KVCache.load(path)
    save_file(whole, path, {"max_length": "3"})
    with pytest.raises(ValueError, match="max_length must be at least .* 4, got 3"):
        multihead.KVCache.load(path)


def huge_pages_of(x):
    """Whether the memory in the middle of x asks for huge pages."""
    middle, inside = x.data_ptr() + x.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(n, 16) for n in place.groups())
            inside = begin <= middle < end
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("the tensor lies nowhere")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="the kernel has no transparent huge pages",
)
def test_large_caches_ask_for_huge_pages_and_keep_what_they_hold():
    key, value = torch.randn(2, 1, 2, 20000, 64).unbind()
    for cache in (
        multihead.KVCache(1, 2, 64, capacity=15000),
        multihead.KVCache(1, 2, 64, max_length=30000),
    ):
        cache.append(key[:, :, :15000], value[:, :, :15000])
        assert huge_pages_of(cache.key()) and huge_pages_of(cache.value())
        cache.append(key[:, :, 15000:], value[:, :, 15000:])  # the first one grows
        cache.reorder([0, 0])
        for found, held in ((cache.key(), key), (cache.value(), value)):
            assert huge_pages_of(found)
            assert torch.equal(found, held.expand(2, -1, -1, -1))
    # Memory of no cache asks for none. It is mapped afresh: the allocator may hand a plain
    # tensor the pages that another cache has freed, and these still ask.
    fresh = mmap.mmap(-1, 20_000_000)
    assert not huge_pages_of(torch.frombuffer(fresh, dtype=torch.uint8))


def test_appending_converts():
    cache = filled(dtype=torch.bfloat16)
    assert_equal(cache.key()[0], tokens(3, 7, 0)[0][0, :, :5].bfloat16())


def test_steps_compile_once():
    """Room for all that comes: no graph breaks, and no length is compiled in."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def step(cache, query, key, value):
        cache.append(key, value)
        return attention(
            query,
            cache.key(),
            cache.value(),
            is_causal=True,
            causal_alignment="bottom_right",
            key_lengths=cache.lengths(),
            enable_gqa=True,
        )

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    caches = [multihead.KVCache(2, G, D, DV, max_length=16) for _ in range(2)]
    for seed in range(16):
        new = (torch.randn(2, 2 * G, 1, D), *tokens(2, 1, seed))
        assert torch.equal(compiled(caches[0], *new), step(caches[1], *new))
    assert len(graphs) == 1
    with pytest.raises(ValueError, match="at most max_length tokens, 16"):
        compiled(caches[0], *new)
    assert caches[0].lengths().tolist() == [16, 16]


# name: (what is called, its error, fragment of the message)
KEY, VALUE = tokens(3, 2, 1)
BAD = {
    "no rows": (
        lambda c: multihead.KVCache(0, G, D),
        ValueError,
        "batch_size .* got 0",
    ),
    "no heads": (
        lambda c: multihead.KVCache(1, 0, D),
        ValueError,
        "num_kv_heads must be at least 1, got 0",
    ),
    "no width": (
        lambda c: multihead.KVCache(1, G, 0),
        ValueError,
        "head_dim must be at least 1, got 0",
    ),
    "no width of values": (
        lambda c: multihead.KVCache(1, G, D, 0),
        ValueError,
        "value_dim must be at least 1, got 0",
    ),
    "less than nothing": (
        lambda c: multihead.KVCache(1, G, D, capacity=-1),
        ValueError,
        "capacity must be at least 0, got -1",
    ),
    "no length": (
        lambda c: multihead.KVCache(1, G, D, max_length=0),
        ValueError,
        "max_length must be at least 1, got 0",
    ),
    "more than the most": (
        lambda c: multihead.KVCache(1, G, D, capacity=5, max_length=4),
        ValueError,
        "capacity must be at most max_length, 4, got 5",
    ),
    "integers": (
        lambda c: multihead.KVCache(1, G, D, dtype=torch.int16),
        ValueError,
        "dtype must be float32, float64, bfloat16, float16 or int8, got Short",
    ),
    "a size that is none": (
        lambda c: multihead.KVCache("2", G, D),
        TypeError,
        "KVCache: batch_size must be an int, got '2'",
    ),
    "another batch": (
        lambda c: c.append(KEY[:2], VALUE[:2]),
        RuntimeError,
        r"append: key must have the shape .* \(3, 2, any, 4\), got \(2, 2, 2, 4\)",
    ),
    "another width": (
        lambda c: c.append(KEY, KEY),
        RuntimeError,
        r"append: value must have .* \(3, 2, 2, 3\), got \(3, 2, 2, 4\)",
    ),
    "fewer values": (
        lambda c: c.append(KEY, VALUE[:, :, :1]),
        RuntimeError,
        r"append: value must have .* got \(3, 2, 1, 3\)",
    ),
    "keys of integers": (
        lambda c: c.append(KEY.long(), VALUE),
        RuntimeError,
        "append: key must be floating point, got Long",
    ),
    "gradients": (
        lambda c: c.append(KEY, VALUE.clone().requires_grad_()),
        RuntimeError,
        "append: value must not require gradients",
    ),
    "no tensor": (
        lambda c: c.append(KEY, 3),
        TypeError,
        "KVCache.append: value must be a tensor, got 3",
    ),
    "too many": (
        lambda c: c.append(KEY.repeat(1, 1, 3, 1), VALUE.repeat(1, 1, 3, 1)),
        ValueError,
        "key must leave at most max_length tokens, 9, in each row, got 6 new ones for "
        "the 5 of row 0",
    ),
    "counts of more": (
        lambda c: c.append(KEY, VALUE, torch.tensor([1, 3, 0])),
        ValueError,
        "counts must be between 0 and 2, got 3 in row 1",
    ),
    "counts of other rows": (
        lambda c: c.append(KEY, VALUE, torch.tensor([1, 3])),
        ValueError,
        r"counts must have the shape \(3,\), got \(2,\)",
    ),
    "counts of numbers": (
        lambda c: c.append(KEY, VALUE, torch.ones(3)),
        ValueError,
        "counts must be integers, got Float",
    ),
    "more room than may be": (
        lambda c: c.reserve(10),
        ValueError,
        "reserve: capacity must be at most max_length, 9, got 10",
    ),
    "tokens that are not there": (
        lambda c: c.truncate(4),
        ValueError,
        "truncate: lengths must be between 0 and 0, got 4 in row 1",
    ),
    "rows that are not there": (
        lambda c: c.reorder([0, 3]),
        ValueError,
        "reorder: indices must be between 0 and 2, got 3 in row 1",
    ),
    "no rows left": (
        lambda c: c.reorder(torch.empty(0, dtype=torch.long)),
        ValueError,
        r"reorder: indices must have the shape \(rows,\), got \(0,\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_change_nothing(name):
    act, error, text = BAD[name]
    cache = filled(max_length=9)
    before = cache.clone()
    with pytest.raises(error, match=text):
        act(cache)
    assert repr(cache) == repr(before)
    for row, length in enumerate(before.lengths().tolist()):
        assert torch.equal(cache.key()[row, :, :length], before.key()[row, :, :length])


def test_an_empty_cache_is_a_cache():
    cache = multihead.KVCache(1, 1, 8)
    assert len(cache) == 0 and (cache or None) is cache


def test_float8_is_refused():
    with pytest.raises(ValueError, match="dtype must be float32, .* got Float8_e4m3fn"):
        multihead.KVCache(1, 1, 8, dtype=torch.float8_e4m3fn)


def test_a_cache_of_inference_mode_stays_there():
    x = torch.zeros(1, 1, 2, 8)
    with torch.inference_mode():
        cache = multihead.KVCache(1, 1, 8, max_length=4)
        cache.append(x, x)
    expected = (
        "KVCache.append: a cache that was made in inference mode must be used there"
    )
    with torch.no_grad(), pytest.raises(ValueError, match=expected):
        cache.append(x, x)
    assert len(cache) == 2
    with torch.inference_mode():
        cache.append(x, x)
    assert len(cache) == 4


def test_reserve_refuses_less_than_nothing():
    with pytest.raises(ValueError, match="capacity must be at least 0, got -1"):
        multihead.KVCache(1, 1, 8).reserve(-1)
