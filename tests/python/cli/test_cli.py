# SPDX-License-Identifier: MIT
"""The command `multihead`, as its users run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from terminal import printed_in_terminal

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("MULTIHEAD_BUILD_DIR", ROOT / "build" / "release"))
COMMAND = BUILD / "cli" / "multihead"
FAST = "textbook::multi_head_attention"

pytestmark = pytest.mark.skipif(
    not COMMAND.exists(),
    reason=f"{COMMAND} is not built; MULTIHEAD_BUILD_DIR names the build folder",
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMMAND), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


def verify_json(*arguments: str) -> dict:
    result = run("verify", "--json", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def without_times(report: dict) -> dict:
    for case in report["cases"]:
        del case["seconds"]
    return report


def run_in_terminal(*arguments: str, **environment: str) -> str:
    """Standard output of the command when it is a terminal 100 columns wide."""
    return printed_in_terminal([str(COMMAND), *arguments], 100, **environment)


def test_everything_agrees() -> None:
    result = run("verify", LC_ALL="C.UTF-8")
    assert result.returncode == 0, result.stdout + result.stderr
    last = result.stdout.splitlines()[-1]
    match = re.fullmatch(
        r"(\d+) of (\d+) cases agree; (\d+) bit for bit\. [\d.]+ s", last
    )
    assert match, last
    agree, cases, bits = map(int, match.groups())
    assert agree == cases >= 150
    assert bits >= 80
    assert "✓ agrees" in result.stdout and "✓ close" in result.stdout
    assert "torch::nn::MultiheadAttention with a bool mask: wrong by" in result.stdout
    assert result.stdout.startswith("multihead ")


def test_piped_output_is_plain_text() -> None:
    result = run("verify", "--filter", FAST, LC_ALL="C.UTF-8", TERM="xterm")
    assert "\033" not in result.stdout
    assert result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) < 140


def test_ascii_where_the_locale_has_no_utf8() -> None:
    result = run("verify", "--filter", FAST, LC_ALL="C")
    assert result.stdout.isascii()
    assert "ok agrees" in result.stdout


def test_colour_only_on_a_terminal_without_no_color() -> None:
    arguments = ("verify", "--filter", FAST)
    assert "\033[" in run_in_terminal(*arguments, NO_COLOR="")
    assert "\033[" not in run_in_terminal(*arguments, NO_COLOR="1")
    assert "\033[" not in run_in_terminal(*arguments, TERM="dumb")


def test_table_fits_the_terminal() -> None:
    text = run_in_terminal("verify", "--filter", "GroupedQuery", NO_COLOR="1")
    rows = [line for line in text.splitlines() if "agrees" in line]
    assert rows and max(map(len, rows)) <= 100


def test_json_has_environment_and_cases() -> None:
    report = verify_json("--filter", FAST)
    assert report["agrees"] is True
    assert report["environment"]["torch"]["running"].startswith("2.")
    assert report["environment"]["threads"] >= 1
    groups = {case["group"] for case in report["cases"]}
    assert groups == {FAST}
    case = report["cases"][0]
    assert case["case"] == "no mask"
    assert case["demand"] == "bits"
    assert case["difference"] == 0
    assert case["faults"] == []
    assert case["error"] == case["pytorch_error"] < 1e-6


@pytest.fixture(scope="module")
def everything() -> list[dict]:
    """All cases of `verify`, without their times."""
    return without_times(verify_json())["cases"]


def test_cases_are_named_uniquely(everything: list[dict]) -> None:
    names = {(case["group"], case["case"], case["shapes"]) for case in everything}
    assert len(names) == len(everything)


def test_seed_decides_the_numbers() -> None:
    first, again = (
        without_times(verify_json("--filter", "auto", "--seed", "7")) for _ in range(2)
    )
    assert first == again
    other = without_times(verify_json("--filter", "auto", "--seed", "8"))
    errors, other_errors = (
        [case["error"] for case in report["cases"]] for report in (first, other)
    )
    assert errors != other_errors


def test_filter_changes_no_numbers(everything: list[dict]) -> None:
    some = without_times(verify_json("--filter", "padding"))["cases"]
    assert some == [
        case
        for case in everything
        if "padding" in f"{case['group']}: {case['case']} {case['shapes']}"
    ]
    assert 0 < len(some) < len(everything)


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_filter_that_matches_nothing_is_an_error(command: str) -> None:
    result = run(command, "--filter", "no such case")
    assert result.returncode == 2
    assert 'no case matches "no such case"' in result.stderr


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("verfy",), "verify"),
        (("chekc", "attention.py"), "check"),
        (("help",), "--help"),
        (("--verison",), "--version"),
        (("verify", "--fliter", "x"), "--filter"),
        (("show", "--hed=3"), "--head"),
        (("explain", "x.safetensors", "--num_heads", "2"), "--num-heads"),
        (("draw",), None),
        (("verify", "verfy"), None),
    ],
    ids=str,
)
def test_misspelt_words_are_guessed(
    arguments: tuple[str, ...], meant: str | None
) -> None:
    result = run(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    guesses = re.findall(r"^Did you mean (.*)\?$", result.stderr, re.MULTILINE)
    assert guesses == ([meant] if meant else [])


@pytest.mark.parametrize("command", ["explain", "show", "check"])
def test_the_name_of_a_missing_file_is_guessed(command: str, tmp_path: Path) -> None:
    ending = ".py" if command == "check" else ".safetensors"
    folder = tmp_path / "dumps"
    folder.mkdir()
    (folder / f"layer{ending}").write_text("")
    (folder / f"other{ending}").write_text("")
    # Of all commands one function guesses; `check` asks a Python with PyTorch first.
    some = slice(1) if command == "check" else slice(None)
    for path in ("dumps/leyer", "dumsp/layer", "dumps/LAYER")[some]:
        result = run(command, str(tmp_path / path) + ending)
        assert result.returncode == 2 and result.stdout == ""
        meant = f"did you mean {folder / 'layer'}{ending}?\n"
        assert result.stderr.endswith(f"; {meant}"), result.stderr
    for path in ("dumps/x", "x/layer", "dumps/abcde")[some]:
        result = run(command, str(tmp_path / path) + ending)
        assert result.returncode == 2 and "did you mean" not in result.stderr


def test_a_filter_that_matches_nothing_is_guessed() -> None:
    def said(*arguments: str) -> str:
        result = run(*arguments)
        assert result.returncode == 2 and result.stdout == ""
        return result.stderr

    message = 'multihead: verify: no case matches "Textbok"; did you mean "textbook'
    assert said("verify", "--filter", "Textbok").startswith(message)
    message = 'no case matches "CAUSAL D64"; did you mean "causal d64"?'
    assert message in said("bench", "--filter", "CAUSAL D64")
    standard, full = (
        {line.strip() for line in run("bench", "--list", *more).stdout.splitlines()}
        for more in ((), ("--full",))
    )
    name = sorted(full - standard)[0].split("  ")[0]
    assert f'bench: "{name}" needs --full' in said("bench", "--filter", name)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--nonsense",),
        ("verify", "--nonsense"),
        ("verify", "--seed", "x"),
        ("bench", "--threads", "0"),
        ("bench", "--threads", "two"),
        ("bench", "--rounds", "0"),
        ("bench", "--seconds", "-1"),
        ("show me",),
        ("show", "--color", "pink"),
        ("show", "--width", "7"),
    ],
)
def test_unknown_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert arguments[-1] in result.stderr
    assert result.stdout == ""


def test_running_a_program_is_pythons() -> None:
    done = run("run", "--stats", "x.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "multihead: use python -m multihead run\n"


def test_help_has_examples() -> None:
    for arguments in (
        (),
        ("--help",),
        ("verify", "--help"),
        ("bench", "--help"),
        ("info", "--help"),
        ("show", "--help"),
    ):
        result = run(*arguments)
        assert result.returncode == 0
        assert "Examples:" in result.stdout
    assert "verify" in run().stdout and "info" in run().stdout


def test_version() -> None:
    result = run("--version")
    assert result.returncode == 0
    assert re.fullmatch(
        r"multihead \d+\.\d+\.\d+ \(torch 2\.\d+\.\d+\)\n", result.stdout
    )


def test_info_says_where_it_runs() -> None:
    text = run("info").stdout
    for word in ("torch", "CPU", "threads", "fused", "oneDNN"):
        assert word in text
    report = json.loads(run("info", "--json", MKL_CBWR="AVX2").stdout)
    assert "MKL_CBWR=AVX2" in report["settings"]
    assert "MKL_CBWR=COMPATIBLE" in run("info", MKL_CBWR="COMPATIBLE").stdout
    cpuinfo = Path("/proc/cpuinfo").read_text()
    family = re.search(r"cpu family\s*: (\d+)", cpuinfo)
    if family:  # of x86
        assert f"family {family[1]}, model " in text
        assert report["cpu"]["id"] in text
    assert report["backends"]["exact"] is True
    assert report["backends"]["fused"] is (report["backends"]["why_not_fused"] == "")
    assert report["cpu"]["processors"] >= 1
    assert report["linear"]["pays"] is (report["linear"]["why_not"] == "")
    said = "is recommended" if report["linear"]["pays"] else report["linear"]["why_not"]
    assert said in text
    int8 = report["int8_cache"]
    assert int8["number"] == 1 / 128 and 0.001 < int8["attention"] < 0.02
    assert f"attention within {round(100 * int8['attention'], 1)} %" in text
