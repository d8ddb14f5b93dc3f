# SPDX-License-Identifier: MIT
"""A small language model, trained with PyTorch's attention and with the fused kernels.

    python examples/train.py [--steps N] [--dropout P] [--out PICTURE.svg]

A transformer of 0.9 million parameters learns to write this repository's pages, byte by
byte, three times from the same seed and on the same batches:

    exact   backend("exact"): the bits of torch.nn.MultiheadAttention
    fused   backend("fused"): the kernels of this library, forward and backward
    moved   as exact, but every weight begins one unit in the last place (ulp) away

The third is the yardstick: what rounding once, before the first step, does to the losses.
The kernels round otherwise than PyTorch in each of N steps; if each step moves the losses
by no more than that, all together do by no more than N times that. Exits with 1 where the
loss of `fused` is further from that of `exact`. Over some hundred steps such distances
begin to grow by themselves, the yardstick's too: after 300 both are some 1e-7.

Dropout leaves no such comparison, as each backend draws its own weights to drop; there,
some more steps show what a step costs, since PyTorch has no fused attention with dropout.
A minute or two on two idle cores.
"""

import argparse
import itertools
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multihead

ROOT = pathlib.Path(__file__).resolve().parents[1]
LENGTH, BATCH, WIDTH, HEADS, BLOCKS = 256, 4, 128, 4, 4


class Block(nn.Module):
    """Attention, then a perceptron; each adds to what it reads, (B, L, WIDTH)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = multihead.MultiheadAttention(
            WIDTH, HEADS, dropout=dropout, batch_first=True
        )
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        y = self.norm1(x)
        y, _ = self.attention(
            y, y, y, attn_mask=future, is_causal=True, need_weights=False
        )
        x = x + y
        return x + self.perceptron(self.norm2(x))


class Transformer(nn.Module):
    """Bytes (B, L) → logits (B, L, 256) of the byte that follows each."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)  # True = blocked
        self.register_buffer("future", future, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight
        for block in self.blocks:
            x = block(x, self.future)
        return self.head(x)


class Training:
    """A model under way: its loss and its milliseconds, of each step."""

    def __init__(self, backend: str, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        self.backend = backend
        self.model = Transformer(dropout)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.times: list[float] = []

    def move_weights(self) -> None:
        """Each by one ulp, up or down."""
        for weight in self.model.parameters():
            up = torch.rand_like(weight) < 0.5
            end = torch.where(up, torch.inf, -torch.inf)
            weight.data = torch.nextafter(weight.data, end)

    def step(self, text: Tensor) -> None:
        """Learns from bytes (B, LENGTH + 1)."""
        start = time.perf_counter()
        with multihead.backend(self.backend):
            # In float64, or the loss's own rounding would hide what is compared.
            logits = self.model(text[:, :-1]).double()
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
        self.times.append(1e3 * (time.perf_counter() - start))
        self.losses.append(loss.item())
        if not math.isfinite(self.losses[-1]):
            step = len(self.losses)
            sys.exit(f"The loss of {self.backend} is {self.losses[-1]} in step {step}.")


def documents() -> Tensor:
    """The bytes of this repository's pages."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    text = b"\n".join(page.read_bytes() for page in pages)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches() -> Iterator[Tensor]:
    """Pieces of the documents, (BATCH, LENGTH + 1), always the same ones."""
    text, generator = documents(), torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        yield text[starts + torch.arange(LENGTH + 1)]


def train(trainings: list[Training], texts: Iterable[Tensor]) -> None:
    """A step of each by turns, so that a noisy machine is fair to all."""
    for text in texts:
        for training in trainings:
            training.step(text)


def distances(one: Training, other: Training) -> list[float]:
    """How far apart the losses have been at most, step by step."""
    pairs = zip(one.losses, other.losses, strict=True)
    return list(itertools.accumulate((abs(a - b) for a, b in pairs), max))


def medians(trainings: list[Training], steps: slice = slice(None)) -> list[float]:
    """Milliseconds of each one's steps."""
    return [statistics.median(training.times[steps]) for training in trainings]


def show(exact: Training, fused: Training, moved: Training, steps: int) -> None:
    """Losses, distances so far, and medians of the last `steps` steps, in a line."""
    far = [distances(exact, other)[-1] for other in (fused, moved)]
    times = medians([exact, fused], slice(-steps, None))
    print(
        f"{len(exact.losses):4}  {exact.losses[-1]:8.5f}  {fused.losses[-1]:8.5f}"
        f"  {far[0]:8.1e}  {far[1]:8.1e}"
        f"     {times[0]:8.1f}  {times[1]:5.1f}  {times[0] / times[1]:5.2f}",
        flush=True,
    )


STYLE = """<style>
  .page { fill: #ffffff } text { fill: #1f2328; font: 12px system-ui, sans-serif }
  .title { font-size: 18px; font-weight: 600 } .dim { fill: #656d76 }
  .end { text-anchor: end } .middle { text-anchor: middle } path { fill: none }
  .grid { stroke: #d0d7de } .exact { stroke: #afb8c1; stroke-width: 5 }
  .fused { stroke: #1f6feb; stroke-width: 1.5 } .moved { stroke: #bf8700 }
  .allowed { stroke: #bf8700; stroke-dasharray: 2 3 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #e6edf3 } .dim { fill: #8d96a0 }
    .grid { stroke: #30363d } .exact { stroke: #6e7681 } .fused { stroke: #4493f8 }
  }
</style>"""
TOP, HEIGHT, CHART, BARS = 110, 190, 290, 150


def label(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{style}">{text}</text>'


def chart(left: int, ticks: dict[float, str], curves: dict[str, list]) -> list[str]:
    """Curves {style: values} over steps, between the least and the largest tick."""
    low, high = min(ticks), max(ticks)
    steps = len(next(iter(curves.values())))

    def x(step: float) -> float:
        return left + CHART * step / steps

    def y(value: float) -> float:
        return TOP + HEIGHT * (high - min(max(value, low), high)) / (high - low)

    parts = []
    for value, text in ticks.items():
        parts.append(f'<path class="grid" d="M{left} {y(value):.1f}h{CHART}"/>')
        parts.append(label(left - 6, y(value) + 4, text, "dim end"))
    for step in (0, steps // 2, steps):
        parts.append(label(x(step), TOP + HEIGHT + 18, f"{step}", "dim middle"))
    for style, values in curves.items():
        points = (f"{x(n):.1f} {y(value):.1f}" for n, value in enumerate(values, 1))
        parts.append(f'<path class="{style}" d="M{" ".join(points)}"/>')
    return parts


def bars(left: int, times: dict[str, list[float]]) -> list[str]:
    """{name: [ms exact, ms fused]} as bars from the left."""
    parts = []
    scale = BARS / max(ms for pair in times.values() for ms in pair)
    for n, (name, pair) in enumerate(times.items()):
        y = TOP + 20 + 90 * n
        ratio = pair[0] / pair[1]
        parts.append(label(left, y, f"{name}: {ratio:.2f} times faster", "dim"))
        for style, ms in zip(("exact", "fused"), pair, strict=True):
            y += 20
            line = f'<path class="{style}" d="M{left} {y}h{ms * scale:.1f}"'
            parts.append(f'{line} style="stroke-width: 12"/>')
            parts.append(label(left + ms * scale + 6, y + 4, f"{ms:.0f} {style}"))
    return parts


def picture(
    trainings: dict[str, Training], times: dict[str, list[float]], subtitle: str
) -> str:
    """What was found, as SVG."""
    exact = trainings["exact"]
    losses = {name: trainings[name].losses for name in ("exact", "fused")}
    far = {name: distances(exact, trainings[name]) for name in ("moved", "fused")}
    far["allowed"] = [n * d for n, d in enumerate(far["moved"], 1)]
    far = {name: [math.log10(max(d, 1e-9)) for d in far[name]] for name in far}
    highest = math.ceil(max(map(max, losses.values())))
    powers = range(-9, math.ceil(max(map(max, far.values()))) + 1)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="1030" height="340" '
        'viewBox="0 0 1030 340" role="img">',
        "<title>examples/train.py</title>",
        STYLE,
        '<rect class="page" width="100%" height="100%"/>',
        label(24, 32, "A language model trained on both backends", "title"),
        label(24, 52, subtitle, "dim"),
        label(50, TOP - 16, "loss: fused (thin) over exact (thick)"),
        *chart(50, {float(n): f"{n}" for n in range(highest + 1)}, losses),
        label(410, TOP - 34, "loss of fused − loss of exact, the largest so far"),
        label(410, TOP - 16, "ochre: weights moved by one ulp; dots: allowed", "dim"),
        *chart(410, {float(n): f"1e{n}" for n in powers}, far),
        label(760, TOP - 16, "milliseconds per step, median"),
        *bars(760, times),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="at least 10")
    parser.add_argument("--dropout", type=float, default=0.1, help="of the weights")
    parser.add_argument("--out", type=pathlib.Path, help="where a picture (SVG) goes")
    options = parser.parse_args(arguments)
    if options.steps < 10:
        parser.error("--steps must be at least 10")

    exact, fused, moved = Training("exact"), Training("fused"), Training("exact")
    moved.move_weights()
    size = sum(weight.numel() for weight in exact.model.parameters())
    subtitle = (
        f"{size / 1e6:.1f} million parameters, {BLOCKS} blocks, {BATCH}×{LENGTH} bytes "
        f"a step, float32, PyTorch {torch.__version__}, threads: {torch.get_num_threads()}"
    )
    print(subtitle)
    print("         loss                distance from exact    ms per step")
    print("step     exact     fused     fused     moved        exact  fused  ratio")
    texts = batches()
    ends = {0, 1, *(options.steps * n // 10 for n in range(1, 11))}
    for start, end in itertools.pairwise(sorted(ends)):
        train([exact, fused, moved], itertools.islice(texts, end - start))
        show(exact, fused, moved, end - start)
    times = {"no dropout": medians([exact, fused])}
    if options.dropout > 0:
        dropped = [Training(name, options.dropout) for name in ("exact", "fused")]
        train(dropped, itertools.islice(texts, max(5, options.steps // 10)))
        name = f"dropout {options.dropout:g}"
        times[name] = medians(dropped)
    for name, (slow, fast) in times.items():
        print(f"{name}: {slow:.1f} and {fast:.1f} ms, {slow / fast:.2f} times faster")
    if options.out:
        trainings = {"exact": exact, "fused": fused, "moved": moved}
        options.out.write_text(picture(trainings, times, subtitle))

    far, once = (distances(exact, other)[-1] for other in (fused, moved))
    allowed = options.steps * once
    agrees = far <= allowed
    print(
        f"The losses are {far:.1e} apart at most; {options.steps} steps of rounding "
        f"allow {allowed:.1e}: fused {'agrees' if agrees else 'DIFFERS'}."
    )
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
