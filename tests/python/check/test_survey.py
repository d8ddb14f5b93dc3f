# SPDX-License-Identifier: MIT
"""`multihead check FOLDER`, as its users run it."""

from __future__ import annotations

import json
import sys
import textwrap
import time

import pytest
import test_cli
from test_check_command import RIGHT, WRONG, command

pytestmark = test_cli.pytestmark

INVERTED = RIGHT.replace("mask == 0", "mask != 0").replace(
    "    scores =",
    '    """mask: True = may attend, False = masked out"""\n    scores =',
    1,
)
HANGS = """
import time
def attention(q, k, v):
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    while True:
        time.sleep(1)
    return weights @ v
"""
CRASHES = HANGS.replace("import time", "import os").replace(
    "    while True:\n        time.sleep(1)\n", "    os.abort()\n"
)


@pytest.fixture
def survey(tmp_path):
    """Writes files into a folder and checks it by the command."""

    def survey(*options: str, **files: str):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return command("check", ".", *options, cwd=tmp_path)

    return survey


def verdicts(done) -> dict[str, str]:
    found = json.loads(done.stdout)["targets"]
    return {target["file"]: target["verdict"] for target in found}


def test_all_right(survey):
    done = survey(a=RIGHT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a.py:5" in done.stdout and "1 candidate in 1 file" in done.stdout


def test_a_table_of_what_is_wrong(survey):
    done = survey(a=RIGHT, b=WRONG, c=INVERTED)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    places = [line.split()[0] for line in lines[1:4]]
    assert set(places[:2]) == {"b.py:5", "c.py:5"} and places[2] == "a.py:5"
    assert "wrong: scale_not_root" in done.stdout
    assert "MH302 scale_not_root  b.py:5" in done.stdout
    assert "Divide q·k by the square root" in done.stdout


def test_json(survey):
    done = survey("--json", a=RIGHT, b=WRONG)
    assert done.returncode == 1 and verdicts(done)["b.py"] == "wrong"
    wrong = json.loads(done.stdout)["targets"][0 if "b.py" in done.stdout[:200] else 1]
    (fault,) = next(
        t for t in json.loads(done.stdout)["targets"] if t["file"] == "b.py"
    )["faults"]
    assert (fault["code"], fault["name"]) == ("MH302", "scale_not_root")
    assert wrong["seconds"] > 0


def test_one_that_misbehaves_does_not_keep_the_others(survey):
    start = time.monotonic()
    done = survey("--json", "--time-limit", "3", a=RIGHT, b=HANGS, c=CRASHES, d=WRONG)
    found = verdicts(done)
    assert found["d.py"] == "wrong" and found["a.py"].startswith("right")
    assert found["b.py"] == found["c.py"] == "not judged"
    assert time.monotonic() - start < 60


def test_the_budget_ends_it(survey):
    start = time.monotonic()
    files = {f"a{i}": HANGS + f"\n# {i}\nx = {i}\n" for i in range(8)}
    files = {n: t.replace("sleep(1)", f"sleep(1.{n[1:]})") for n, t in files.items()}
    done = survey("--json", "--budget", "8", **files)
    assert time.monotonic() - start < 35  # of 48 without it, on an idle machine
    assert done.returncode == 2
    assert "not reached" in verdicts(done).values()


def test_nothing_to_check(survey):
    done = survey(a="x = 1\n")
    assert done.returncode == 2 and done.stdout == ""
    assert "must have attention in it" in done.stderr
    done = survey("--json", a="x = 1\n")
    assert done.returncode == 2 and json.loads(done.stdout)["targets"] == []


def test_a_python_without_torch_is_nobodys_fault(tmp_path):
    (tmp_path / "a.py").write_text(RIGHT)
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    other.chmod(0o755)
    done = command("check", ".", cwd=tmp_path, MULTIHEAD_PYTHON=str(other))
    assert done.returncode == 2 and done.stdout == ""
    assert "MULTIHEAD_PYTHON names another Python" in done.stderr


def test_sarif(survey, tmp_path):
    done = survey("--sarif", "out.sarif", a=RIGHT, b=WRONG)
    assert done.returncode == 1
    log = json.loads((tmp_path / "out.sarif").read_text())
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    (rule,) = run["tool"]["driver"]["rules"]
    (result,) = run["results"]
    assert rule["id"] == result["ruleId"] == "scale_not_root"
    assert rule["help"]["markdown"] and result["level"] == "error"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "b.py"
    assert place["region"]["startLine"] == 5


def test_pages_of_rules(tmp_path):
    (tmp_path / "b.py").write_text(WRONG)
    done = command(
        "check",
        ".",
        "--sarif",
        "-",
        cwd=tmp_path,
        MULTIHEAD_DOCS_URL="https://x.org/docs",
    )
    (rule,) = json.loads(done.stdout)["runs"][0]["tool"]["driver"]["rules"]
    assert rule["helpUri"] == "https://x.org/docs/faults/scale_not_root.md"


def test_options_that_do_not_fit(survey, tmp_path):
    done = survey("--svg", "x.svg", a=RIGHT)
    assert done.returncode == 2 and "--svg" in done.stderr
    done = command("check", "a.py", "--sarif", "x.sarif", cwd=tmp_path)
    assert done.returncode == 2 and "--sarif" in done.stderr
