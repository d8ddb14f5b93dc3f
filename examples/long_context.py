# SPDX-License-Identifier: MIT
"""A language model on a sequence that lies in pieces on several processes.

    torchrun --nproc-per-node 2 examples/long_context.py
    python examples/long_context.py --compare 1 2 4 [--out PICTURE.svg]

A transformer of 0.5 million parameters learns to write this repository's pages, byte by
byte, from one sequence of 16384 bytes a step. Each of n processes has 1/n of the bytes:
embeddings, norms and perceptrons are computed where a byte is, attention goes round
(multihead.distributed.ring_attention), gradients of the parameters, which all have
alike, are added up. So the losses are those of one process, and what a step keeps for
its backward falls as 1/n.

--compare runs itself under torchrun for each number of processes, one thread each, and
says how far apart the losses are and what memory a step took: the most that PyTorch's
allocator gave out at once (as its profiler counts: exact, the same in each run; without
parameters, without the scratch of kernels) and by how much the process grew (resident:
all there is, rounded up by what the allocator keeps). Exits with 1 where a loss is
further than 1e-5 of itself from that of the first number.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from train import STYLE, chart, documents, label

from multihead.distributed import ring_attention

WIDTH, HEADS, BLOCKS = 128, 4, 2
MEBIBYTE = 2**20


def mine(x: Tensor) -> Tensor:
    """Of all tokens those of this process: a piece from the front and one from the back,
    which gives all processes the same work under a causal mask."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces = x.tensor_split(2 * size)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding: x (1, HEADS, L, D), each pair turned by its position (L)."""
    one, other = x.chunk(2, -1)
    angles = positions[:, None] * 1e4 ** -torch.linspace(0, 1, one.shape[-1])
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


class Block(nn.Module):
    """Attention, then a perceptron; each adds to what it reads, (1, L, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, 1)
        q, k = rotated(q, positions), rotated(k, positions)
        y = ring_attention(q, k, v, is_causal=True, order="head_tail")
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norm2(x))


class Transformer(nn.Module):
    """Bytes (1, L) at positions (L) → logits (1, L, 256) of the byte that follows each."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text: Tensor, positions: Tensor) -> Tensor:
        x = self.bytes(text)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)


class Training:
    """A model under way. Every process makes the same one, and has its part of the text."""

    def __init__(self, tokens: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = Transformer().to(dtype)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.tokens, self.pages = tokens, documents()
        self.positions = mine(torch.arange(tokens))

    def step(self, number: int) -> float:
        """Learns from the next `tokens` bytes; the loss of all of them."""
        first = number * self.tokens % (len(self.pages) - self.tokens)
        here = first + self.positions
        logits = self.model(self.pages[here][None], self.positions)
        loss = F.cross_entropy(logits[0], self.pages[here + 1], reduction="sum")
        self.optimiser.zero_grad()
        (loss / self.tokens).backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimiser.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        return total.item() / self.tokens


def peak(recorded: profile) -> int:
    """The most bytes that were allocated at once, above those at the beginning."""
    events = [x for x in recorded.profiler.kineto_results.events() if x.nbytes()]
    most = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def train(tokens: int, steps: int, dtype: torch.dtype = torch.float32) -> dict:
    """What this process has seen: the losses of all, its memory and its times."""
    training, losses, seconds = Training(tokens, dtype), [], []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(steps):
        start = time.perf_counter()
        losses.append(training.step(number))
        seconds.append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(f"{number + 1:4}  {losses[-1]:.7f}  {seconds[-1]:6.2f} s", flush=True)
    resident = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        training.step(steps)
    return {
        "processes": dist.get_world_size(),
        "losses": losses,
        "seconds": min(seconds),
        "allocated": peak(recorded),
        "resident": resident,
    }


def compare(numbers: list[int], options: argparse.Namespace) -> list[dict]:
    """What the first process of each number of them has seen."""
    records = []
    for processes in numbers:
        print(f"\n{processes} of torchrun's processes: step, loss, time", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "record.json")
            launch = ("-m", "torch.distributed.run", "--standalone")
            sizes = ("--tokens", str(options.tokens), "--steps", str(options.steps))
            subprocess.run(
                [sys.executable, *launch, "--nproc-per-node", str(processes), __file__]
                + [*sizes, "--record", str(file)],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                check=True,
            )
            records.append(json.loads(file.read_text()))
    return records


def distance(record: dict, first: dict) -> float:
    """How far apart the losses are at most, relative to themselves."""
    pairs = zip(record["losses"], first["losses"], strict=True)
    return max(abs(a - b) / b for a, b in pairs)


def table(records: list[dict]) -> str:
    first = records[0]
    lines = [
        "processes  last loss  distance  allocated MiB  of the first  resident MiB  s/step"
    ]
    for x in records:
        lines.append(
            f"{x['processes']:9}  {x['losses'][-1]:9.6f}  {distance(x, first):8.1e}"
            f"  {x['allocated'] / MEBIBYTE:13.1f}"
            f"  {x['allocated'] / first['allocated']:12.3f}"
            f"  {x['resident'] / MEBIBYTE:12.1f}  {x['seconds']:6.2f}"
        )
    return "\n".join(lines)


def picture(records: list[dict], subtitle: str) -> str:
    """What was found, as SVG."""
    top, most, width = 130, max(x["allocated"] for x in records), 300
    styles = dict(zip(("exact", "fused", "moved"), records, strict=False))
    losses = {style: x["losses"] for style, x in styles.items()}
    lowest, highest = (int(of(map(of, losses.values()))) for of in (min, max))
    names = [f"{x['processes']}" for x in records]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="820" height="340" '
        'viewBox="0 0 820 340" role="img">',
        "<title>examples/long_context.py</title>",
        STYLE,
        '<rect class="page" width="100%" height="100%"/>',
        label(24, 32, "One sequence on several processes", "title"),
        label(24, 52, subtitle, "dim"),
        label(50, 94, f"loss on {', '.join(names)} processes: one curve"),
        *chart(50, {float(n): f"{n}" for n in range(lowest, highest + 2)}, losses),
        label(
            410, 94, "MiB that a step keeps on each process (dots: 1/n of the first)"
        ),
    ]
    for n, x in enumerate(records):
        y, length = top + 50 * n, width * x["allocated"] / most
        ideal = width * records[0]["allocated"] * records[0]["processes"] / most
        ideal /= x["processes"]
        parts.append(f'<path class="fused" d="M430 {y}h{length:.1f}"')
        parts.append('style="stroke-width: 16"/>')
        parts.append(f'<path class="allowed" d="M{430 + ideal:.1f} {y - 14}v28"/>')
        parts.append(label(420, y + 4, f"{x['processes']}", "dim end"))
        parts.append(label(442 + length, y + 4, f"{x['allocated'] / MEBIBYTE:.1f}"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384, help="of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compare", type=int, nargs="+", metavar="PROCESSES")
    parser.add_argument("--out", type=pathlib.Path, help="where a picture (SVG) goes")
    parser.add_argument("--record", type=pathlib.Path, help="where figures (JSON) go")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if not options.compare:
        dist.init_process_group("gloo")  # where torchrun has said
        record = train(options.tokens, options.steps)
        if options.record and dist.get_rank() == 0:
            options.record.write_text(json.dumps(record))
        dist.destroy_process_group()
        return 0
    records = compare(options.compare, options)
    print(f"\n{table(records)}")
    if options.out:
        subtitle = (
            f"{options.tokens} bytes a step, {BLOCKS} blocks of width {WIDTH}, float32, "
            f"PyTorch {torch.__version__}, one thread each"
        )
        options.out.write_text(picture(records, subtitle))
    return int(any(distance(x, records[0]) > 1e-5 for x in records))


if __name__ == "__main__":
    sys.exit(main())
