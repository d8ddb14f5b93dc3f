# SPDX-License-Identifier: MIT
"""The floor plan, read from #includes and imports: who may look at whom.

A folder's own files are its public face, its sub-folders are private rooms. Nothing
runs in a circle between rooms, and nothing runs against BELOW.
"""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
TREES = (
    *("multihead", "diagnosis", "pictures", "reference", "cli", "python/multihead"),
    "examples",
)

# Public headers that are included by a name other than their path.
PUBLIC = {"multihead/": "diagnosis/include/multihead/"}

# Rooms and headers that are open to others than their neighbours, and why.
OPEN = {
    "multihead/kernels": "the command measures them, the tests link nothing else",
    "multihead/text": "library, diagnosis and command print alike",
    "diagnosis/include/multihead": "diagnosis' face, as it is installed",
    "multihead/safetensors/file.h": "the command's files are whole or as they were, too",
    "multihead/attention/fields.h": "pictures take a call's options by the one list",
    "diagnosis/dump": "`show` reads the dumps that `explain` reads",
}

# A room, the rooms that it never looks at, and why.
BELOW = [
    (
        "multihead",
        ("diagnosis", "pictures", "reference", "cli", "python"),
        "others look down on it",
    ),
    ("multihead/kernels", ("multihead/",), "pointers, sizes, strides: no torch"),
    ("multihead/text", ("multihead/",), "words; no attention"),
    ("multihead/safetensors", ("multihead/attention", "multihead/layer"), "a format"),
    ("multihead/textbook", ("multihead/attention", "multihead/layer"), "is to be read"),
    (
        "multihead/attention",
        ("multihead/layer", "multihead/ops", "multihead/kernels/cpu"),
        "calls operators through the dispatcher; modules and operators call it",
    ),
    ("multihead/layer", ("multihead/ops", "multihead/kernels"), "operators call it"),
    (
        "multihead/linear",
        ("multihead/layer", "multihead/install", "multihead/ops", "multihead/kernels"),
        "layers and install call it",
    ),
    ("multihead/install", ("multihead/ops", "multihead/kernels"), "operators call it"),
    (
        "diagnosis",
        ("pictures", "reference", "cli", "python"),
        "commands and Python call it",
    ),
    (
        "pictures",
        ("diagnosis", "reference", "cli", "python"),
        "commands and Python call it",
    ),
    (
        "reference",
        ("multihead", "diagnosis", "pictures", "cli", "python"),
        "shares no code",
    ),
    ("cli/terminal", ("cli/",), "any command writes with it"),
    (
        "python/multihead/check/sandbox",
        tuple(
            f"python/multihead/check/{room}"
            for room in ("subject", "calls", "capture", "reading")
        ),
        "contains foreign code, knows no attention",
    ),
]

# The definition by matrix products, beside the loops, which are free of torch.
TENSORS = [ROOT / "reference/tensors.h", ROOT / "reference/tensors.cpp"]

# What is not yet as the rules say, each with its reason.
KNOWN = {
    "output.cpp looks at multihead/safetensors/file.h": "both write files whole",
}


def folder(path: str) -> str:
    return path.rpartition("/")[0]


def cpp_targets(root: pathlib.Path, path: pathlib.Path) -> list[str]:
    found = re.findall(r'^\s*#include "([^"]+)"', path.read_text(), re.MULTILINE)
    for number, name in enumerate(found):
        for prefix, place in PUBLIC.items():
            other = name.replace(prefix, place, 1)
            if not (root / name).exists() and (root / other).exists():
                found[number] = other
    return found


def python_targets(root: pathlib.Path, path: pathlib.Path) -> list[str]:
    """The files of `root` that a module imports by a relative name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            place = path.parents[node.level - 1].joinpath(
                *(node.module or "").split(".")
            )
            for name in node.names:
                options = [place / f"{name.name}.py", place / name.name / "__init__.py"]
                options += [place.with_suffix(".py"), place / "__init__.py"]
                target = next((option for option in options if option.exists()), None)
                if target:
                    found.append(target.relative_to(root).as_posix())
    return found


def arrows(root: pathlib.Path) -> set[tuple[str, str]]:
    """File to file, both from `root`; those that stay in their folder left out."""
    found = set()
    for tree in TREES:
        for path in sorted((root / tree).rglob("*")):
            name = path.relative_to(root).as_posix()
            targets = []
            if path.suffix in (".h", ".cpp"):
                targets = cpp_targets(root, path)
            elif path.suffix == ".py":
                targets = python_targets(root, path)
            found |= {(name, t) for t in targets if folder(t) != folder(name)}
    return found


def within(path: str, room: str) -> bool:
    return f"{path}/".startswith(room if room.endswith("/") else f"{room}/")


def is_private(source: str, target: str) -> bool:
    """Whether `target` lies in a sub-room that `source` does not share."""
    room = folder(target)
    is_open = room in OPEN or target in OPEN
    return not within(source, folder(room)) and not is_open and "/" in room


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The rooms of some circle, or none."""

    def visit(room: str, way: list[str]) -> list[str]:
        if room in way:
            return [*way[way.index(room) :], room]
        if room in done:
            return []
        for other in sorted(graph.get(room, ())):
            if found := visit(other, [*way, room]):
                return found
        done.add(room)
        return []

    done: set[str] = set()
    return next((found for room in sorted(graph) if (found := visit(room, []))), [])


def breaches(root: pathlib.Path) -> set[str]:
    found, graph = set(), {}
    for source, target in arrows(root):
        here, there = folder(source), folder(target)
        if within(target, "tests"):
            found.add(f"{source} looks at {target}: nothing but tests needs tests")
        elif is_private(source, target) and not within(here, "python"):
            found.add(f"{source} looks at {target}: {there} is private")
        for room, never, why in BELOW:
            if within(source, room) and not within(target, room):
                if any(within(target, other) for other in never):
                    found.add(f"{source} looks at {target}: {room} does not: {why}")
        if not within(here, there) and not within(there, here):
            graph.setdefault(here, set()).add(there)
    if rooms := circle(graph):
        found.add(f"a circle: {' -> '.join(rooms)}")
    return found


def test_the_rooms_keep_to_the_plan():
    assert len(arrows(ROOT)) > 200
    new = [b for b in sorted(breaches(ROOT)) if not re.search("|".join(KNOWN), b)]
    assert new == []


@pytest.mark.parametrize("tree", ["multihead/kernels", "reference"])
def test_no_torch_below_this_line(tree):
    torch = re.compile(r"#include [<\"](torch|ATen|c10|caffe2)/")
    files = [*(ROOT / tree).rglob("*.h"), *(ROOT / tree).rglob("*.cpp")]
    files = [path for path in files if path not in TENSORS]
    assert files
    assert [str(path) for path in files if torch.search(path.read_text())] == []


# A small tree that keeps to the plan, and one line more that does not.
PLAN = {
    "multihead/functional.h": "",
    "multihead/attention/checks.h": '#include "multihead/functional.h"',
    "multihead/kernels/cpu/gemm/tile.h": "",
    "multihead/layer/layer.cpp": '#include "multihead/attention/checks.h"',
    "multihead/ops/schema.h": '#include "multihead/attention/checks.h"',
    "diagnosis/include/multihead/diagnosis.h": '#include "multihead/functional.h"',
    "diagnosis/stages/mask.h": "",
    "diagnosis/weights/names.h": '#include "diagnosis/stages/mask.h"',
    "cli/main.cpp": '#include "multihead/diagnosis.h"',
    "tests/cpp/naive.h": "",
    "python/multihead/check/sandbox/guard.py": "",
    "python/multihead/check/calls/sizes.py": "from ..sandbox import guard",
}
BREACHES = {
    ("cli/main.cpp", "tests/cpp/naive.h"): "nothing but tests",
    ("cli/main.cpp", "multihead/attention/checks.h"): "multihead/attention is private",
    ("multihead/ops/schema.h", "multihead/kernels/cpu/gemm/tile.h"): "is private",
    ("multihead/functional.h", "multihead/diagnosis.h"): "multihead does not",
    ("multihead/attention/checks.h", "multihead/ops/schema.h"): "attention does not",
    ("multihead/kernels/cpu/gemm/tile.h", "multihead/functional.h"): "no torch",
    ("diagnosis/stages/mask.h", "diagnosis/weights/names.h"): "a circle: diagnosis/",
    ("python/multihead/check/sandbox/guard.py", "..calls"): "sandbox does not",
}


@pytest.mark.parametrize(("source", "target"), [(None, None), *BREACHES])
def test_a_planted_breach_is_found(tmp_path, source, target):
    for name, text in PLAN.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == source:
            more = f"from {target} import sizes" if ".." in target else None
            text += "\n" + (more or f'#include "{target}"')
        path.write_text(text)
    found = "\n".join(breaches(tmp_path))
    assert BREACHES[source, target] in found if source else found == ""
