# SPDX-License-Identifier: MIT
"""The C++ module against Python's torch.nn.MultiheadAttention: the same bits.

Python's module writes inputs, parameters and everything it computes into a
safetensors file; the program parity_check repeats the calls in C++. The file is
written anew in each run, because PyTorch's own bits differ between CPUs.
"""

import dataclasses
import json
import os
import pathlib
import subprocess

import parity
import pytest
import torch

safetensors = pytest.importorskip(
    "safetensors.torch", reason="the package safetensors is not installed"
)

CASES = 400
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def record(seed: int) -> tuple[dict, dict]:
    """(description, tensors) of one call of torch.nn.MultiheadAttention."""
    c = parity.draw(seed, DTYPES)
    torch.manual_seed(c.seed)
    fresh = torch.nn.MultiheadAttention(c.embed_dim, c.num_heads, **c.options)
    tensors = {f"initial.{k}": v.clone() for k, v in fresh.state_dict().items()}
    module = parity.make(torch.nn.MultiheadAttention, c)
    tensors |= {f"parameter.{k}": v.clone() for k, v in module.state_dict().items()}
    sequences, masks = parity.inputs(c)
    names = ("query", "key", "value")
    distinct = dict(zip(names, sequences, strict=True))
    tensors |= {k: v.detach().clone() for k, v in (distinct | masks).items()}
    tensors["generator.before"] = torch.get_rng_state()
    results = parity.forward_backward(module, c, sequences, masks)
    tensors |= {
        f"result.{k}": v.detach().clone() for k, v in results.items() if v is not None
    }
    description = dataclasses.asdict(c) | {
        "dtype": str(c.dtype).removeprefix("torch."),
        "out_strides": list(results["out"].stride()),
    }
    return description, {k: v.contiguous().clone() for k, v in tensors.items()}


def test_cpp_module_gives_pythons_bits(tmp_path):
    build = os.environ.get("MULTIHEAD_BUILD_DIR")
    assert build, "MULTIHEAD_BUILD_DIR must name the CMake build folder"
    program = pathlib.Path(build, "tests", "cpp", "parity_check")
    assert program.exists(), f"{program} is not built"
    descriptions, everything = {}, {}
    for seed in range(50_000, 50_000 + CASES):
        descriptions[str(seed)], tensors = record(seed)
        everything |= {f"{seed}.{name}": x for name, x in tensors.items()}
    fixture = tmp_path / "parity.safetensors"
    metadata = {name: json.dumps(text) for name, text in descriptions.items()}
    safetensors.save_file(everything, fixture, metadata)
    done = subprocess.run([program, fixture], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert done.stdout.splitlines()[-1] == f"{CASES} of {CASES} cases equal"
