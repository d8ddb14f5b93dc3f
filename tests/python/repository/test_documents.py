# SPDX-License-Identifier: MIT
"""What the documents say: their programs run, their links lead somewhere.

A Python block runs in a namespace of its own. One that the page marks with the
comment START runs in front of each block that follows it on that page.
"""

import functools
import json
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys

import pytest
import test_cli
import torch
from test_packaging import cached

from multihead import _built

ROOT = pathlib.Path(__file__).resolve().parents[3]
BUILD = pathlib.Path(_built.__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
EXAMPLE = "examples/exercise.py"
START = "<!-- starts every snippet below -->"


def blocks(page: pathlib.Path, language: str) -> list[tuple[int, str]]:
    """Line number and text of each fenced block."""
    found, start, opened, common = [], 0, None, ""
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if opened is None and line.startswith("```"):
            opened, start = line.removeprefix("```").strip(), number
        elif opened is not None and line == "```":
            if opened == language:
                text = "\n".join(lines[start : number - 1]) + "\n"
                found.append((start, common + text))
                if lines[start - 2] == START:
                    common = text
            opened = None
    assert opened is None, f"{page}: the block of line {start} does not end"
    return found


SNIPPETS = [
    pytest.param(page, text, id=f"{page.name}:{line}")
    for page in PAGES
    for line, text in blocks(page, "python")
]


def test_snippets_are_found():
    pages = {parameters.values[0].name for parameters in SNIPPETS}
    assert {"README.md", "parity.md"} <= pages


@pytest.mark.parametrize("page, text", SNIPPETS)
def test_python_runs(page, text, tmp_path, monkeypatch):
    described = re.search(r"PyTorch (\d+\.\d+)", page.read_text())
    if page.name == "parity.md" and not torch.__version__.startswith(described[1]):
        pytest.skip(f"it describes {described[0]}, this is {torch.__version__}")
    monkeypatch.chdir(tmp_path)
    # Some put multihead.flash_attn there: it must not stay for the tests that follow.
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    torch.manual_seed(0)
    (tmp_path / "snippet.py").write_text(text)
    runpy.run_path(str(tmp_path / "snippet.py"))


def built(text: str, folder: pathlib.Path) -> pathlib.Path:
    """The program of `text`, compiled and linked as this build does its libraries, and
    by its ccache, which knows it again."""
    if not (BUILD / "compile_commands.json").exists():
        pytest.skip(f"multihead is imported from {BUILD}, which is no build folder")
    entries = json.loads((BUILD / "compile_commands.json").read_text())
    entry = next(e for e in entries if "multihead_diagnosis_objects" in e["command"])
    words = shlex.split(entry["command"])
    launcher = [name for name in (cached("CMAKE_CXX_COMPILER_LAUNCHER"),) if name]
    compiler = [*launcher, *words[: words.index("-o")]]
    folders = [BUILD, BUILD / "diagnosis", pathlib.Path(torch.__file__).parent / "lib"]
    search = [option for f in folders for option in (f"-L{f}", f"-Wl,-rpath,{f}")]
    libraries = ["-lmultihead_diagnosis", "-lmultihead", "-ltorch_cpu", "-lc10"]
    (folder / "main.cpp").write_text(text)
    for command in (
        [*compiler, "-c", "-o", "main.o", "main.cpp"],
        [words[0], "-o", "program", "main.o", *search, *libraries],
    ):
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "program"


def ran(program: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program)], cwd=program.parent, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("page", ["README.md", "docs/explain.md"])
def test_cpp_programs_run(page, tmp_path):
    ((_, text),) = blocks(ROOT / page, "cpp")
    done = ran(built(text, tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_the_cpp_program_fails_for_what_nothing_explains(tmp_path):
    ((_, text),) = blocks(ROOT / "docs/explain.md", "cpp")
    right = "std::get<0>(layer->forward(x, x, x))"
    assert right in text
    done = ran(built(text.replace(right, "at::randn({3, 5, 48})"), tmp_path))
    assert "is wrong, and no fault" in done.stdout
    assert done.returncode == 1


@functools.cache
def drawn(*options: str) -> str:
    """What the command says of the example, to the last unit of rounding."""
    done = subprocess.run(
        [str(test_cli.COMMAND), "check", EXAMPLE, *options],
        cwd=ROOT,
        env={**os.environ, "MULTIHEAD_PYTHON": sys.executable, "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return without_rounding(done.stdout)


def without_rounding(text: str) -> str:
    """Errors such as 8.9e-16 differ from one processor to another."""
    return re.sub(r"\b\d\.\de-\d\d\b", "x.xe-xx", text)


VERDICTS = [
    pytest.param(text, id=f"{page.name}:{line}")
    for page in PAGES
    for line, text in blocks(page, "")
    if text.startswith("✗")
]


@test_cli.pytestmark
@pytest.mark.parametrize("text", VERDICTS)
def test_verdicts_are_those_of_the_example(text):
    shown, _, _ = text.partition("  …")
    assert drawn().startswith(without_rounding(shown))


@test_cli.pytestmark
def test_the_picture_of_a_verdict_is_what_is_drawn():
    picture = (ROOT / "docs/verdict.svg").read_text()
    command = f"multihead check {EXAMPLE} --svg docs/verdict.svg"
    assert drawn("--svg", "-") == without_rounding(picture), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [t for t in targets if not (page.parent / t).exists()] == []


ROOMS = sorted(
    path.relative_to(ROOT).as_posix()
    for top in ("multihead", "diagnosis", "pictures", "cli", "python/multihead/check")
    for path in (ROOT / top).rglob("*")
    if path.is_dir() and path.name not in ("__pycache__", "include", "multihead")
)


@pytest.mark.parametrize("room", ROOMS)
def test_architecture_names_every_room(room):
    text = (ROOT / "docs/architecture.md").read_text()
    assert re.search(rf"\b{room.rsplit('/')[-1]}/", text)
