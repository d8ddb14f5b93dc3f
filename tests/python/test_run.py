# SPDX-License-Identifier: MIT
"""What ./run says before it sets anything up, from a folder with a space."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path):
    """Calls a copy of ./run, in a checkout of nothing else; (status, out, err)."""
    checkout = tmp_path / "a checkout"
    checkout.mkdir()
    shutil.copy(ROOT / "run", checkout)

    def call(*arguments: str, **variables: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [str(checkout / "run"), *arguments],
            check=False,
            cwd="/",
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    return call


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",)], ids=str)
def test_help_lists_the_commands(run, arguments):
    status, out, err = run(*arguments)
    assert (status, err) == (0, "")
    for command in (
        "verify",
        "bench",
        "test",
        "python",
        "multihead",
        "format",
        "clean",
    ):
        assert f"\n  {command} " in out


def test_unknown_command_is_refused(run):
    status, out, err = run("tset")
    assert (status, out) == (1, "")
    assert err == "multihead: there is no command tset: see ./run --help\n"


def test_python_without_torch_is_refused(run, tmp_path):
    nothing = str(tmp_path / "python")
    status, out, err = run("python", MULTIHEAD_PYTHON=nothing)
    assert (status, out) == (1, "")
    assert f"MULTIHEAD_PYTHON={nothing} is no Python with torch" in err


def test_clean_removes_what_was_made_and_nothing_else(run, tmp_path):
    checkout = tmp_path / "a checkout"
    for made in (".venv", "build", "kept"):
        (checkout / made / "inside").mkdir(parents=True)
    assert run("clean") == (0, "", "")
    assert sorted(path.name for path in checkout.iterdir()) == ["kept", "run"]
