# SPDX-License-Identifier: MIT
"""What one small call costs: ours against PyTorch's, the modules and the function.

All run in this process, interleaved; the ratio is what counts.
Run: ./run python benchmarks/call_cost.py [modules | functions]
"""

import itertools
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import multihead

B, L, E, H = 3, 4, 8, 2
ROUNDS, CALLS = 60, 100


def measure(theirs, ours) -> tuple[float, float, float, float]:
    """Microseconds per call: best and median of theirs, then of ours."""
    times = ([], [])
    for _ in range(ROUNDS):
        for function, collected in zip((theirs, ours), times, strict=True):
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            collected.append((time.perf_counter() - start) / CALLS * 1e6)
    return tuple(f(t) for t in times for f in (min, statistics.median))


def functions() -> None:
    """PyTorch's function as it is and under install(), and ours, on 40 small shapes."""
    sdpa, direct = (
        F.scaled_dot_product_attention,
        multihead.scaled_dot_product_attention,
    )
    lengths = ((1, 1), (1, 16), (1, 64), (4, 4), (16, 16))
    grid = itertools.product((1, 8), lengths, (32, 64), (False, True))
    print(
        f"{'function, no grad':<32}{'PyTorch µs':>12}{'installed':>11}{'direct':>8}"
        f"{'installed':>11}{'direct':>8}"
    )
    ratios = ([], [])
    for heads, (queries, keys), width, is_causal in grid:
        q, k, v = (torch.randn(1, heads, n, width) for n in (queries, keys, keys))
        expected = sdpa(q, k, v, is_causal=is_causal)
        times = ([], [], [])
        for round_number in range(ROUNDS):
            for i in range(3):
                way = (i + round_number) % 3
                function = direct if way == 2 else sdpa
                (multihead.install if way == 1 else multihead.uninstall)()
                for _ in range(5):
                    out = function(q, k, v, is_causal=is_causal)
                start = time.perf_counter()
                for _ in range(CALLS):
                    function(q, k, v, is_causal=is_causal)
                times[way].append((time.perf_counter() - start) / CALLS * 1e6)
                torch.testing.assert_close(out, expected)
        theirs, *ours = map(min, times)
        for ratio, best in zip(ratios, ours, strict=True):
            ratio.append(best / theirs)
        name = f"H{heads} Lq{queries} Lk{keys} D{width}{' causal' * is_causal}"
        print(
            f"{name:<32}{theirs:>12.2f}{ours[0]:>11.2f}{ours[1]:>8.2f}"
            f"{ratios[0][-1]:>11.2f}{ratios[1][-1]:>8.2f}"
        )
    for name, ratio in zip(("installed", "direct"), ratios, strict=True):
        print(
            f"{name}: {statistics.median(ratio):.2f} in the middle, "
            f"{max(ratio):.2f} at worst, {sum(x > 1.1 for x in ratio)} above 1.1"
        )


def modules() -> None:
    reference = torch.nn.MultiheadAttention(E, H, batch_first=True)
    module = multihead.MultiheadAttention(E, H, batch_first=True)
    module.load_state_dict(reference.state_dict())
    x, y = torch.rand(B, L, E), torch.rand(B, L, E)
    blocked = torch.ones(L, L, dtype=torch.bool).triu(1)
    cases = {
        "self-attention": lambda m: m(x, x, x),
        "distinct key and value": lambda m: m(x, y, y.clone()),
        "no weights": lambda m: m(x, x, x, need_weights=False),
        "causal mask": lambda m: m(x, x, x, attn_mask=blocked),
    }
    print(f"{'mode':<22}{'case':<26}{'PyTorch µs':>12}{'ours µs':>10}{'ratio':>8}")
    for training in (True, False):
        for backend in ("auto", "exact"):
            reference.train(training), module.train(training)
            for name, case in cases.items():
                with torch.set_grad_enabled(training), multihead.backend(backend):
                    torch.testing.assert_close(case(module), case(reference))
                    _, theirs, _, ours = measure(
                        lambda: case(reference), lambda: case(module)
                    )
                mode = f"{'train' if training else 'eval, no grad'}, {backend}"
                print(
                    f"{mode:<22}{name:<26}{theirs:>12.1f}{ours:>10.1f}"
                    f"{ours / theirs:>8.2f}"
                )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "functions" not in sys.argv:
        modules()
    if "modules" not in sys.argv:
        with torch.no_grad():
            functions()
