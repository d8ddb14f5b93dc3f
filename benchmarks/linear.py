# SPDX-License-Identifier: MIT
"""What install(linear=True) brings: the same calls by turns with it and without.

    ./run python benchmarks/linear.py products bert gpt2 --threads 1

Times of one thread are those of its CPU, times of more those of the clock.
"""

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multihead

WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "PyTorch": contextlib.nullcontext,
    "installed": multihead.installed,
    "linear": lambda: multihead.installed(linear=True),
}


def by_turns(
    call: Callable[[], object], ways: list[str], rounds: int
) -> dict[str, list[float]]:
    """Seconds per call. Who begins changes from round to round."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    begin = time.perf_counter()
    for way in ways:
        with WAYS[way]():
            call()
            call()
    repeats = max(1, int(0.012 / (time.perf_counter() - begin)))
    for turn in range(rounds):
        for way in ways[:: -1 if turn % 2 else 1]:
            with multihead.installed():  # alike for all: it forgets graphs, and costs
                pass
            with WAYS[way]():
                if repeats > 1:
                    call()
                begin = clock()
                for _ in range(repeats):
                    call()
                seconds[way].append((clock() - begin) / repeats)
    return seconds


def gains(seconds: dict[str, list[float]], way: str) -> tuple[float, float]:
    """PyTorch's time by this way's: of the best calls, and of the medians."""
    return tuple(  # type: ignore[return-value]
        of(seconds["PyTorch"]) / of(seconds[way]) for of in (min, statistics.median)
    )


def error(rows: int, inputs: int, outputs: int) -> float:
    """The largest difference from float64, by that of PyTorch."""
    x, w = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    exact = x.double() @ w.double().t()
    differences = []
    for way in ("linear", "PyTorch"):
        with WAYS[way](), torch.no_grad():
            differences.append((F.linear(x, w) - exact).abs().max().item())
    return differences[0] / max(differences[1], 1e-30)


def measure_product(
    rows: int, inputs: int, outputs: int, training: bool, bias: bool
) -> dict[str, list[float]]:
    layer = nn.Linear(inputs, outputs, bias).requires_grad_(training)
    x = torch.randn(rows, inputs, requires_grad=training)
    upstream = torch.randn(rows, outputs)

    def call() -> None:
        out = layer(x)
        if training:
            out.backward(upstream)

    is_quick = rows * inputs * outputs < 1 << 25
    return by_turns(call, ["PyTorch", "linear"], 61 if is_quick else 11)


def products() -> None:
    print("gains (best/median): forward with bias, without; forward and backward so")
    worst = (9.0, "")
    sizes = itertools.product(
        (1, 16, 128, 1024, 4096), (64, 768, 3072), (64, 768, 3072)
    )
    for rows, inputs, outputs in sizes:
        if rows * inputs * outputs > 3e9:
            continue
        text = f"{rows} x {inputs} x {outputs}:"
        for training, bias in itertools.product((False, True), (True, False)):
            seconds = measure_product(rows, inputs, outputs, training, bias)
            best, median = gains(seconds, "linear")
            worst = min(worst, (max(best, median), text))
            text += f" {best:.2f}/{median:.2f}"
        print(text, f"error x {error(rows, inputs, outputs):.1f}", flush=True)
    print("least", *worst)


class Block(nn.Module):
    """Of a transformer, 768 wide, 12 heads, norms first."""

    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(768, 2304), nn.Linear(768, 768)
        self.up, self.down = nn.Linear(768, 3072), nn.Linear(3072, 768)
        self.norms = nn.ModuleList(nn.LayerNorm(768) for _ in range(2))
        self.causal, self.dropout = causal, dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 12, 64))
        attended = F.scaled_dot_product_attention(
            *(head.transpose(1, 2) for head in heads.unbind(2)),
            is_causal=self.causal,
            dropout_p=self.dropout,
        )
        drop = self.dropout
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), drop)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), drop)


def report(name: str, call: Callable[[], object], rounds: int) -> None:
    seconds = by_turns(call, list(WAYS), rounds)
    print(f"{name}: PyTorch {min(seconds['PyTorch']) * 1e3:.0f} ms", end="")
    for way in ("installed", "linear"):
        best, median = gains(seconds, way)
        print(f"; {way} {best:.2f} (medians {median:.2f})", end="")
    print(flush=True)


def bert() -> None:
    for length, rounds in ((512, 10), (128, 15)):
        model = nn.Sequential(*(Block(False, 0.0) for _ in range(12)))
        x = torch.randn(1, length, 768)
        with torch.inference_mode():
            outputs = []
            for way in WAYS.values():
                with way():
                    outputs.append(model(x))
            spread = max((out - outputs[0]).abs().max().item() for out in outputs)
            print(f"largest difference {spread:.1e}")
            report(f"BERT-base shape, L{length}, forward", lambda: model(x), rounds)


def gpt2() -> None:
    blocks = nn.Sequential(*(Block(True, 0.1) for _ in range(12)))
    embedding = nn.Embedding(50257, 768)
    nn.init.normal_(embedding.weight, std=0.02)
    parameters = [*blocks.parameters(), embedding.weight]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    tokens = torch.randint(50257, (1, 513))

    def step() -> None:
        hidden = F.layer_norm(blocks(embedding(tokens[:, :-1])), (768,))
        logits = F.linear(hidden, embedding.weight)
        F.cross_entropy(logits[0], tokens[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    report("GPT-2-small shape, L512, training step with dropout 0.1", step, 5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    cases = {"products": products, "bert": bert, "gpt2": gpt2}
    parser.add_argument("cases", nargs="+", choices=cases)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    why_not = torch.ops.multihead.why_not_linear()
    print(f"torch {torch.__version__}, threads {arguments.threads}", why_not, sep=", ")
    for case in arguments.cases:
        cases[case]()
