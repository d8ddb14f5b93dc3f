# SPDX-License-Identifier: MIT
"""The numbers of docs/textbook.md, measured: python examples/textbook_numbers.py

Four questions about attention, each answered by running the textbook forms: how exact
can a check be, why several heads, what does attention cost, what do grouped heads save.
Ten to twenty seconds on two idle cores.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from multihead import textbook


def milliseconds(call: Callable[[], object], runs: int = 7) -> float:
    """The median of `runs` calls, after two that warm up."""
    times = []
    for _ in range(runs + 2):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def attend(x: Tensor, heads: int, weights: nn.MultiheadAttention) -> Tensor:
    return textbook.multi_head_attention(x, x, x, heads, x.size(-1), weights=weights)


def exactness(seeds: int = 1000) -> None:
    print("How exact can a check be? allclose(atol=1e-8, rtol=1e-5) in float32,")
    print(f"(3, 4, 8), 2 heads, {seeds} seeds, failures:")
    itself = ours = bits = other = 0
    for seed in range(seeds):
        torch.manual_seed(seed)
        q, k, v = torch.rand(3, 3, 4, 8)
        module = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
        expected, _ = module(q, k, v)
        without, _ = module(q, k, v, need_weights=False)
        form = textbook.multi_head_attention(q, k, v, 2, 8, weights=module)
        # The checks as usually published: each side with weights of its own.
        fresh = textbook.multi_head_attention(q, k, v, 2, 8)
        check = {"atol": 1e-8, "rtol": 1e-5}
        itself += not torch.allclose(without, expected, **check)
        ours += not torch.allclose(form, expected, **check)
        other += not torch.allclose(fresh, expected, **check)
        bits += not torch.equal(form, expected)
    print(f"  PyTorch without weights against PyTorch with weights  {itself:5d}")
    print(f"  the textbook form against PyTorch, weights shared     {ours:5d}")
    print(f"  the same, torch.equal                                 {bits:5d}")
    print(f"  the same, weights drawn on each side                  {other:5d}")


def several_heads(length: int = 12, content: int = 16, steps: int = 400) -> None:
    print(f"\nWhy several heads? Learn to report both neighbours; {steps} steps.")
    print("heads  parameters  mean squared error (predicting nothing: 1.00)")
    width = 2 * content
    places = torch.eye(length, content)
    for heads in (1, 2, 4):
        torch.manual_seed(0)
        layer = textbook.MultiHeadAttention(width, heads)
        optimiser = torch.optim.Adam(layer.parameters(), lr=1e-2)
        for _ in range(steps):
            words = torch.randn(32, length, content)
            x = torch.cat([words, 4 * places.expand_as(words)], dim=-1)
            neighbours = [words.roll(1, dims=1), words.roll(-1, dims=1)]
            loss = F.mse_loss(layer(x, x, x), torch.cat(neighbours, dim=-1))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        parameters = sum(p.numel() for p in layer.parameters())
        print(f"{heads:5d}  {parameters:10,d}  {loss:.3f}")


def cost(width: int = 512) -> None:
    print(f"\nWhat does it cost? d_model {width}, batch 1, self-attention, float32.")
    print("length  heads  parameters     GFLOP  in scores  weights MiB       ms")
    for length, heads in ((128, 8), (512, 1), (512, 8), (512, 64), (2048, 8)):
        x = torch.randn(1, length, width)
        module = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
        with FlopCounterMode(display=False) as counter:
            attend(x, heads, module)
        flop = counter.get_total_flops()
        bmm = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
        mib = heads * length * length * 4 / 2**20
        parameters = sum(p.numel() for p in module.parameters())
        spent = milliseconds(lambda x=x, h=heads, m=module: attend(x, h, m))
        print(
            f"{length:6d}  {heads:5d}  {parameters:10,d}  {flop / 1e9:8.2f}  "
            f"{bmm / flop:8.0%}  {mib:11.1f}  {spent:7.1f}"
        )


def grouped(width: int = 1024, heads: int = 16, keys: int = 4096) -> None:
    print(
        f"\nWhat do grouped heads save? d_model {width}, {heads} query heads, float32;"
    )
    print(f"one new token reads a cache of {keys} positions, batch 8; prefill 256.")
    print("groups  parameters  cache MiB  decode ms  prefill ms")
    d = width // heads
    x, query = torch.randn(1, 256, width), torch.randn(8, heads, 1, d)
    for groups in (16, 4, 1):
        rows = (width, groups * d, groups * d, width)
        weights = [nn.Parameter(torch.randn(r, width) / 32) for r in rows]
        k, v = torch.randn(2, 8, groups, keys, d)

        def decode(k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(query, k, v, enable_gqa=True)

        def prefill(groups: int = groups, weights: list[Tensor] = weights) -> Tensor:
            return textbook.grouped_query_attention(
                x, x, x, groups, width, num_heads=heads, weights=weights
            )

        cache = (k.nbytes + v.nbytes) / 2**20
        print(
            f"{groups:6d}  {sum(w.numel() for w in weights):10,d}  {cache:9.0f}  "
            f"{milliseconds(decode):9.2f}  {milliseconds(prefill):10.1f}"
        )


if __name__ == "__main__":
    exactness()
    several_heads()
    cost()
    grouped()
