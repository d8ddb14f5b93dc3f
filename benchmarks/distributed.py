#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What attention on several processes sends, hides and costs, beside the formulas:

    ./run python benchmarks/distributed.py > record.md

Runs itself under torchrun on 1, 2 and 4 processes of one thread each, over gloo, and
prints a page of Markdown:

* **Sent**: by the operating system's count of the bytes that a process has written,
  which is Linux's; beside cost_model.py.
* **Computed**: the processor time of each process between two words with the others.
  One process computes at a time, whatever the number of cores.
* **On links**: these times put together again as if each process had a core of its own
  and a link of a given speed. What has been computed is measured, the link is not.
* **Here**: the time of all processes at once on this machine, whose cores they share.
"""

import argparse
import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from cost_model import (
    BYTES,
    NO_LINK,
    Call,
    Event,
    Link,
    replay,
    seconds,
    tokens_that_hide_the_ring,
)

import multihead
from multihead.distributed import ring_attention, ulysses_attention

ATTENTION = {"ring": ring_attention, "ulysses": ulysses_attention}
WORLDS = (1, 2, 4)
GIGABIT = 1e9 / 8
LINKS = {
    "none": NO_LINK,
    "100 Gbit/s": Link(100 * GIGABIT, 10e-6),
    "10 Gbit/s": Link(10 * GIGABIT, 30e-6),
    "1 Gbit/s": Link(GIGABIT, 100e-6),
}
HEADS, WIDTH = 8, 64
TO_HIDE = Link(10 * GIGABIT, 0.0)
# name: (method, heads, key/value heads, dtype)
CASES = {
    "ring, float32": ("ring", HEADS, HEADS, torch.float32),
    "ring, float32, 2 key/value heads": ("ring", HEADS, 2, torch.float32),
    "ring, bfloat16": ("ring", HEADS, HEADS, torch.bfloat16),
    "Ulysses, float32": ("ulysses", HEADS, HEADS, torch.float32),
    "Ulysses, bfloat16": ("ulysses", HEADS, HEADS, torch.bfloat16),
}
# Tokens, processes, cores of each, that are extrapolated to.
SIZES = ((2**17, 8, 1), (2**17, 8, 32), (2**20, 8, 32), (2**20, 64, 32))


# --- Counting and recording -----------------------------------------------------------


def written() -> int:
    """Bytes that this process has given to the operating system."""
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


class _Waited(dist.Work):
    """A message on its way; who waits for it lets another process compute."""

    def __init__(self, recorder: "Recorder", work: dist.Work, event: tuple) -> None:
        super().__init__()
        self.recorder, self.work, self.event = recorder, work, event

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self.recorder.computed(*self.event)
        with self.recorder.others_turn():
            self.work.wait()
        self.recorder.resume()
        return True


class Recorder(dist.ProcessGroup):
    """A group that writes down what goes through it: (seconds computed before, what,
    bytes, tag), and lets one of its processes compute at a time.

    turn: a file that all of them lock.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, turn: pathlib.Path) -> None:
        super().__init__(group.rank(), group.size())
        self.group, self.name = group, name
        self.turn = turn.open("w")
        self.events: list[Event] = []
        torch._C._distributed_c10d._register_process_group(name, self)

    @contextlib.contextmanager
    def recording(self):
        """Within it the process computes when it is its turn."""
        self.events = []
        dist.barrier(self.group)
        fcntl.flock(self.turn, fcntl.LOCK_EX)
        self.resume()
        yield
        self.computed("end")
        fcntl.flock(self.turn, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def others_turn(self):
        fcntl.flock(self.turn, fcntl.LOCK_UN)
        yield
        fcntl.flock(self.turn, fcntl.LOCK_EX)

    def computed(self, what: str, size: int = 0, tag: int = 0) -> None:
        self.events.append((time.thread_time() - self.since, what, size, tag))

    def resume(self) -> None:
        self.since = time.thread_time()

    def getGroupName(self) -> str:
        return self.name

    def allgather(self, outputs, inputs, opts=None):
        size = (self.size() - 1) * inputs[0].nbytes
        work = self.group.allgather(outputs, inputs)
        return _Waited(self, work, ("gather", size))

    def alltoall_base(self, received, sent, received_sizes, sent_sizes, opts=None):
        size = sent.nbytes - sent_sizes[self.rank()]
        work = self.group.alltoall_base(received, sent, received_sizes, sent_sizes)
        return _Waited(self, work, ("exchange", size))

    def send(self, tensors, to, tag):
        self.computed("send", tensors[0].nbytes, tag)
        work = self.group.send(tensors, to, tag)
        self.resume()
        return _Waited(self, work, ("sent", 0, tag))

    def recv(self, tensors, source, tag):
        return _Waited(self, self.group.recv(tensors, source, tag), ("receive", 0, tag))


def fastest(rounds: list[list[tuple]]) -> list[tuple]:
    """Of each time the least; the rounds are alike but for times."""
    return [
        (min(each[0] for each in events), *events[0][1:])
        for events in zip(*rounds, strict=True)
    ]


# --- A process ------------------------------------------------------------------------


class Attention:
    """A call on this process's part of the sequence."""

    def __init__(self, name: str, tokens: int) -> None:
        self.method, heads, groups, dtype = CASES[name]
        self.world = dist.get_world_size()
        each = tokens // self.world
        torch.manual_seed(dist.get_rank())
        q, k, v, self.dout = (
            torch.randn(1, count, each, WIDTH).to(dtype)
            for count in (heads, groups, groups, heads)
        )
        self.given = [x.requires_grad_() for x in (q, k, v)]
        self.call = Call(1, heads, groups, WIDTH, dtype, (each,) * self.world)

    def forward(self, group: dist.ProcessGroup | None) -> torch.Tensor:
        rules = dict(is_causal=True, enable_gqa=True)
        if self.world == 1:
            return multihead.scaled_dot_product_attention(*self.given, **rules)
        attend = ATTENTION[self.method]
        return attend(*self.given, **rules, group=group, order="head_tail")

    def backward(self, out: torch.Tensor) -> None:
        torch.autograd.grad(out, self.given, self.dout)


def measure(name: str, tokens: int, rounds: int, recorder: Recorder) -> dict:
    """Of this process: bytes sent, events by rounds, and seconds of all at once."""
    attention = Attention(name, tokens)
    attention.backward(attention.forward(None))  # warm
    counts = [written()]
    out = attention.forward(None)
    counts.append(written())
    attention.backward(out)
    counts.append(written())
    traces: dict[str, list] = {"forward": [], "backward": []}
    seconds_here = []
    for _ in range(rounds):
        with recorder.recording():
            out = attention.forward(recorder)
        traces["forward"].append(recorder.events)
        with recorder.recording():
            attention.backward(out)
        traces["backward"].append(recorder.events)
        dist.barrier()
        start = time.perf_counter()
        attention.backward(attention.forward(None))
        dist.barrier()
        seconds_here.append(time.perf_counter() - start)
    return {
        "sent": [counts[1] - counts[0], counts[2] - counts[1]],
        "events": {way: fastest(each) for way, each in traces.items()},
        "seconds_here": min(seconds_here),
    }


def measure_step() -> dict:
    """Bytes that a training step of examples/long_context.py sends, and its formula's."""
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
    import long_context

    training = long_context.Training(4096)
    training.step(0)
    before = written()
    training.step(1)
    sent = written() - before
    n = dist.get_world_size()
    heads, width = long_context.HEADS, long_context.WIDTH // long_context.HEADS
    call = Call(1, heads, heads, width, torch.float32, (4096 // n,) * n)
    parameters = sum(x.numel() for x in training.model.parameters())
    attention = long_context.BLOCKS * sum(BYTES["ring"](call, dist.get_rank()))
    return {
        "sent": sent,
        "attention": attention,
        "gradients": 2 * (n - 1) * 4 * parameters // n,
    }


def work(options: argparse.Namespace) -> None:
    """What a process of torchrun does; the first one writes what all have found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    turn = options.record.with_suffix(".turn")
    recorder = Recorder(dist.group.WORLD, "recorder", turn)
    found = {
        name: measure(name, options.tokens, options.rounds, recorder) for name in CASES
    }
    found["step"] = measure_step()
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    if dist.get_rank() == 0:
        options.record.write_text(json.dumps(everybody))
    dist.destroy_process_group()


# --- The page -------------------------------------------------------------------------


def launch(world: int, options: argparse.Namespace) -> list[dict]:
    """What each of `world` processes has found."""
    print(f"{world} processes ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "record.json")
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            + ["--nproc-per-node", str(world), __file__, "--record", str(file)]
            + ["--tokens", str(options.tokens), "--rounds", str(options.rounds)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
        )
        return json.loads(file.read_text())


def call_of(name: str, tokens: int, world: int) -> Call:
    _, heads, groups, dtype = CASES[name]
    return Call(1, heads, groups, WIDTH, dtype, (tokens // world,) * world)


def compute_of(trace: list[tuple]) -> float:
    return sum(event[0] for event in trace)


def mebibytes(size: float) -> str:
    return f"{size / 2**20:.2f}"


def sent_rows(found: dict[int, list[dict]], tokens: int):
    yield "| call | processes | forward | formula | backward | formula | rest, KiB |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name in CASES:
        for world in WORLDS[1:]:
            call = call_of(name, tokens, world)
            expected = BYTES[CASES[name][0]](call, 0)
            sent = found[world][0][name]["sent"]
            rest = (sum(sent) - sum(expected)) / 1024
            pairs = zip(sent, expected, strict=True)
            cells = [mebibytes(size) for pair in pairs for size in pair]
            cells.append(f"{rest:.1f}")
            yield f"| {name} | {world} | {' | '.join(cells)} |"


def step_rows(found: dict[int, list[dict]]):
    yield "| processes | sent | attention, formula | gradients, formula | rest, KiB |"
    yield "|---:|---:|---:|---:|---:|"
    for world in WORLDS[1:]:
        step = found[world][0]["step"]
        rest = (step["sent"] - step["attention"] - step["gradients"]) / 1024
        cells = [mebibytes(step[x]) for x in ("sent", "attention", "gradients")]
        yield f"| {world} | {' | '.join(cells)} | {rest:.1f} |"


def times(found: dict[int, list[dict]], name: str, world: int) -> tuple:
    """(seconds on one process, traces forward, traces backward)."""
    [one] = found[1]
    alone = sum(compute_of(trace) for trace in one[name]["events"].values())
    traces = [
        [process[name]["events"][way] for process in found[world]]
        for way in ("forward", "backward")
    ]
    return alone, *traces


def compute_rows(found: dict[int, list[dict]]):
    yield "| call | processes | one process, s | largest share, s | all shares over one |"
    yield "|---|---:|---:|---:|---:|"
    for name in CASES:
        for world in WORLDS[1:]:
            alone, *both = times(found, name, world)
            shares = [sum(map(compute_of, each)) for each in zip(*both, strict=True)]
            yield (
                f"| {name} | {world} | {alone:.3f} | {max(shares):.3f} "
                f"| {sum(shares) / alone:.2f} |"
            )


def link_rows(found: dict[int, list[dict]], tokens: int):
    """Of each link: efficiency, hidden share of sending, and what the formula says."""
    names = list(LINKS)
    yield f"| call | processes | {' | '.join(names)} | hidden |"
    yield f"|---|---:|{'---:|' * (len(names) + 1)}"
    for name in CASES:
        for world in WORLDS[1:]:
            cells = []
            alone, *both = times(found, name, world)
            call = call_of(name, tokens, world)
            compute = tuple(max(map(compute_of, traces)) for traces in both)
            bare = sum(replay(traces, NO_LINK) for traces in both)
            for link in LINKS.values():
                got = sum(replay(traces, link) for traces in both)
                paper = seconds(CASES[name][0], call, compute, link)
                cells.append(
                    f"{alone / (world * got):.2f} ({alone / (world * paper):.2f})"
                )
            shown = sum(replay(traces, TO_HIDE) for traces in both) - bare
            sending = sum(BYTES[CASES[name][0]](call, 0)) / TO_HIDE.bytes_per_second
            cells.append(f"{round(1 - shown / sending, 2) + 0:.0%}")  # no -0 %
            yield f"| {name} | {world} | {' | '.join(cells)} |"


def here_rows(found: dict[int, list[dict]]):
    yield "| call | 1 process, s | 2, s | efficiency | 4, s | times one |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name in CASES:
        one, two, four = (found[n][0][name]["seconds_here"] for n in WORLDS)
        yield (
            f"| {name} | {one:.3f} | {two:.3f} | {one / (2 * two):.2f} | {four:.3f} "
            f"| {one / four:.2f} |"
        )


def extrapolated_rows(found: dict[int, list[dict]], tokens: int):
    """By the formula alone, from one process's rate."""
    yield "| call | tokens | processes | cores each | 100 Gbit/s | 10 Gbit/s | 1 Gbit/s |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    links = [LINKS[x] for x in ("100 Gbit/s", "10 Gbit/s", "1 Gbit/s")]
    [one] = found[1]
    for name in ("ring, bfloat16", "Ulysses, bfloat16"):
        ways = one[name]["events"].values()
        for length, world, cores in SIZES:
            if name.startswith("Ulysses") and HEADS % world:
                continue
            pairs = (length / tokens) ** 2
            compute = tuple(compute_of(x) * pairs / (world * cores) for x in ways)
            call = call_of(name, length, world)
            cells = [
                f"{sum(compute) / seconds(CASES[name][0], call, compute, x):.2f}"
                for x in links
            ]
            yield f"| {name} | {length} | {world} | {cores} | {' | '.join(cells)} |"


def hiding_rows(found: dict[int, list[dict]], tokens: int):
    yield "| call | cores each | Gflop/s | 100 Gbit/s | 10 Gbit/s | 1 Gbit/s |"
    yield "|---|---:|---:|---:|---:|---:|"
    [one] = found[1]
    for name in (x for x in CASES if x.startswith("ring")):
        call = call_of(name, tokens, 1)
        work = 3.5 * 4 * tokens**2 / 2 * call.queries
        rate = work / sum(map(compute_of, one[name]["events"].values()))
        for cores in (1, 32):
            cells = [
                f"{tokens_that_hide_the_ring(call, cores * rate, LINKS[x], True):.0f}"
                for x in ("100 Gbit/s", "10 Gbit/s", "1 Gbit/s")
            ]
            yield f"| {name} | {cores} | {cores * rate / 1e9:.0f} | {' | '.join(cells)} |"


def cpu() -> str:
    """As a record names it."""
    fields = {}
    for line in pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    family, model = fields.get("cpu family"), fields.get("model")
    return (
        f"{fields.get('model name', platform.processor())}, family {family}, model "
        f"{model}, {os.cpu_count()} virtual processors"
    )


def page(found: dict[int, list[dict]], options: argparse.Namespace) -> str:
    tokens, load = options.tokens, os.getloadavg()[2]
    commit = subprocess.run(
        ["git", "-C", pathlib.Path(__file__).parent, "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    parts = [
        "# Attention on several processes, " + datetime.date.today().isoformat(),
        f"{cpu()}; torch {torch.__version__}; multihead {multihead.__version__} at commit "
        f"{commit}. {tokens} tokens, causal, head_tail, 8 heads of width {WIDTH}, 8 "
        "key/value heads where not said otherwise, one thread each, gloo on one machine.",
        "```sh\n./run python benchmarks/distributed.py --tokens "
        f"{tokens} --rounds {options.rounds}\n```",
        PROSE["sent"],
        sent_rows(found, tokens),
        PROSE["step"],
        step_rows(found),
        PROSE["compute"],
        compute_rows(found),
        PROSE["links"],
        link_rows(found, tokens),
        PROSE["here"] + f" Its load, others' work included, was {load:.1f}.",
        here_rows(found),
        PROSE["extrapolated"],
        extrapolated_rows(found, tokens),
        PROSE["hiding"],
        hiding_rows(found, tokens),
    ]
    return "\n\n".join(x if isinstance(x, str) else "\n".join(x) for x in parts) + "\n"


PROSE = {
    "sent": """## Sent

MiB that the first process writes to its sockets, by the operating system's count, beside
cost_model.py. The rest is what the processes tell each other before a call, and 144 bytes
of gloo with each message.""",
    "step": """A training step of examples/long_context.py, 4096 bytes of text. Gradients of the
parameters are added up by gloo's all-reduce, which sends 2·(n - 1)/n of them.""",
    "compute": """## Computed

Processor time, forward and backward, while one process computes at a time; the least of
all rounds, piece by piece.""",
    "links": """## On links

Efficiency: the time of one process over n times that of n, each on a core of its own. In
brackets what the formula of cost_model.py says, from the measured shares of the work.
Latencies are 10, 30 and 100 µs. Hidden: the share of sending that takes no time of its own
at 10 Gbit/s.""",
    "here": """## Here

Wall time of forward and backward with all processes at once, which share the cores and
the memory of this machine; the least of all rounds.""",
    "extrapolated": """## Extrapolated

Efficiency by the formula, where nobody has measured it. Assumed: the rate of one core here
at any length, times the number of cores; that shares of the work lose nothing, of which "all
shares over one" above is the test; hosts that are equally fast; for each of them a link,
both ways at once, that gives its whole rate, whoever else sends.""",
    "hiding": """Tokens on each process from which the ring's sending is hidden but for the last message,
on the same assumptions.""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of the sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        work(options)
        return
    found = {world: launch(world, options) for world in WORLDS}
    print(page(found, options), end="")


if __name__ == "__main__":
    main()
