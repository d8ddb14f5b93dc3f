# SPDX-License-Identifier: MIT
"""The examples of long sequences: on several processes they learn what one learns."""

import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from ranks import run

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"
BUILD = pathlib.Path(
    os.environ.get("MULTIHEAD_BUILD_DIR", EXAMPLES.parent / "build/release")
)
PROGRAM = BUILD / "examples/ring_attention"


def long_context():
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    import long_context

    return long_context


def trained(tokens, dtype):
    with contextlib.redirect_stdout(None):
        return long_context().train(tokens, 3, dtype)


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-6)]
)
def test_losses_are_those_of_one_process(dtype, bound):
    """And memory falls as 1/n: on the second process of two, and of an odd length."""
    [one] = run(trained, 1, tokens=257, dtype=dtype)
    assert one["losses"][2] < one["losses"][0] - 0.2
    for record in run(trained, 2, tokens=257, dtype=dtype):
        assert long_context().distance(record, one) < bound
        assert 0.45 < record["allocated"] / one["allocated"] < 0.65


def test_a_lost_piece_is_seen():
    """The bound above is far below what one byte of 257 changes."""
    [one] = run(trained, 1, tokens=257, dtype=torch.float32)
    [other] = run(trained, 1, tokens=256, dtype=torch.float32)
    assert long_context().distance(other, one) > 1e-4


def test_table_and_picture(tmp_path, monkeypatch, capsys):
    example, file = long_context(), tmp_path / "picture.svg"
    records = [
        dict(processes=n, losses=[5.5, 4.5], seconds=0.1)
        | dict(allocated=2**24 // n, resident=2**25 // n)
        for n in (1, 2, 4)
    ]
    monkeypatch.setattr(example, "compare", lambda numbers, options: records)
    arguments = ["--compare", "1", "2", "4", "--out", str(file)]
    assert example.main(arguments) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:6] == ["4", "4.500000", "0.0e+00", "4.0", "0.250", "8.0"]
    bars = ElementTree.parse(file).findall(".//{*}path[@style='stroke-width: 16']")
    widths = [float(re.search(r"h([\d.]+)", bar.get("d"))[1]) for bar in bars]
    assert widths == [300.0, 150.0, 75.0]
    records[2]["losses"] = [5.5, 4.5002]
    assert example.main(arguments) == 1


def losses_in_cpp(world, tokens):
    """What the program's processes print, each started by hand."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place |= {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [str(PROGRAM), str(tokens), "4"],
            env=os.environ | place | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for rank in range(world)
    ]
    try:
        printed = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, printed
    assert not any(out for out, _ in printed[1:])
    return [float(x) for x in re.findall(r"loss ([\d.]+)", printed[0][0])]


@pytest.mark.skipif(
    not PROGRAM.exists(),
    reason=f"{PROGRAM} is not built; MULTIHEAD_BUILD_DIR names the build folder",
)
def test_two_processes_in_cpp():
    """By gloo, without Python, on lengths that do not divide."""
    one, two = (losses_in_cpp(world, 101) for world in (1, 2))
    assert len(one) == 4
    assert one[3] < 0.9 * one[0]
    assert two == pytest.approx(one, rel=1e-5)
