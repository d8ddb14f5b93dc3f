# SPDX-License-Identifier: MIT
"""examples/learn/*.ipynb: every cell runs, shows what the notebook says it shows, and the
exercises accept right answers and nothing else."""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "examples/learn"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
OFFLINE = """
import runpy, sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise OSError(f"a notebook asks the network: {arguments}")
sys.addaudithook(refuse)
runpy.run_path("execute.py", run_name="__main__")
"""
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return json.loads(path.read_text())


def code_cells(path):
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


@functools.cache
def executed(path, *options):
    """The outputs of each code cell, run by a fresh interpreter without network."""
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, *options, path.name],
        cwd=FOLDER,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def texts(outputs):
    """What a cell shows, errors included; of a page, its headline, without the cases
    that are right bit for bit: how many is a matter of the processor's BLAS."""
    found = []
    for output in outputs:
        data = output.get("data", {})
        found += ["".join(output.get("text", data.get("text/plain", [])))]
        page = "".join(data.get("text/html", []))
        headlines = re.findall(r"<h3>.*?</h3>", page)
        found += [re.sub(r", bit\s+for bit in \d+", "", line) for line in headlines]
        if output["output_type"] == "error":
            found += [f"{output['ename']}: {output['evalue']}"]
    return found


def test_notebooks_are_found():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["1_", "2_", "3_", "4_"]
    page = (FOLDER.parents[1] / "docs/learn.md").read_text()
    assert all(f"(../examples/learn/{path.name})" in page for path in NOTEBOOKS)


@each_notebook
def test_a_notebook_is_one_of_format_4_5(path):
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)
    keys = {"cell_type", "id", "metadata", "source"}
    for cell in notebook["cells"]:
        more = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert set(cell) == keys | more


@each_notebook
def test_cells_show_what_the_notebook_says(path):
    again = f"python examples/learn/execute.py --write examples/learn/{path.name}"
    for cell, outputs in zip(code_cells(path), executed(path), strict=True):
        assert texts(outputs) == texts(cell["outputs"]), again
        assert all(output["output_type"] != "error" for output in outputs)


@each_notebook
def test_an_exercise_is_empty_and_then_checked(path):
    """The reader's cell holds no answer: what follows it does not pass until there is
    one."""
    cells = code_cells(path)
    exercises = [i for i, cell in enumerate(cells) if "exercise" in cell["metadata"]]
    assert exercises
    for i in exercises:
        name = cells[i]["metadata"]["exercise"][-1]
        check = "".join(cells[i + 1]["source"])
        assert check == f"multihead.check({name})" or check.startswith("heads = split")
        solved, empty = executed(path)[i + 1], executed(path, "--as-is")[i + 1]
        assert re.search(r"passed|right", "".join(texts(solved)))
        assert not re.search(r"passed|right$", "".join(texts(empty)))


@each_notebook
def test_links_lead_somewhere(path):
    for cell in read(path)["cells"]:
        if cell["cell_type"] == "markdown":
            targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", "".join(cell["source"]))
            assert [t for t in targets if not (FOLDER / t).exists()] == []


def test_faults_are_found_and_named():
    """What the notebooks plant, by the names that a check gives."""
    planted = [
        text.split()
        for path in NOTEBOOKS
        for cell, outputs in zip(code_cells(path), executed(path), strict=True)
        if "for suspect in" in "".join(cell["source"])
        for text in texts(outputs)
    ]
    assert planted == [
        ["scale_by_length", "mask_after_softmax", "mask_inverted"],
        ["heads_not_transposed", "merge_not_transposed", "scale_by_embed_dim"],
        ["groups_tiled", "groups_truncated"],
    ]
    pages = FOLDER.parents[1] / "docs/faults"
    assert all((pages / f"{name}.md").exists() for names in planted for name in names)
