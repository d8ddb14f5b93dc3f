# SPDX-License-Identifier: MIT
"""benchmarks/cost_model.py says what is sent, to the byte; distributed.py measures it."""

import argparse
import math
import pathlib
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run

from multihead.distributed import ring_attention, ulysses_attention

BENCHMARKS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks"


def benchmarks():
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    import cost_model
    import distributed

    return cost_model, distributed


def sent(attend, call, order):
    """Bytes that this process has given to the operating system, forward, backward."""
    _, script = benchmarks()
    own = call.lengths[dist.get_rank()]
    shapes = [(call.heads, own)] + 2 * [(call.groups, own)]
    given = [
        torch.randn(call.batch, *shape, call.width).to(call.dtype).requires_grad_()
        for shape in shapes
    ]
    before = script.written()
    out = attend(*given, is_causal=True, enable_gqa=True, order=order)
    between = script.written()
    out.backward(torch.ones_like(out))
    return between - before, script.written() - between


LENGTHS = {
    "contiguous": {2: ((5, 9), (40, 8), (0, 7)), 4: ((3, 5, 1, 8), (40, 1, 60, 7))},
    "head_tail": {2: ((6, 6), (40, 40)), 4: ((4, 4, 4, 4), (40, 40, 40, 40))},
}


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/io").exists(),
    reason="what a process has sent is counted by Linux",
)
@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", LENGTHS)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_bytes_sent_are_those_of_the_formula(rank, world, dtype, order, method):
    """To the byte, but for words and headers, which do not depend on lengths."""
    model, _ = benchmarks()
    attend = ring_attention if method == "ring" else ulysses_attention
    rests = set()
    for lengths in LENGTHS[order][world]:
        call = model.Call(2, 8, 4, 16, dtype, lengths)
        counted = sent(attend, call, order)
        expected = model.BYTES[method](call, rank)
        assert all(expected) or 0 in lengths
        rests.add(tuple(x - y for x, y in zip(counted, expected, strict=True)))
    [(forward, backward)] = rests
    # Some 60 words for each of the others, and 144 bytes of gloo with each message.
    assert 0 < forward < 1500 * (world - 1)
    assert 0 < backward <= 144 * 2 * world


def test_formulas_by_hand():
    """Of two processes with 10 tokens of 4 elements of Q, 2 · 2 of K and V in float32."""
    model, _ = benchmarks()
    call = model.Call(1, 2, 1, 2, torch.float32, (10, 10))
    assert model.ring_bytes(call, 0) == (10 * 4 * 4, 10 * 4 * 4 + 2 * 10 * 4 * 4)
    half = 10 * (4 + 4 + 4 + 2) * 4 // 2  # Q, K and V, O, logsumexp
    assert model.ulysses_bytes(call, 0) == (half, half)
    wide = model.Call(1, 2, 1, 2, torch.bfloat16, (10, 10))
    assert model.ring_bytes(wide, 0) == (10 * 4 * 2, 10 * 4 * 2 + 2 * 10 * 4 * 4)
    alone = model.Call(1, 2, 1, 2, torch.float32, (10,))
    assert model.ring_bytes(alone, 0) == model.ulysses_bytes(alone, 0) == (0, 0)


def ring_trace(steps, compute, size):
    """What Recorder writes down of a forward pass in equal steps."""
    events = [(0.0, "gather", 0, 0)] * 2
    for step in range(steps - 1):
        events += [(0.0, "send", size, step)]
        events += [(compute, "receive", 0, step), (0.0, "sent", 0, step)]
    return [*events, (compute, "end", 0, 0)]


def test_a_replay_hides_what_can_be_hidden():
    """Three processes compute 1 s in each of three steps, and send 2 bytes in each."""
    model, _ = benchmarks()
    traces = [ring_trace(3, 1.0, 2)] * 3
    for rate, expected in ((math.inf, 3.0), (4.0, 3.0), (2.0, 3.0), (1.0, 5.0)):
        assert model.replay(traces, model.Link(rate, 0.0)) == expected
    # Words go round twice, by two messages after each other, and latency does not hide.
    assert model.replay(traces, model.Link(math.inf, 0.25)) == 3.0 + 4 * 0.25
    # Who waits for one message does not wait for the next one, which leaves after it.
    events = [(0.0, "send", 2, 0), (0.0, "send", 2, 1), (0.0, "receive", 0, 0)]
    events += [(0.0, "sent", 0, 0), (1.0, "end", 0, 0)]
    assert model.replay([events] * 2, model.Link(1.0, 0.0)) == 3.0
    events.insert(4, (0.0, "receive", 0, 1))
    assert model.replay([events] * 2, model.Link(1.0, 0.0)) == 5.0
    slow = [ring_trace(3, 1.0, 2), ring_trace(3, 2.0, 2), ring_trace(3, 1.0, 2)]
    assert model.replay(slow, model.NO_LINK) == 6.0
    exchange = [[(1.0, "exchange", 6, 0), (2.0, "end", 0, 0)]] * 2
    assert model.replay(exchange, model.Link(2.0, 0.5)) == 1.0 + 0.5 + 3.0 + 2.0
    with pytest.raises(RuntimeError, match="wait for each other"):
        model.replay([[(0.0, "receive", 0, 0)]] * 2, model.NO_LINK)


def test_the_formula_of_time_by_hand():
    model, _ = benchmarks()
    call = model.Call(1, 2, 1, 2, torch.float32, (10, 10))  # messages of 160 bytes
    compute = (4.0, 10.0)
    assert model.seconds("ring", call, compute, model.NO_LINK) == 14.0
    # Forward hides 1.6 s behind 2; backward 3.2 s behind 5, and the last 1.6 s not.
    assert model.seconds("ring", call, compute, model.Link(100.0, 0.0)) == 14.0 + 1.6
    # 16 s behind 2, 32 behind 5, and 16.
    slow = model.seconds("ring", call, compute, model.Link(10.0, 0.0))
    assert slow == 16.0 + 2.0 + 32.0 + 5.0 + 16.0
    ulysses = model.seconds("ulysses", call, compute, model.Link(100.0, 0.0))
    assert ulysses == 14.0 + 2 * 10 * 14 * 4 / 2 / 100
    alone = model.Call(1, 2, 1, 2, torch.float32, (10,))
    assert model.seconds("ring", alone, compute, model.Link(1.0, 1.0)) == 14.0


def test_tokens_that_hide_the_ring():
    """From there on, and not before, the formula has the last message alone."""
    model, _ = benchmarks()
    link = model.Link(1e9, 0.0)
    for dtype in (torch.float32, torch.bfloat16):
        for groups in (2, 8):
            call = model.Call(1, 8, groups, 64, dtype, (1, 1))
            tokens = model.tokens_that_hide_the_ring(call, 1e11, link, True)
            for length, hidden in ((tokens * 1.01, True), (tokens * 0.99, False)):
                m = round(length)
                call = model.Call(1, 8, groups, 64, dtype, (m, m))
                forward = 2 * m * m * 4 * 8 * 64 / 2 / 1e11  # two steps
                got = model.seconds("ring", call, (forward, 2.5 * forward), link)
                last = link.time(m * call.keys * 4)
                bare = 3.5 * forward + last
                assert (got < bare * (1 + 1e-9)) == hidden


TOKENS = 128


def measured(rank, world, folder):
    """All that the script measures, on a short sequence."""
    _, script = benchmarks()
    turn = pathlib.Path(folder, f"turn of {world}")
    recorder = script.Recorder(dist.group.WORLD, f"recorder of {world}", turn)
    found = {case: script.measure(case, TOKENS, 2, recorder) for case in script.CASES}
    return found | {"step": script.measure_step()}


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/io").exists(),
    reason="what a process has sent is counted by Linux",
)
def test_the_script_measures_what_the_formulas_say(tmp_path):
    model, script = benchmarks()
    found = {n: run(measured, n, folder=str(tmp_path)) for n in script.WORLDS}
    for world in (2, 4):
        for case, (method, *_) in script.CASES.items():
            call = script.call_of(case, TOKENS, world)
            for rank, process in enumerate(found[world]):
                events = process[case]["events"]
                sizes = [
                    sum(size for _, what, size, _ in trace if what != "gather")
                    for trace in (events["forward"], events["backward"])
                ]
                assert tuple(sizes) == model.BYTES[method](call, rank)
                assert process[case]["seconds_here"] > 0
        step = found[world][0]["step"]
        rest = step["sent"] - step["attention"] - step["gradients"]
        assert 0 < rest < 40 * 2**10 * (world - 1)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in script.page(
            found, argparse.Namespace(tokens=TOKENS, rounds=2)
        ).splitlines()
        if line.startswith("| ")
    ]
    assert not any(cell in ("nan", "inf", "") for row in rows for cell in row)
    sending = [row for row in rows if row[0] == "ring, float32" and len(row) == 7]
    assert sending[0][2] == sending[0][3] == "0.25"  # 64 tokens of 8 · 128 elements
    assert sending[0][4] == sending[0][5] == "0.75"
    assert sending[1][2:4] == ["0.38", "0.38"]
    efficiencies = [row for row in rows if "(" in row[2]]
    assert len(efficiencies) == 2 * len(script.CASES)
    for row in efficiencies:
        none, *others = (float(cell.split()[0]) for cell in row[2:6])
        assert 0 < none < 1.5 and sorted([none, *others], reverse=True) == [
            none,
            *others,
        ]
