# SPDX-License-Identifier: MIT
"""`multihead bench --compare`, with records written by hand: no test knows a time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import test_cli
from test_cli import run

pytestmark = test_cli.pytestmark

WORDS = {"LC_ALL": "C.UTF-8", "TERM": "xterm"}


def contender(name: str, ratio: float) -> dict:
    paired = {"best": ratio, "median": ratio, "rounds": 10}
    paired |= {"lower_quartile": 0.99 * ratio, "upper_quartile": 1.01 * ratio}
    return {
        "name": name,
        "status": "ok",
        "seconds": {"best": 1e-3},
        "ratio": {"best": ratio, "paired": paired},
    }


def measurement(case: str, ratio: float, threads: int = 1) -> dict:
    return {
        "group": "modules",
        "case": case,
        "shapes": "N3 L4 E8 H2 f32",
        "threads": threads,
        "contenders": [contender("ours", 1), contender("nn.MHA", ratio)],
    }


def write_record(file: Path, *measurements: dict, cpu: str = "A", **more: str) -> str:
    record = {
        "environment": {
            "version": "0.1.0",
            "commit": "0123abc",
            "torch": {"running": "2.13.0"},
            "blas": "MKL",
            "cpu": {"model": cpu, "id": ""},
        },
        "date": "2026-01-02",
        "isa": "avx2",
        "pytorch_held_to_isa": False,
        "measurements": measurements,
    }
    file.write_text(json.dumps(record | more))
    return str(file)


def test_two_records_are_compared_without_a_run(tmp_path: Path) -> None:
    then = write_record(
        tmp_path / "then.json",
        *(measurement(name, 2) for name in ("up", "down", "same", "gone")),
        family="avx2",
    )
    now = write_record(
        tmp_path / "now.json",
        measurement("up", 2.5),
        measurement("down", 1.5),
        measurement("same", 2.02),
        measurement("new", 2, threads=2),
    )
    result = run("bench", "--compare", then, now, **WORDS)
    assert (result.returncode, result.stderr) == (0, "")
    text = result.stdout
    for pattern in (
        r"then  .*then\.json: multihead 0\.1\.0, 0123abc · torch 2\.13\.0 · MKL · A · "
        r"kernels for avx2 · family avx2 · 2026-01-02",
        r"  up +1  nn\.MHA +×2\.00 +×2\.50 +2 % +\+25 % +×1\.00 .*faster",
        r"  down +1  nn\.MHA +×2\.00 +×1\.50 +2 % +-25 % +×1\.00 .*slower",
        r"  same .*noise",
        r"only then: gone at 1 thread\n",
        r"only now: new at 2 threads\n",
        r"3 cases in both: 1 faster, 1 slower, 1 within noise\.",
    ):
        assert re.search(pattern, text), pattern
    assert "Another" not in text
    only = run("bench", "--compare", then, now, "--filter", "up", **WORDS).stdout
    assert "1 case in both" in only and "gone" not in only


def test_times_of_another_processor_are_not_compared(tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("a.json", "b.json")]
    then = write_record(names[0], measurement("case", 2))
    now = write_record(names[1], measurement("case", 2), cpu="B")
    text = run("bench", "--compare", then, now, **WORDS).stdout
    assert "Another processor: ratios compare, times do not." in text
    assert re.search(r"  case .* \+0 % +×2\.00 +×2\.00 +noise", text)


def test_a_run_takes_the_cases_and_threads_of_the_record(tmp_path: Path) -> None:
    record = write_record(
        tmp_path / "a.json",
        measurement("small call", 2),
        measurement("small call", 2, threads=1024),
        measurement("gone", 2),
    )
    written = tmp_path / "now.json"
    options = ("bench", "--quick", "--compare", record)
    result = run(*options, "--json", str(written), **WORDS)
    assert result.returncode == 0, result.stderr
    (only,) = json.loads(written.read_text())["measurements"]
    assert (only["case"], only["threads"]) == ("small call", 1)
    assert "now   this run: multihead" in result.stdout
    assert "only then: small call at 1024 threads; gone at 1 thread" in result.stdout
    assert "1 case in both: " in result.stdout
    listed = run(*options, "--list").stdout.splitlines()
    assert [line.split("  ")[1] for line in listed[1:]] == ["small call"]


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "must name a file that can be read, got {}: No such file"),
        ("{", "must be JSON, got {}: parse error at line 1"),
        ("[]", "must be a record that bench --json wrote, got {}: "),
        ('{"date": 1}', "must be a record that bench --json wrote, got {}: key "),
    ],
)
def test_what_is_no_record_is_refused(
    content: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "record.json"
    if content is not None:
        file.write_text(content)
    result = run("bench", "--compare", str(file))
    assert (result.returncode, result.stdout) == (2, "")
    assert "bench: --compare " + message.format(file) in result.stderr


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    gone = write_record(tmp_path / "a.json", measurement("gone", 2))
    for options, message in (
        ((str(tmp_path),), f"can be read, got {tmp_path}, a folder"),
        ((gone,), "must have a case that this version knows, got"),
        ((gone, "--filter", "x"), "a case that --filter and --threads leave, got"),
        ((gone, gone, "--json", "-"), "must name one record where a result is to"),
    ):
        result = run("bench", "--compare", *options)
        assert (result.returncode, result.stdout) == (2, "")
        assert message in result.stderr
    known = write_record(tmp_path / "b.json", measurement("small call", 2))
    result = run("bench", "--compare", known, "--json", "-")
    assert "only one output must be printed, got 2" in result.stderr
