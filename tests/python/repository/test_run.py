# SPDX-License-Identifier: MIT
"""What ./run says before it sets anything up, from a folder with a space."""

import os
import pathlib
import pty
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]


def copy_run(checkout: pathlib.Path) -> None:
    shutil.copy(ROOT / "run", checkout)
    shutil.copytree(ROOT / "tools", checkout / "tools")


@pytest.fixture
def run(tmp_path):
    """Calls a copy of ./run, in a checkout of nothing else; (status, out, err)."""
    checkout = tmp_path / "a checkout"
    checkout.mkdir()
    copy_run(checkout)

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
        "sanitize",
        "compilers",
        "cross",
        "lint",
        "format",
        "docs",
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
    assert sorted(path.name for path in checkout.iterdir()) == ["kept", "run", "tools"]


# The commands of a machine without a browser, which is all that ./run finds there. Its
# compiler finds no header; its apt-get installs nothing, and writes down its arguments
# and what was said before.
TOOLS = "awk bash cat dirname flock mkdir mktemp nproc readlink rm sh touch true"
FAKES = {
    "c++": "#!/bin/sh\nexit 1\n",
    "python3": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
    "sudo": '#!/bin/sh\nshift\nexec "$@"\n',
    "apt-get": '#!/bin/sh\necho "$*" >> "$LOG"\ncat "$SAID" >> "$LOG.said"\n',
}
NEEDED = "g++ libcli11-dev libgtest-dev libutf8proc-dev nlohmann-json3-dev"


@pytest.fixture
def setup(tmp_path):
    """Starts ./run of an empty checkout on a machine where packages are missing.

    Returns what it said and the arguments of each apt-get. It ends after that: the
    Python that it shall use is none. `answer` comes from a terminal, unless None.
    """
    checkout, fakes = tmp_path / "a checkout", tmp_path / "fakes"
    log, said = tmp_path / "log", tmp_path / "said"
    checkout.mkdir()
    fakes.mkdir()
    copy_run(checkout)
    for name, text in FAKES.items():
        (fakes / name).write_text(text)
        (fakes / name).chmod(0o755)
    for name in TOOLS.split():
        (fakes / name).symlink_to(shutil.which(name))
    kept = {"PATH": str(fakes), "MULTIHEAD_PYTHON": "/none"}
    kept |= {"LOG": str(log), "SAID": str(said)}

    def call(*arguments, answer=None, **variables):
        log.unlink(missing_ok=True)
        command = [str(checkout / "run"), *arguments]
        if answer is None:
            with said.open("w") as file:
                done = subprocess.run(
                    command,
                    env=kept | variables,
                    stdin=subprocess.DEVNULL,
                    stderr=file,
                )
            status = done.returncode
        else:
            status = at_terminal(command, said, answer, kept | variables)
        assert status == 1
        ran = log.read_text().splitlines() if log.exists() else []
        return said.read_text(), ran

    return call


def at_terminal(command, said: pathlib.Path, answer: str, variables) -> int:
    """Runs the command where somebody types `answer`; what it prints goes to `said`."""
    leader, follower = pty.openpty()
    os.write(leader, answer.encode())
    with subprocess.Popen(
        command, env=variables, stdin=follower, stdout=follower, stderr=follower
    ) as process:
        os.close(follower)
        with said.open("wb", buffering=0) as file:
            while True:
                try:
                    block = os.read(leader, 4096)
                except OSError:  # Linux: the other end is closed
                    break
                file.write(block)
    os.close(leader)
    return process.returncode


QUESTION = "May apt-get install that, as root? [y/N]"


def test_a_terminal_is_asked_and_no_is_respected(setup):
    for answer in ("n\n", "\n", "\x04"):
        said, ran = setup("verify", answer=answer)
        assert f"missing here: {NEEDED}" in said
        assert said.count(QUESTION) == 1 and ran == []
        assert f"apt-get install {NEEDED}" in said  # how to do it by hand


def test_one_question_covers_the_browser_of_the_tests(setup):
    said, ran = setup("test", answer="y\n")
    assert said.count(QUESTION) == 1
    assert f"missing here: {NEEDED} chromium librsvg2-2" in said
    installed = [line for line in ran if line != "update"]
    assert [line.split()[3:] for line in installed] == [
        [*NEEDED.split(), "ccache"],
        ["chromium", "librsvg2-2"],
    ]
    # It is looked for once; what the build needs stays needed.
    assert "chromium" not in setup("test", answer="n\n")[0]


@pytest.mark.parametrize(
    ("arguments", "answer", "variables"),
    [
        (("--yes", "verify"), "", {}),
        (("verify",), "", {"CI": "true"}),
        (("verify",), None, {}),
    ],
    ids=["--yes", "CI=true", "no terminal"],
)
def test_without_a_question_it_says_what_it_does_first(
    setup, tmp_path, arguments, answer, variables
):
    said, ran = setup(*arguments, answer=answer, **variables)
    assert QUESTION not in said
    assert ran == ["update", f"install -y --no-install-recommends {NEEDED} ccache"]
    before = (tmp_path / "log.said").read_text()
    assert f"installing, with apt-get as root: {NEEDED} ccache" in before
