# SPDX-License-Identifier: MIT
"""The runner of PyTorch's own tests, on tests that are made up here."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
RUNNER = ROOT / "tests/pytorch_own/run.py"

TESTS = """
import os
import sys
import unittest

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

x = torch.rand(1, 2, 5, 8)
MASK_AND_CAUSAL = dict(attn_mask=torch.ones(2, 5, 5).bool(), is_causal=True)
PYTORCH = "torch.nn.modules.activation"


class TestMadeUp(unittest.TestCase):
    def test_agrees(self):
        self.assertEqual(scaled_dot_product_attention(x, x, x).shape, x.shape)

    def test_fails_as_it_is(self):
        self.fail("not ours to answer for")

    def test_listed(self):
        with self.assertRaises(RuntimeError):
            F.scaled_dot_product_attention(x, x, x, **MASK_AND_CAUSAL)

    def test_listed_by_name(self):
        with self.assertRaises(RuntimeError):
            scaled_dot_product_attention(x, x, x, **MASK_AND_CAUSAL)

    def test_formula_is_the_reference(self):
        with sdpa_kernel(SDPBackend.MATH), self.assertRaises(RuntimeError):
            F.scaled_dot_product_attention(x, x, x, **MASK_AND_CAUSAL)

    def test_not_listed(self):
        layer = torch.nn.TransformerEncoderLayer(8, 2)
        self.assertEqual(type(layer.self_attn).__module__, PYTORCH)

    def test_crashes(self):
        if "multihead" in sys.modules:
            os._exit(3)

    def test_after_the_crash(self):
        self.test_agrees()
"""

EXPECTED = """
reference = "formula"

[[difference]]
tests = "test_listed"
backends = ["auto"]
error = "RuntimeError not raised"
row = "mask and `is_causal`"
reason = "Both apply."

[[difference]]
tests = "test_agrees"
backends = ["auto"]
error = ""
row = "mask and `is_causal`"
reason = "Out of date."
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as PyTorch's test, and the list that goes with it."""
    path = tmp_path_factory.mktemp("pytorch")
    (path / "test_transformers.py").write_text(TESTS)
    (path / "expected.toml").write_text(EXPECTED)
    return path


def run(folder, *arguments):
    """Exit status and lines of the report."""
    command = [sys.executable, RUNNER, folder, "--results", folder / "results"]
    command += ["--expected", folder / "expected.toml", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_every_difference_is_told(folder):
    name = "test_transformers.py::TestMadeUp::"
    crash = f"  NOT EXPECTED: {name}test_crashes: ended the process: "
    module = (
        f"  NOT EXPECTED: {name}test_not_listed: failed: AssertionError: "
        "'multihead.modules' != 'torch.nn.modules.activation'"
    )
    status, lines = run(folder)
    assert status == 1
    assert lines == [
        "auto: 3 tests pass, 2 of them by multihead;",
        "  1 fail or are skipped with PyTorch's names too,",
        "  4 pass with PyTorch's names only",
        "  expected (mask and `is_causal`): Both apply.",
        f"    {name}test_listed",
        f"    {name}test_listed_by_name",
        crash,
        module,
        "  LISTED, BUT DOES NOT OCCUR: test_agrees ()",
        # Here PyTorch's function runs, which refuses mask and is_causal.
        "exact: 5 tests pass, 4 of them by multihead;",
        "  1 fail or are skipped with PyTorch's names too,",
        "  2 pass with PyTorch's names only",
        crash,
        module,
        # PyTorch's module is still its own, and nothing that PyTorch refuses is taken.
        "installed: 6 tests pass, 2 of them by multihead;",
        "  1 fail or are skipped with PyTorch's names too,",
        "  1 pass with PyTorch's names only",
        crash,
    ]


def test_results_end_with_the_tests_and_what_is_listed_is_no_failure(folder):
    changed = TESTS.replace("class TestMadeUp", "class TestOther")
    (folder / "test_transformers.py").write_text(changed)
    selected = ("--backend", "auto", "-k", "listed and not not_listed or fails")
    status, lines = run(folder, *selected)
    assert status == 0
    assert lines == [
        "auto: 0 tests pass, 0 of them by multihead;",
        "  1 fail or are skipped with PyTorch's names too,",
        "  2 pass with PyTorch's names only",
        "  expected (mask and `is_causal`): Both apply.",
        "    test_transformers.py::TestOther::test_listed",
        "    test_transformers.py::TestOther::test_listed_by_name",
        "  not met, no such test passes at all: test_agrees",
    ]


def test_the_list_names_rows_of_the_page():
    spec = importlib.util.spec_from_file_location("pytorch_own_run", RUNNER)
    runner = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = runner
    spec.loader.exec_module(runner)
    entries, reference = runner.expectations(RUNNER.with_name("expected.toml"))
    page = (ROOT / "docs/parity.md").read_text()
    assert entries
    for entry in entries:
        assert entry.row in page
        assert entry.reason and set(entry.backends) <= {"auto", "exact", "installed"}
        re.compile(entry.tests), re.compile(entry.error)
    re.compile(reference)
