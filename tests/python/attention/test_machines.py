# SPDX-License-Identifier: MIT
"""The promises about bits, as far as one machine can be made to act as others.

BLAS, oneDNN, ATen and the fused kernels choose their code by the maker and the
instruction sets of the CPU; each can be told to choose as on another one. In
each of these settings the command verifies and the tests of the same bits run in
a short form, in processes of their own, because the choices are made once.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parents[1]
COMMAND = pathlib.Path(os.environ.get("MULTIHEAD_BUILD_DIR", ""), "cli", "multihead")
OLDEST = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MULTIHEAD_ISA": "portable",
}
AVX2 = {
    "MKL_CBWR": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MULTIHEAD_ISA": "avx2",
}
# With ATen's code for lower CPUs PyTorch's flash attention of bfloat16 raises where oneDNN
# finds AMX: it packs for instructions that this code does not have.
NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
SETTINGS = {
    "as it is, one thread": {},
    "as it is, two threads": {"OMP_NUM_THREADS": "2"},
    "BLAS for any CPU": {"MKL_CBWR": "COMPATIBLE"},
    "BLAS for AVX2": {"MKL_CBWR": "AVX2"},
    "BLAS chooses freely": {"MKL_CBWR": "OFF"},
    "ATen for any CPU": NO_AMX | {"ATEN_CPU_CAPABILITY": "default"},
    "ATen for AVX2": NO_AMX | {"ATEN_CPU_CAPABILITY": "avx2"},
    "oneDNN for SSE4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "oneDNN for AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "all for AVX2": AVX2 | {"OMP_NUM_THREADS": "2"},
    "all for the oldest CPU": OLDEST,
}
# Of each suite that promises bits, a part that takes seconds.
SHORT = (
    "layer/test_parity.py::test_random_configurations[0]",
    "textbook/test_textbook.py::test_frozen_weights_give_the_bits_without_gradients",
    "textbook/test_textbook.py::test_without_gradients_the_result_is_close",
)


def run(setting: str, *command: str | pathlib.Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | SETTINGS[setting],
        timeout=300,
    )


def skip_without(isa: str | None) -> None:
    """Skips where this CPU has no instructions for these kernels."""
    info = json.loads(subprocess.check_output([COMMAND, "info", "--json"]))
    available = info["kernels"]["available"]
    if isa and isa not in available:
        pytest.skip(f"this CPU runs the kernels for {available}, not for {isa}")


@pytest.mark.parametrize("setting", SETTINGS)
def test_verify_agrees(setting):
    if not COMMAND.exists():
        pytest.skip(f"{COMMAND} is not built; MULTIHEAD_BUILD_DIR names the folder")
    skip_without(SETTINGS[setting].get("MULTIHEAD_ISA"))
    done = run(setting, COMMAND, "verify", "--json")
    cases = json.loads(done.stdout)["cases"]
    assert [c for c in cases if not c["agrees"]] == []
    assert done.returncode == 0, done.stderr
    assert sum(case["demand"] == "bits" for case in cases) > 80
    assert sum(case["demand"] == "close" for case in cases) > 20


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_suites_of_the_same_bits_pass(setting):
    if COMMAND.exists():
        skip_without(SETTINGS[setting].get("MULTIHEAD_ISA"))
    pytest_options = ("-q", "-x", "-p", "no:cacheprovider")
    tests = (TESTS / name for name in SHORT)
    done = run(setting, sys.executable, "-m", "pytest", *pytest_options, *tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout


def test_the_settings_change_pytorchs_own_bits():
    """Else the simulations above would simulate nothing."""
    program = """
import torch
torch.manual_seed(0)
x = torch.randn(64, 96, dtype=torch.float64)
print(repr((x @ x.T).exp().sum().item()), repr(x.float().matmul(x.float().T).tolist()))
"""
    outputs = {
        run(setting, sys.executable, "-c", program).stdout
        for setting in ("as it is, one thread", "all for the oldest CPU")
    }
    assert len(outputs) == 2
