# SPDX-License-Identifier: MIT
"""The fused operators where memory, sizes or numbers run out."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import multihead

ops = torch.ops.multihead


def test_a_failed_allocation_is_an_error_and_leaves_nothing_behind():
    """Scratch that cannot be had, then an ordinary call on the same thread."""
    program = """
import resource, torch, multihead
q = torch.randn(1, 2, 5, 8)
before = multihead.scaled_dot_product_attention(q, q, q)
x = torch.zeros(1, 1, 1, 1 << 24, dtype=torch.bfloat16)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
try:
    multihead.scaled_dot_product_attention(x, x, x)
except RuntimeError as error:
    assert "cannot allocate" in str(error), error
else:
    raise SystemExit("no error")
assert torch.equal(multihead.scaled_dot_product_attention(q, q, q), before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_mean_over_no_heads():
    q, lse = torch.randn(2, 0, 3, 4), torch.empty(2, 0, 3)
    averaged = ops.attention_weights(q, q, lse, True)
    assert averaged.shape == (2, 3, 3) and averaged.isnan().all()
    assert ops.attention_weights(q, q, lse, False).shape == (2, 0, 3, 3)


def test_summary_of_a_nan_row():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    q[0, 1, 3] = float("nan")
    summary = multihead.attention_summary(q, k, 3)
    bad = torch.zeros(1, 2, 5, dtype=torch.bool)
    bad[0, 1, 3] = True
    assert torch.equal(summary.weights.isnan().any(-1), bad)
    assert torch.equal(summary.entropy.isnan(), bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_few_rows_have_the_bits_of_many(dtype, rows):
    """The product for few rows computes the same chains as that for tiles."""
    q, k, v = (torch.randn(2, 3, n, 37).to(dtype) for n in (60, 301, 301))
    options = dict(window=(200, 250), softcap=20.0)
    many = multihead.scaled_dot_product_attention(q, k, v, **options)
    few = multihead.scaled_dot_product_attention(q[:, :, :rows], k, v, **options)
    assert torch.equal(few, many[:, :, :rows])


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_transposed_masks_have_the_bits_of_contiguous_ones(kind):
    q, k, v = (torch.randn(2, 2, n, 16) for n in (77, 150, 150))
    mask = torch.rand(150, 77) < 0.7 if kind == "bool" else torch.randn(150, 77)
    if kind == "float":
        mask[mask > 1] = -torch.inf
    transposed = multihead.scaled_dot_product_attention(q, k, v, mask.t())
    contiguous = multihead.scaled_dot_product_attention(q, k, v, mask.t().contiguous())
    assert torch.equal(transposed, contiguous)


def test_threads_are_really_started():
    """Without OpenMP's flag the same source compiles, and runs on one thread."""
    library = pathlib.Path(os.environ["MULTIHEAD_BUILD_DIR"], "libmultihead.so")
    symbols = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", library],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "GOMP_parallel" in symbols or "__kmpc_fork_call" in symbols
