# SPDX-License-Identifier: MIT
"""A check as an assertion, plainly and as a fixture of pytest."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import multihead

ROOT = pathlib.Path(__file__).resolve().parents[3]
TESTS = """
import torch

def attend(q, k, v):
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** {power}).softmax(-1) @ v

def test_attend(assert_attention):
    assert_attention(attend)
"""


def attend(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v


def test_right_attention_gives_its_report():
    assert multihead.assert_attention(torch.nn.MultiheadAttention(48, 6)).passed


def test_wrong_attention_fails_with_the_report():
    with pytest.raises(AssertionError, match="The scores are not scaled") as raised:
        multihead.assert_attention(attend)
    assert "scale_missing" in str(raised.value)


def test_options_are_those_of_check():
    with pytest.raises(ValueError, match="mask must be"):
        multihead.assert_attention(attend, mask="both")


@pytest.mark.parametrize("power", [0.5, 1])
def test_the_fixture(tmp_path, power):
    (tmp_path / "test_it.py").write_text(TESTS.format(power=power))
    # The sources come last: what is built has the libraries.
    path = os.pathsep.join([*filter(None, sys.path), str(ROOT / "python")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "multihead_pytest", "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if power == 0.5 else 1), done.stdout + done.stderr
    assert ("scale_not_root" in done.stdout) == (power == 1)
