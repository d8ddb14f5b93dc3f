# SPDX-License-Identifier: MIT
"""MULTIHEAD_ISA: every instruction set, forced in a process of its own.

Bits agree in float32 and float64; 16 bits are held to the budget of
budget.py one by one.
"""

import functools
import os
import re
import subprocess
import sys

import pytest
import reference
import torch
from error_budget import BUDGETS
from paths import fused_calls
from test_definition import draw
from test_fused import check_forward, check_weights
from test_fused_backward import NAMES, backward, output_gradients
from test_fused_bits import RULES, different, large, results_of

import multihead

DRAWN = range(2000, 2030)
ONE_CALL = """
import torch, multihead
q = torch.ones(1, 1, 2, 4)
multihead.scaled_dot_product_attention(q, q, q)
"""
ALL_CALLS = """
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
import test_fused_isa
torch.save(test_fused_isa.all_calls(), sys.argv[1])
"""


def all_calls():
    """Results of attention, forward and backward, and of both modules in all dtypes,
    by name."""
    results = {}

    def add(dtype, name, named):
        results.update({f"{dtype} {name} {n}": x for n, x in named.items()})

    for dtype in BUDGETS:
        torch.manual_seed(1)
        for name, rules in RULES.items():
            inputs, options = large(dtype), rules | dict(enable_gqa=True)
            add(dtype, name, results_of(*inputs, **options))
            dout, dlse = output_gradients(inputs, options)
            gradients = zip(NAMES, backward(dout, dlse, inputs, options), strict=True)
            add(dtype, name, {f"d{n}": x for n, x in gradients if x is not None})
        for seed in DRAWN:
            inputs, options, _ = draw(seed, dtype)
            add(dtype, seed, results_of(*inputs, **options))
        x = torch.randn(5, 2, 32, dtype=dtype)
        for module in (
            multihead.MultiheadAttention(32, 4, dtype=dtype),
            multihead.GroupedQueryAttention(32, 4, 2, dtype=dtype),
        ):
            with torch.no_grad():
                assert fused_calls(module, x, x, x) == ["attention", "weights"]
                out, weights = module(x, x, x)
            add(dtype, type(module).__name__, dict(out=out, weights=weights))
    return results


def with_isa(isa, *command):
    return subprocess.run(
        [sys.executable, "-c", *command],
        env=os.environ | {"MULTIHEAD_ISA": isa},
        capture_output=True,
        text=True,
    )


@functools.cache
def built_isas():
    """The names that MULTIHEAD_ISA accepts, from its own error."""
    error = with_isa("avx9", ONE_CALL).stderr
    (names,) = re.findall(r'MULTIHEAD_ISA must be (.*), got "avx9"', error)
    return re.split(", | or ", names)


@pytest.fixture(scope="module")
def by_isa(tmp_path_factory):
    """{isa: results} of those this CPU has; of those it lacks, {isa: error}."""
    results, errors = {}, {}
    for isa in built_isas():
        file = tmp_path_factory.mktemp(isa) / "results.pt"
        run = with_isa(isa, ALL_CALLS, str(file), os.path.dirname(__file__))
        if "this CPU lacks" in run.stderr:
            errors[isa] = run.stderr
            continue
        assert run.returncode == 0, run.stderr
        results[isa] = torch.load(file)
    return results, errors


def test_unknown_isa():
    expected = ["portable", "neon", "avx2", "avx512", "avx512_bf16", "amx"]
    assert built_isas() == expected


def test_float32_and_float64_have_the_same_bits(by_isa):
    results, _ = by_isa
    assert "portable" in results
    for isa, ours in results.items():
        assert list(ours) == list(results["portable"])
        wide = {n: x for n, x in ours.items() if "float16" not in n.split()[0]}
        assert wide
        assert different(wide, results["portable"]) == [], isa


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
def test_every_isa_is_within_the_budget(by_isa, dtype):
    results, _ = by_isa
    for seed in DRAWN:
        inputs, _, rules = draw(seed, dtype)
        golden = reference.attention(*(x.double().numpy() for x in inputs), rules)
        for isa, ours in results.items():
            names = ("out", "logsumexp", "weights", "mean")
            out, lse, *weights = (ours[f"{dtype} {seed} {n}"] for n in names)
            try:
                check_forward(golden, BUDGETS[dtype], out, lse)
                check_weights(golden, BUDGETS[dtype], *weights)
            except AssertionError as error:
                raise AssertionError(f"{isa}, seed {seed}") from error


def test_isa_that_the_cpu_lacks(by_isa):
    _, errors = by_isa
    if not errors:
        pytest.skip("this CPU has every instruction set that is built")
    for isa, error in errors.items():
        wanted = "MULTIHEAD_ISA names an instruction set that this CPU lacks, got "
        assert f'{wanted}"{isa}"' in error
