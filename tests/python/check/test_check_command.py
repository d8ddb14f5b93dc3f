# SPDX-License-Identifier: MIT
"""`multihead check` and `multihead explain`, as their users run them."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
from xml.etree import ElementTree

import pytest
import test_cli
import torch
from safetensors.torch import save_file

pytestmark = test_cli.pytestmark

RIGHT = """
import torch
from torch import nn

def attend(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    return scores.softmax(-1) @ v
"""
WRONG = RIGHT.replace(" ** 0.5", "")
KEEP = ("--mask", "keep")


@pytest.fixture
def run(tmp_path):
    """Writes attention.py and runs the command there, by this Python."""

    def run(text: str, *options: str, **variables: str):
        (tmp_path / "attention.py").write_text(textwrap.dedent(text))
        return command("check", "attention.py", *options, cwd=tmp_path, **variables)

    return run


def command(*arguments, cwd, **variables) -> subprocess.CompletedProcess[str]:
    environment = {"MULTIHEAD_PYTHON": sys.executable, "LC_ALL": "C.UTF-8", **variables}
    return subprocess.run(
        [str(test_cli.COMMAND), *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def cause(done: subprocess.CompletedProcess[str], status: int = 1) -> str:
    assert done.returncode == status, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] is False
    return report["cause"]


def test_right_code_passes(run):
    done = run(RIGHT, *KEEP)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("✓ attend")
    assert "\033" not in done.stdout


def test_wrong_code_does_not(run, tmp_path):
    files = ("--html", "report.html", "--svg", "report.svg")
    done = run(WRONG, "--json", *files)
    assert cause(done) == "scale_not_root"
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "scale_not_root" in page
    picture = ElementTree.parse(tmp_path / "report.svg")
    text = " ".join("".join(t.itertext()) for t in picture.iterfind(".//{*}text"))
    assert text.startswith("$ multihead check attention.py ✗ attend")


def test_options_reach_python(run):
    polarity = RIGHT.replace("mask == 0", "mask != 0")
    assert run(polarity, "--mask", "blocked").returncode == 0
    assert cause(run(polarity, "--mask", "keep", "--json")) == "mask_inverted"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mask", "both"), "mask must be"),
        (("--num-heads", "0"), "num_heads must be at least 1, got 0"),
        (("--num-heads", "two"), "num-heads"),
        (("--time-limit", "0"), "time-limit"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_wrong_options(run, options, said):
    done = run(RIGHT, *options)
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and len(done.stderr.splitlines()) <= 2


def test_wrong_targets(tmp_path):
    for target in ("nowhere.py:attend", "."):
        done = command("check", target, cwd=tmp_path)
        assert done.returncode == 2 and done.stdout == ""
        # On a busy machine a line of progress comes first.
        sentence = done.stderr.splitlines()[-1]
        assert sentence.startswith("multihead: check: ") and target[:7] in sentence


CRASHES = {
    "ctypes.string_at(0)": "Segmentation fault",
    "os.abort()": "Aborted",
    "os.kill(os.getpid(), 9)": "SIGKILL",
    "os._exit(0)": "with status 0",
    "os._exit(1)": "with status 1",
    "os._exit(2)": "with status 2",
}


@pytest.mark.parametrize("line", CRASHES)
def test_crashes_are_findings(run, line):
    done = run(f"import ctypes, os\ndef attend(q, k, v):\n    {line}\n", "--json")
    assert cause(done) == "crashes"
    (finding,) = json.loads(done.stdout)["findings"]
    assert CRASHES[line] in finding["sentence"]
    if "string_at" in line or "abort" in line:
        assert finding["detail"] == "attention.py, line 3 in attend"


RAISES = """
    import sys, time, torch
    def attend(q, k, v):
        {line}
"""


@pytest.mark.parametrize(
    ("line", "name", "status"),
    [
        ("sys.exit(0)", "raises", 1),
        ("import no_such_package", "missing_package", 2),
        ("time.sleep(100)", "hangs", 1),
    ],
)
def test_misbehaviour_is_a_finding(run, line, name, status):
    """What would end or stop the process; the rest is among the attempts."""
    done = run(RAISES.format(line=line), "--json", "--time-limit", "2")
    assert cause(done, status) == name
    assert "Traceback" not in done.stderr + done.stdout


def test_a_file_may_stop_early(run):
    done = run(
        RIGHT + "\nassert torch.equal(attend(*[torch.ones(2, 2)] * 3), torch.ones(1))",
        *KEEP,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The file's own assertion fails (attention.py, line 11)." in done.stdout


def test_files_named_like_modules_do_no_harm(run, tmp_path):
    for name in ("random", "torch", "json", "multihead"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong file')")
    assert run(RIGHT, *KEEP).returncode == 0


def test_a_python_without_torch_is_said(run, tmp_path):
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    other.chmod(0o755)
    done = run(RIGHT, MULTIHEAD_PYTHON=str(other))
    assert done.returncode == 2 and done.stdout == ""
    said = done.stderr.splitlines()[-1]
    assert said.startswith("multihead: check: ")
    assert said.endswith("has no PyTorch (MULTIHEAD_PYTHON names another Python)")


def test_a_python_that_is_none_is_said(run):
    done = run(RIGHT, MULTIHEAD_PYTHON="/nowhere/python")
    assert done.returncode == 2
    assert "cannot start /nowhere/python" in done.stderr
    done = run(RIGHT, MULTIHEAD_PYTHON="true")
    assert done.returncode == 2
    assert "true did not come up" in done.stderr


def test_the_active_environment_comes_before_python3(run, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/false")
    done = run(RIGHT, MULTIHEAD_PYTHON="", VIRTUAL_ENV=str(tmp_path))
    assert f"{tmp_path}/bin/python did not come up" in done.stderr


# ---- Dumps ------------------------------------------------------------------


def dump(path: pathlib.Path, wrong: bool = False, **metadata: str) -> str:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    scores = q @ k.transpose(-1, -2) / (8 if wrong else 8**0.5)
    tensors = {"query": q, "key": k, "value": v, "out": scores.softmax(-1) @ v}
    save_file(tensors, path, metadata=metadata or None)
    return path.name


def test_explain(tmp_path):
    right = dump(tmp_path / "right.safetensors")
    done = command("explain", right, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("✓ right.safetensors is right")
    wrong = dump(tmp_path / "wrong.safetensors", wrong=True)
    assert cause(command("explain", wrong, "--json", cwd=tmp_path)) == "scale_not_root"
    files = ("--svg", "a.svg", "--html", "a.html")
    text = command("explain", wrong, *files, cwd=tmp_path).stdout
    assert text.startswith(
        "✗ wrong.safetensors is wrong: it has one fault, in the scores."
    )
    assert "explain wrong.safetensors" in (tmp_path / "a.svg").read_text()
    assert "it has one fault" in (tmp_path / "a.html").read_text()


def test_explain_says_what_it_cannot_read(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    empty = tmp_path / "empty.safetensors"
    save_file({"something": torch.ones(2)}, empty)
    for name in ("nowhere.safetensors", "broken.safetensors", "empty.safetensors"):
        done = command("explain", name, cwd=tmp_path)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("multihead: ")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("sub_command", ["check", "explain"])
def test_outputs_are_opened_before_anything_runs(sub_command, tmp_path):
    (tmp_path / "attention.py").write_text("open('ran', 'w')")
    target = "attention.py" if sub_command == "check" else "none.safetensors"

    def refused(*options: str) -> str:
        done = command(sub_command, target, *options, cwd=tmp_path)
        assert done.returncode == 2 and done.stdout == ""
        assert not (tmp_path / "ran").exists()
        return done.stderr

    where = f"multihead: {sub_command}: --svg"
    message = f"{where} must be a regular file, got /dev/null, a device"
    assert refused("--svg", "/dev/null").startswith(message)
    assert refused("--svg", ".") == f"{where} must be a regular file, got ., a folder\n"
    assert refused("--svg", "no/a.svg").startswith(
        f"{where} no/a.svg: file must lie in"
    )
    for options in (("--json", "--svg", "-"), ("--html", "-", "--svg", "-")):
        assert "only one output must be printed, got 2" in refused(*options)


def test_outputs_may_be_printed_or_lie_behind_a_link(tmp_path):
    name = dump(tmp_path / "a.safetensors")
    done = command("explain", name, "--svg", "-", cwd=tmp_path)
    assert done.returncode == 0 and ElementTree.fromstring(done.stdout).tag.endswith(
        "svg"
    )
    (tmp_path / "link.html").symlink_to("page.html")
    (tmp_path / "page.html").write_text("old")
    done = command("explain", name, "--html", "link.html", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("✓")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_files_of_the_other_command(run, tmp_path):
    def said(*arguments: str) -> str:
        done = command(*arguments, cwd=tmp_path)
        assert done.returncode == 2 and done.stdout == ""
        return done.stderr

    assert "a.py is code: multihead check a.py" in said("explain", "a.py")
    assert "a.npz must be .safetensors" in said("explain", "a.npz")
    assert "a.pt must be .safetensors" in said("show", "a.pt")
    name = "a.safetensors"
    assert f"{name} is a dump: multihead explain {name}" in said("check", name)


HOSTILE = "8\x1b]0;title\x07\x9b31m\u202e"


def test_nothing_in_a_dump_commands_the_terminal(tmp_path):
    names = [
        dump(tmp_path / "name.safetensors", wrong=True, name=HOSTILE + "\nsecond line"),
        dump(tmp_path / "fact.safetensors", is_causal=HOSTILE),
        dump(tmp_path / "other\x1b[31m.safetensors", mask=HOSTILE),
    ]
    save_file({HOSTILE: torch.ones(2)}, tmp_path / "tensor.safetensors")
    for name in [*names, "tensor.safetensors"]:
        for sub_command in ("explain", "show"):
            done = command(sub_command, name, cwd=tmp_path)
            said = done.stdout + done.stderr
            assert said and not set(said) & set("\x1b\x07\x9b\u202e")
    text = command("explain", names[0], cwd=tmp_path).stdout
    assert "8\\x1b]0;title\\x07\\x9b31m\\u202e\\nsecond line" in text


def test_file_names_need_not_be_utf8(tmp_path):
    name = os.fsdecode(b"a\xff.safetensors")
    os.rename(tmp_path / dump(tmp_path / "a.safetensors"), tmp_path / name)
    done = command("explain", name, "--svg", "a.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a\\xff.safetensors" in (tmp_path / "a.svg").read_text()
    name = os.fsdecode(b"a\xff.py")
    (tmp_path / name).write_text(RIGHT)
    assert command("check", name, *KEEP, cwd=tmp_path).returncode == 0


def test_a_case_may_be_too_large_to_explain_but_not_to_show(tmp_path):
    names = ("query", "key", "value", "out")
    tensors = {name: torch.randn(1, 8, 4096, 4) for name in names}
    save_file(tensors, tmp_path / "a.safetensors")
    done = command("explain", "a.safetensors", cwd=tmp_path)
    assert done.returncode == 2 and "must make no more than 67108864" in done.stderr
    assert command("show", "a.safetensors", cwd=tmp_path).returncode == 0


def test_both_speak_to_other_terminals(run, tmp_path):
    assert run(RIGHT, *KEEP, LC_ALL="C").stdout.startswith("ok attend")
    name = dump(tmp_path / "a.safetensors")
    assert command("explain", name, cwd=tmp_path, LC_ALL="C").stdout.isascii()
