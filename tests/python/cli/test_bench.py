# SPDX-License-Identifier: MIT
"""`multihead bench`, as its users run it; what it measures, bench_test.cpp tests."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import test_cli
from test_cli import run, run_in_terminal

pytestmark = test_cli.pytestmark

SMALL = ("bench", "--filter", "small call", "--quick", "--threads", "1")


def test_json_has_what_readme_promises() -> None:
    result = run(*SMALL, "--json", "-")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["right"] is True
    assert report["environment"]["torch"]["running"].startswith("2.")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", report["date"])
    names = ("portable", "neon", "avx2", "avx512", "avx512_bf16", "amx")
    assert report["isa"] in names
    assert report["family"] in ("amx", "avx512", "avx512-amd", "avx2", "other")
    assert {"version", "commit", "cpu"} <= report["environment"].keys()
    assert [m["case"] for m in report["measurements"]] == [
        "small call",
        "small call, weights",
    ]
    for measurement in report["measurements"]:
        assert measurement["threads"] == 1
        assert measurement["rate_unit"] == "GFLOP/s"
        peak = measurement["peak"]
        assert peak["before"]["best"] >= peak["before"]["mean"] > 0
        names = [entry["name"] for entry in measurement["contenders"]]
        assert names == ["ours", "nn.MHA", "torch::nn"]
        for entry in measurement["contenders"]:
            assert entry["status"] == "ok"
            seconds = entry["seconds"]
            assert 0 < seconds["best"] <= seconds["lower_quartile"]
            assert seconds["lower_quartile"] <= seconds["median"]
            assert seconds["median"] <= seconds["upper_quartile"]
            assert seconds["rounds"] >= 3
            assert entry["rate"] > 0
            assert 0 < entry["share_of_peak"] < 1
            assert entry["ratio"]["best"] > 0
            assert entry["ratio"]["paired"]["median"] > 0
        assert len(measurement["targets"]) == (report["family"] != "other")
        for target in measurement["targets"]:
            assert target["what"] == "times torch::nn"
            assert target["met"] is (target["reached"] >= target["wanted"])


def test_backward_is_timed_alone() -> None:
    """Of its lengths only one runs at all threads too, unless they are asked for."""
    case = ("--filter", "causal backward d64 L512", "--quick")
    result = run("bench", *case, "--json", "-")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    cases = [m["case"] for m in report["measurements"]]
    assert cases == [f"causal backward d64 L512 {t}" for t in ("f32", "bf16")]
    for measurement in report["measurements"]:
        assert measurement["pass"] == "backward"
        assert measurement["threads"] == 1
        ours, sdpa = measurement["contenders"]
        assert (ours["name"], sdpa["name"]) == ("ours", "SDPA")
        assert ours["status"] == sdpa["status"] == "ok"
        work = 10 * 8 * 64 * 512 * 513 / 2
        assert ours["rate"] * ours["seconds"]["best"] * 1e9 == pytest.approx(work)
        if report["family"] in ("avx512", "avx512-amd"):
            share, ratio = measurement["targets"]
            assert share["what"] == "share of peak"
            assert ratio["what"] == "times SDPA"
            assert ratio["reached"] == pytest.approx(sdpa["ratio"]["best"])


def test_table_shows_each_contender_of_each_case() -> None:
    result = run(*SMALL, LC_ALL="C.UTF-8", TERM="xterm")
    assert result.returncode == 0, result.stderr
    assert "\033" not in result.stdout and result.stderr == ""
    for who in ("ours", "nn.MHA", "torch::nn"):
        assert len(re.findall(rf" {who} .* µs .* %", result.stdout)) == 2
    assert re.search(r"2 measurements, \d of [02] targets met", result.stdout)
    assert re.search(r" · family [a-z0-9-]+ · \d{4}-", result.stdout.splitlines()[0])
    assert run(*SMALL, LC_ALL="C").stdout.isascii()


def test_table_fits_the_terminal() -> None:
    text = run_in_terminal(*SMALL, NO_COLOR="1")
    rows = [line for line in text.splitlines() if "nn.MHA" in line]
    assert rows and max(map(len, rows)) <= 100


def test_files_appear_as_a_whole(tmp_path: Path) -> None:
    names = {kind: tmp_path / f"run.{kind}" for kind in ("json", "csv", "svg")}
    names["json"].write_text("old")
    names["markdown"] = tmp_path / "run.md"
    options = [part for kind, path in names.items() for part in (f"--{kind}", path)]
    result = run(*SMALL, *map(str, options))
    assert result.returncode == 0, result.stderr
    assert "measurements" in result.stdout
    assert sorted(tmp_path.iterdir()) == sorted(names.values())
    assert json.loads(names["json"].read_text())["right"] is True
    with names["csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and all(float(row["best_s"]) > 0 for row in rows)
    root = ElementTree.parse(names["svg"]).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "small call, weights" in "".join(root.itertext())
    assert names["markdown"].read_text().startswith("| case |")


@pytest.mark.parametrize(
    "options, message",
    [
        (("--json", "{}/none/run.json"), "must lie in a readable directory"),
        (("--svg", "{}"), "must be a regular file"),
        (("--csv", "/dev/null"), "must be a regular file"),
        (("--json", "-", "--csv", "-"), "only one output must be printed, got 2"),
    ],
)
def test_unwritable_outputs_are_refused_at_once(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = run(*SMALL, *(option.format(tmp_path) for option in options))
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_list_names_the_cases_and_runs_none() -> None:
    standard, full = (
        run("bench", "--list", *more).stdout for more in ((), ("--full",))
    )
    for name in (
        "causal d128 L512 bf16",
        "512 heads d64 L64 f32",
        "window 512 d64 L4096 f32",
        "small call",
        "backward d64 L2048 f32",
        "step, GPT-2 block, dropout 0.1",
    ):
        assert f"  {name} " in standard
    assert "full d64 L4096 f32" in full and "full d64 L4096 f32" not in standard
    assert set(standard.split("\n")) < set(full.split("\n"))


def test_instruction_sets_can_be_forced() -> None:
    report = json.loads(run(*SMALL, "--json", "-", MULTIHEAD_ISA="portable").stdout)
    assert (report["isa"], report["family"]) == ("portable", "other")
    assert "portable" in report["measurements"][0]["peak"]["unit"]
    result = run(*SMALL, MULTIHEAD_ISA="sse9")
    assert result.returncode == 2 and "MULTIHEAD_ISA" in result.stderr


def test_pytorch_can_be_held_to_the_same_instruction_set() -> None:
    result = run(*SMALL, "--same-isa", "--json", "-", MULTIHEAD_ISA="portable")
    report = json.loads(result.stdout)
    assert report["pytorch_held_to_isa"] is True and report["amx"] is False
    assert report["environment"]["torch"]["isa"] == "DEFAULT"
