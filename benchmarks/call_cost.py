# SPDX-License-Identifier: MIT
"""What one call of a small module costs: ours against torch.nn.MultiheadAttention.

Both run in this process, interleaved call by call; the ratio is what counts.
Run: ./run python benchmarks/call_cost.py
"""

import statistics
import time

import torch

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


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
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
    main()
