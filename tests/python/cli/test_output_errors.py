# SPDX-License-Identifier: MIT
"""Output that cannot be written is an error, of every sub-command: status 2, and a
line that says what and why. Nothing is half written."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_cli import COMMAND, FAST, pytestmark  # noqa: F401

CODE = """
import torch
def attention(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of right attention, and code to check."""
    folder = tmp_path_factory.mktemp("inputs")
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    save_file(
        {"query": q, "key": k, "value": v, "out": out}, folder / "dump.safetensors"
    )
    (folder / "attention.py").write_text(CODE)
    return folder


COMMANDS = [
    (),
    ("--help",),
    ("--version",),
    ("verify", "--filter", FAST),
    ("verify", "--filter", FAST, "--json"),
    ("verify", "--help"),
    ("info",),
    ("info", "--json"),
    ("bench", "--list"),
    ("explain", "dump.safetensors"),
    ("explain", "dump.safetensors", "--json"),
    ("explain", "dump.safetensors", "--html", "-"),
    ("explain", "dump.safetensors", "--svg", "-"),
    ("show",),
    ("show", "dump.safetensors", "--color", "true"),
    ("show", "--svg", "-"),
    ("show", "--png", "-"),
    ("show", "--html", "-"),
    ("check", "attention.py"),
    ("check", "attention.py", "--json"),
]


def to(path: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run whose standard output is a file that exists."""
    with open(path, "w") as file:
        return subprocess.run(
            [str(COMMAND), *arguments],
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            timeout=120,
        )


def last_line(text: str) -> str:
    return text.splitlines()[-1] if text else ""


def refusal(why: str) -> str:
    return f"multihead: standard output must be writable, got {why}"


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_disk_is_an_error(folder: Path, arguments: tuple[str, ...]) -> None:
    result = to("/dev/full", folder, *arguments)
    assert last_line(result.stderr) == refusal("No space left on device")
    assert result.returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [("info",), ("show",), ("--help",), ("check", "attention.py")],
    ids=" ".join,
)
def test_a_closed_standard_output_is_an_error(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    result = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" >&-', str(COMMAND), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
    )
    assert last_line(result.stderr) == refusal("Bad file descriptor")
    assert result.returncode == 2


def test_a_file_does_not_take_the_place_of_a_closed_output(
    folder: Path, tmp_path: Path
) -> None:
    """It would get the number of standard output, and what is printed."""
    dump = folder / "dump.safetensors"
    for words, status in (("show", 0), (f"explain {dump}", 2)):
        command = f'exec "$0" {words} --svg a.svg >&- 2>&- <&-'
        ended = subprocess.run(["sh", "-c", command, str(COMMAND)], cwd=tmp_path)
        assert ended.returncode == status
        text = (tmp_path / "a.svg").read_text()
        assert text.startswith("<svg ") and text.endswith("</svg>\n")


@pytest.mark.parametrize("ignored", [True, False])
def test_a_reader_that_went_away(ignored: bool) -> None:
    """Ends the command by SIGPIPE, as `| head` expects, or as an error."""
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [str(COMMAND), "show"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        restore_signals=not ignored,  # Python itself ignores it
    )
    os.close(write)
    if ignored:
        assert result.stderr == refusal("Broken pipe") + "\n"
    assert result.returncode == (2 if ignored else -signal.SIGPIPE)


def test_a_full_pipe_is_waited_for(folder: Path, tmp_path: Path) -> None:
    """One that returns EAGAIN: a terminal's or an ssh's, set so by others."""
    weights = torch.rand(40, 60, 60)
    save_file({"weights": weights}, tmp_path / "dump.safetensors")
    read, write = os.pipe()
    os.set_blocking(write, False)
    command = [str(COMMAND), "show", "dump.safetensors", "--html", "-"]
    with subprocess.Popen(command, stdout=write, cwd=tmp_path) as process:
        os.close(write)
        threading.Event().wait(3)  # it has filled the pipe
        with open(read, encoding="utf-8") as file:
            text = file.read()
    assert process.returncode == 0
    assert len(text) > 2**17 and text.endswith("</html>\n")


def limited(size: int, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run that can write files of at most so many bytes: a disk that is nearly
    full, for whoever may not mount one."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return subprocess.run(
        [str(COMMAND), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        preexec_fn=limit,
        timeout=120,
    )


@pytest.mark.parametrize("option", ["--svg", "--png", "--html"])
def test_files_of_show_are_whole_or_as_they_were(tmp_path: Path, option: str) -> None:
    (tmp_path / "picture").write_text("old")
    result = limited(4096, tmp_path, "show", option, "picture")
    why = "file must be writable, got File too large"
    assert result.stderr == f"multihead: show: {option} picture: {why}\n"
    assert result.returncode == 2
    assert [file.name for file in tmp_path.iterdir()] == ["picture"]
    assert (tmp_path / "picture").read_text() == "old"


@pytest.mark.parametrize("option", ["--html", "--svg"])
def test_files_of_explain_are_whole_or_not_there(
    folder: Path, tmp_path: Path, option: str
) -> None:
    dump = str(folder / "dump.safetensors")
    result = limited(256, tmp_path, "explain", dump, option, "report")
    why = "file must be writable, got File too large"
    assert result.stderr == f"multihead: explain: {option} report: {why}\n"
    assert result.returncode == 2
    assert "rounding" in result.stdout or "bit" in result.stdout  # it is printed
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_fails_takes_no_other_with_it(
    folder: Path, tmp_path: Path
) -> None:
    page, picture = str(tmp_path / "a.html"), str(tmp_path / "a.svg")
    arguments = ("dump.safetensors", "--html", page, "--svg", picture)
    assert to("/dev/full", folder, "explain", *arguments).returncode == 2
    assert Path(page).read_text().startswith("<!doctype html>")
    assert Path(picture).read_text().endswith("</svg>\n")


BENCH = ("bench", "--quick", "--threads", "1", "--filter")


def one_case() -> str:
    """The name of a small case of bench."""
    listed = subprocess.run(
        [str(COMMAND), "bench", "--list", "--filter", "few queries"],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    ).stdout
    return listed.splitlines()[1].strip().split("  ")[0]


def test_measurements_are_not_lost_with_the_table(tmp_path: Path) -> None:
    names = [f"--{kind}" for kind in ("json", "csv", "svg", "markdown")]
    files = [word for name in names for word in (name, str(tmp_path / name))]
    result = to("/dev/full", tmp_path, *BENCH, one_case(), *files)
    assert last_line(result.stderr) == refusal("No space left on device")
    assert result.returncode == 2
    assert json.loads((tmp_path / "--json").read_text())["measurements"]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)


def test_files_of_bench_are_whole_or_not_there(tmp_path: Path) -> None:
    names = [f"--{kind}" for kind in ("json", "csv", "svg", "markdown")]
    for name in names:
        result = limited(64, tmp_path, *BENCH, one_case(), name, "out")
        assert f"bench: {name} out: file must be writable" in result.stderr
        assert result.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_an_answer_of_python_that_does_not_fit_is_no_verdict(folder: Path) -> None:
    """Nor is what is missing of it the fault of the code."""
    for size in (16, 512):
        result = limited(size, folder, "check", "attention.py")
        assert result.returncode == 2
        assert result.stdout == ""
        assert "check: " in last_line(result.stderr)


@pytest.mark.parametrize("arguments, closed", [((), True), (("--json",), False)])
def test_the_module_check_too(
    folder: Path, arguments: tuple[str, ...], closed: bool
) -> None:
    where = ">&-" if closed else "> /dev/full"
    command = [sys.executable, "-m", "multihead.check", "attention.py", *arguments]
    result = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {where}', *command],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
    )
    why = "Bad file descriptor" if closed else "No space left on device"
    assert last_line(result.stderr) == refusal(why)
    assert result.returncode == 2
