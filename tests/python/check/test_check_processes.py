# SPDX-License-Identifier: MIT
"""The process that `multihead check` runs code in: what it survives, and what
survives it."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import test_check_command
import test_cli
from test_check_command import KEEP, RIGHT, cause

pytestmark = [test_cli.pytestmark, pytest.mark.alone]
run = test_check_command.run


def alive(number: int) -> bool:
    """Whether there is such a process, zombies aside."""
    try:
        return ") Z " not in pathlib.Path(f"/proc/{number}/stat").read_text()
    except FileNotFoundError:
        return False


GRANDCHILDREN = """
    import os, pathlib, subprocess
    def attend(q, k, v):
        for alone in (False, True):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=alone)
            with open("children", "a") as file:
                print(child.pid, file=file)
        {line}
"""


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("sum(iter(int, 1))", "hangs"),  # in C: no signal handler of Python's runs
        ("return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v", None),
        ("os._exit(1)", "crashes"),
    ],
)
def test_nothing_outlives_the_command(run, tmp_path, line, name):
    done = run(GRANDCHILDREN.format(line=line), "--json", "--time-limit", "1")
    assert done.returncode == 0 if name is None else cause(done) == name
    numbers = (tmp_path / "children").read_text().split()
    assert numbers
    assert_gone([int(number) for number in numbers])
    if name == "hangs":
        (finding,) = json.loads(done.stdout)["findings"]
        assert finding["detail"] == "attention.py, line 8 in attend"
        assert done.stderr.startswith("multihead: checking attention.py\n")


def heed_signals() -> None:
    """What a shell starts in the background ignores them, and so does its offspring."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def start(folder: pathlib.Path, line: str) -> tuple[subprocess.Popen[str], list[int]]:
    """The command at work on GRANDCHILDREN, and the children of its child."""
    text = GRANDCHILDREN.format(line=line)
    (folder / "attention.py").write_text(textwrap.dedent(text))
    process = subprocess.Popen(
        [str(test_cli.COMMAND), "check", "attention.py"],
        cwd=folder,
        env={**os.environ, "MULTIHEAD_PYTHON": sys.executable},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    )
    children = folder / "children"
    until = time.monotonic() + 60
    while not (children.exists() and children.read_text().count("\n") >= 2):
        assert time.monotonic() < until
        time.sleep(0.05)
    return process, [int(number) for number in children.read_text().split()]


def assert_gone(numbers: list[int]) -> None:
    until = time.monotonic() + 5
    while any(map(alive, numbers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, numbers))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM])
def test_ctrl_c_ends_everything(tmp_path, sent):
    process, children = start(tmp_path, "sum(iter(int, 1))")
    process.send_signal(sent)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in errors
    assert_gone(children)


def test_the_process_ends_with_the_command(tmp_path):
    line = "print(os.getpid(), file=open('self', 'w')); sum(iter(int, 1))"
    process, children = start(tmp_path, line)
    until = time.monotonic() + 20
    while not ((tmp_path / "self").exists() and (tmp_path / "self").read_text()):
        assert time.monotonic() < until
    try:
        process.kill()
        assert_gone([int((tmp_path / "self").read_text())])
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_what_was_ignored_stays_so(tmp_path):
    """As nohup has it."""
    text = "import time\ntime.sleep(2)\n" + RIGHT
    (tmp_path / "attention.py").write_text(text)
    process = subprocess.Popen(
        [
            "sh",
            "-c",
            "trap '' HUP && exec \"$0\" check attention.py --mask keep",
            test_cli.COMMAND,
        ],
        cwd=tmp_path,
        env={**os.environ, "MULTIHEAD_PYTHON": sys.executable},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(1)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0


def test_descriptors_may_be_closed_and_used_again(run, tmp_path):
    lines = "    os.closerange(3, 256)\n    mine = open('mine', 'w')\n    scores ="
    done = run("import os\n" + RIGHT.replace("    scores =", lines, 1), *KEEP)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "mine").read_text() == ""


def test_a_child_that_returns_checks_nothing(run, tmp_path):
    fork = """
    with open("calls", "a") as file:
        print(os.getpid(), file=file)
    os.fork()
    scores ="""
    done = run(
        "import os\n" + RIGHT.replace("\n    scores =", fork, 1), "--json", *KEEP
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(set((tmp_path / "calls").read_text().split())) == 1


def test_there_is_no_terminal_to_ask(tmp_path):
    """Who asks it all the same is not stopped, but told."""
    text = "import getpass\ndef attend(q, k, v):\n    getpass.getpass()\n"
    (tmp_path / "attention.py").write_text(text)
    terminal = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    done = subprocess.run(
        [sys.executable, "-c", terminal, test_cli.COMMAND, "check", "attention.py"],
        cwd=tmp_path,
        env={**os.environ, "MULTIHEAD_PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "EOFError" in done.stdout


def test_our_own_errors_are_not_the_codes():
    program = """
        from multihead.check import __main__ as command
        def examine(*arguments):
            raise RuntimeError("a bug\\nof ours")
        command.examine = examine
        command.answer(1, "", ["attention.py"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == (
        "report 2\ncheck: multihead itself could not go on (RuntimeError: a bug)\n"
    )
    assert done.stderr == ""
