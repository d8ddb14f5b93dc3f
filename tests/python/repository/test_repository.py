# SPDX-License-Identifier: MIT
"""What holds for the sources themselves, whatever they compute."""

import ast
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
GENERATED = {".git", ".venv", "build", "__pycache__"}


def files(*suffixes: str) -> list[pathlib.Path]:
    """The text files of the repository whose names end in one of `suffixes`."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in GENERATED and "cache" not in f]
        found += [pathlib.Path(folder, n) for n in names if n.endswith(suffixes)]
    return sorted(found)


CPP = (".h", ".cpp")
CMAKE = ("CMakeLists.txt", ".cmake")
TEXT = (*CPP, *CMAKE, ".py", ".md", ".txt", ".toml", ".json", ".in", ".sh", "run")


def functions(path: pathlib.Path) -> list[tuple[str, int]]:
    """The functions of a file: of each a name and its lines, less its docstring.

    C++ is read by its layout: what is no member defined inside a class starts and
    ends in the first column, and a class ends with `};`.
    """
    lines = path.read_text().splitlines()
    if path.suffix == ".py":
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        tree = ast.walk(ast.parse("\n".join(lines)))
        nodes = [node for node in tree if isinstance(node, kinds)]
        docstrings = [(ast.get_docstring(node) or "").splitlines() for node in nodes]
        return [
            (node.name, node.end_lineno - node.lineno + 1 - len(docstring))
            for node, docstring in zip(nodes, docstrings)
        ]
    found, start = [], 0
    for number, line in enumerate(lines):
        if line == "}":
            found.append((lines[start], number - start + 1))
        elif line and line[0] not in " }#/":
            start = number
    return found


def test_files_are_found():
    names = {path.relative_to(ROOT).as_posix() for path in files(*TEXT)}
    assert {"run", "CMakeLists.txt", "multihead/functional.h"} <= names
    longest = max(
        count for _, count in functions(ROOT / "multihead/attention/attention.cpp")
    )
    assert 10 < longest


@pytest.mark.parametrize(
    "suffixes", [CPP, (".py",), CMAKE, (".md",), (".sh", "run")], ids=str
)
def test_no_file_is_long(suffixes):
    lengths = {str(p): len(p.read_text().splitlines()) for p in files(*suffixes)}
    assert {name: count for name, count in lengths.items() if count > 600} == {}


@pytest.mark.parametrize("suffixes", [CPP, (".py",)], ids=str)
def test_no_function_is_long(suffixes):
    too_long = [
        f"{path}: {name}: {count} lines"
        for path in files(*suffixes)
        for name, count in functions(path)
        if count > 60
    ]
    assert too_long == []


def test_sources_name_their_licence():
    sources = files(*CPP, *CMAKE, ".py", ".sh", "run")
    missing = [str(p) for p in sources if "SPDX" not in p.read_text()[:100]]
    assert missing == []


def test_no_two_tests_have_one_name():
    """pytest imports files of tests by their names alone: of two, one would not run."""
    tests = [path.name for path in files(".py") if path.name.startswith("test_")]
    assert sorted(set(tests)) == sorted(tests)


def test_nothing_that_was_built_is_tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    folders = {part for name in listed.splitlines() for part in name.split("/")[:-1]}
    assert folders & GENERATED == set()


def test_torch_is_pinned_in_one_place():
    pinned = [str(p) for p in files(*TEXT) if re.search(r"torch==\d", p.read_text())]
    assert pinned == [str(ROOT / "requirements/torch.txt")]


def test_the_oldest_supported_torch_is_the_same_everywhere():
    places = {
        "CMakeLists.txt": r"find_package\(LibTorch ([\d.]+)",
        "pyproject.toml": r'"torch>=([\d.]+)"',
        "tools/install.sh": r"minimum_torch=([\d.]+)",
    }
    found = {
        version
        for name, pattern in places.items()
        for version in re.findall(pattern, (ROOT / name).read_text())
    }
    assert len(found) == 1


def test_the_test_extra_is_installed_by_run():
    extra = re.search(
        r"\ntest = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    names = set(re.findall(r'"([\w-]+)', extra.group(1)))
    needed = [ROOT / f"requirements/{name}.txt" for name in ("torch", "test")]
    installed = "\n".join(path.read_text() for path in needed)
    assert names <= set(re.findall(r"^[\w-]+", installed, re.MULTILINE))


def test_kernel_objects_share_nothing():
    """Compiled once per instruction set, they export their kernels and no function
    that the linker could keep in one version for all."""
    build = pathlib.Path(os.environ["MULTIHEAD_BUILD_DIR"])
    objects = sorted(build.glob("multihead/kernels/CMakeFiles/*/cpu/**/*.cpp.o"))
    per_target = [o for o in objects if o.name != "isa.cpp.o"]
    assert len(per_target) >= 3
    for path in per_target:
        symbols = subprocess.run(
            ["nm", "--defined-only", "--extern-only", "--demangle", path],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        folder = path.relative_to(build / "multihead/kernels/CMakeFiles").parts[0]
        target = folder.removeprefix("multihead_kernels_").removesuffix(".dir")
        kernel = rf"multihead::kernels::\w+_{target}\(multihead::kernels::Dtype\)"
        assert symbols
        for symbol in symbols:
            _, kind, name = symbol.split(maxsplit=2)
            assert kind == "T" and re.fullmatch(kernel, name), (path, symbol)
