# SPDX-License-Identifier: MIT
"""Attention over n processes on paper: what each sends, and how long a call takes.

Of tests/python/distributed/test_cost_model.py and distributed.py, which count and measure.
"""

import collections
import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True)
class Call:
    """query (B, H, L, D), key and value (B, G, L, D), L tokens on n processes."""

    batch: int
    heads: int
    groups: int
    width: int
    dtype: torch.dtype
    lengths: tuple[int, ...]  # tokens of each process

    @property
    def processes(self) -> int:
        return len(self.lengths)

    @property
    def keys(self) -> int:
        """Elements of K and V for each token."""
        return self.batch * self.groups * 2 * self.width

    @property
    def queries(self) -> int:
        """Elements of Q for each token, and of O."""
        return self.batch * self.heads * self.width

    @property
    def wide(self) -> int:
        """Bytes of a number in which sums are kept: float32, or float64 for float64."""
        return max(4, self.dtype.itemsize)


def ring_bytes(call: Call, rank: int) -> tuple[int, int]:
    """What a process sends forward and backward.

    Keys and values go on n - 1 times; backward again, and their gradients n times, the
    last time home.
    """
    n = call.processes
    passing = [call.lengths[(rank - step) % n] for step in range(n)]
    keys = sum(passing[:-1]) * call.keys * call.dtype.itemsize
    gradients = sum(passing) * call.keys * call.wide if n > 1 else 0
    return keys, keys + gradients


def ulysses_bytes(call: Call, rank: int) -> tuple[int, int]:
    """Each process keeps what is of its own tokens and its own heads: 1/n.

    Forward Q, K and V go to where their heads are, O and the logsumexp back to their
    tokens; backward the gradients of O and logsumexp there, those of Q, K and V back.
    """
    n = call.processes
    inputs = (call.queries + call.keys) * call.dtype.itemsize
    results = call.queries * call.dtype.itemsize + call.batch * call.heads * call.wide
    own = call.lengths[rank] * (n - 1)
    others = sum(call.lengths) - call.lengths[rank]
    return (
        (own * inputs + others * results) // n,
        (own * results + others * inputs) // n,
    )


BYTES = {"ring": ring_bytes, "ulysses": ulysses_bytes}


@dataclasses.dataclass(frozen=True)
class Link:
    """What a process sends by: both ways at once, one message after the other."""

    bytes_per_second: float
    latency: float  # seconds until a message begins to arrive

    def time(self, size: float) -> float:
        return self.latency + size / self.bytes_per_second


NO_LINK = Link(math.inf, 0.0)


def seconds(method: str, call: Call, compute: tuple[float, float], link: Link) -> float:
    """A call forward and backward, where all processes have as many tokens.

    compute: seconds that a process computes, forward and backward.
    """
    n = call.processes
    forward, backward = compute
    if n == 1:
        return forward + backward
    # Two rounds of words forward, and one message for each of the others in each.
    agreement = 2 * (n - 1) * link.latency
    if method == "ulysses":
        exchanges = sum(BYTES[method](call, 0)) / link.bytes_per_second
        return forward + backward + agreement + 4 * link.latency + exchanges
    # A step's keys come while the step before is computed, and its gradients go while
    # the step after is: only the last gradients have nothing to hide behind.
    keys = ring_bytes(call, 0)[0] / (n - 1)
    gradients = keys * call.wide / call.dtype.itemsize
    steps = [
        max(forward / n, link.time(keys)),
        max(backward / n, link.time(keys) + link.time(gradients)),
    ]
    return (
        agreement
        + (n - 1) * sum(steps)
        + (forward + backward) / n
        + link.time(gradients)
    )


def tokens_that_hide_the_ring(
    call: Call, flops: float, link: Link, is_causal: bool
) -> float:
    """Tokens on each process from which computing takes as long as sending.

    flops: multiplications and additions per second of a process.
    """
    # Of a step, for m tokens: forward 4·m²·H·D, and half of it where the future is
    # hidden, against m·(K + V) elements. Backward computes 2.5 times as much and sends
    # 1 + wide / itemsize times as much.
    pairs = 0.5 if is_causal else 1.0
    work = 4 * pairs * call.batch * call.heads * call.width / flops
    size = call.keys * call.dtype.itemsize / link.bytes_per_second
    forward = size / work
    backward = size * (1 + call.wide / call.dtype.itemsize) / (2.5 * work)
    return max(forward, backward)


# Seconds computed before it; what: send, sent, receive, gather, exchange or end; bytes;
# and the tag of a message.
Event = tuple[float, str, int, int]


def replay(traces: list[list[Event]], link: Link) -> float:
    """Seconds until all processes have done what is recorded, each on its own core.

    traces: of each process; what it sends, the next one receives.
    """
    pending = [collections.deque(trace) for trace in traces]
    clocks = [0.0] * len(traces)
    gone: dict[tuple[int, int], float] = {}  # when a process's message has left it
    while any(pending):
        before = sum(map(len, pending))
        for rank, events in enumerate(pending):
            while events and _step(rank, events[0], clocks, gone, link):
                events.popleft()
        _collective(pending, clocks, link)
        if sum(map(len, pending)) == before:
            raise RuntimeError("replay: the processes wait for each other")
    return max(clocks)


def _step(
    rank: int,
    event: Event,
    clocks: list[float],
    gone: dict[tuple[int, int], float],
    link: Link,
) -> bool:
    """Whether the process gets past an event that is not a collective."""
    computed, what, size, tag = event
    now, sender = clocks[rank] + computed, (rank - 1) % len(clocks)
    if what == "send":
        before = [end for (process, _), end in gone.items() if process == rank]
        gone[rank, tag] = max([now, *before]) + size / link.bytes_per_second
    elif what == "receive":
        if (sender, tag) not in gone:
            return False
        now = max(now, gone[sender, tag] + link.latency)
    elif what == "sent":
        now = max(now, gone[rank, tag])
    elif what != "end":
        return False
    clocks[rank] = now
    return True


def _collective(
    pending: list[collections.deque[Event]], clocks: list[float], link: Link
) -> None:
    """Ends one that all processes have come to."""
    if not all(events and events[0][1] in ("gather", "exchange") for events in pending):
        return
    first = [events.popleft() for events in pending]
    begin = max(clock + event[0] for clock, event in zip(clocks, first, strict=True))
    size = max(event[2] for event in first)
    rounds = len(pending) - 1 if first[0][1] == "gather" else 1
    end = begin + rounds * link.latency + size / link.bytes_per_second
    clocks[:] = [end] * len(clocks)
