# SPDX-License-Identifier: MIT
"""The Python files of a checkout that its authors wrote: no tests, no environments, no
other people's code."""

import json
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator

_OTHERS = {
    "__pycache__",
    "build",
    "dist",
    "env",
    "external",
    "node_modules",
    "site-packages",
    "test",
    "tests",
    "testing",
    "third_party",
    "thirdparty",
    "3rdparty",
    "vendor",
    "vendored",
    "venv",
    "virtualenv",
}
_TEST = re.compile(r"test_.*|.*_test|.*_tests|tests|conftest|setup")
_LARGEST = 1_000_000  # bytes; what is longer was not written by hand
_SUFFIXES = (".py", ".ipynb")


def python_files(root: pathlib.Path) -> list[pathlib.Path]:
    """Files and notebooks below `root`, relative to it, in the order of their names.
    In a checkout of git without those that it ignores."""
    listed = _listed_by_git(root)
    found = _walked(root) if listed is None else listed
    environments: dict[pathlib.Path, bool] = {}
    return sorted(
        path
        for path in found
        if _is_ones_own(path)
        and not _is_in_environment(root, path, environments)
        and _is_readable(root / path)
    )


def texts(path: pathlib.Path) -> list[tuple[str, str]]:
    """The code of a file, with "", or of each code cell of a notebook, with its number
    in brackets, as check names them; none where it cannot be read."""
    try:
        content = path.read_text(encoding="utf-8-sig", errors="replace")
        if path.suffix != ".ipynb":
            return [("", content)]
        cells = [c for c in json.loads(content)["cells"] if c["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [
        (f"[{number}]", re.sub(r"(?m)^[ \t]*[%!].*$", "", source))
        for number, source in enumerate(sources, 1)
        if not source.lstrip().startswith("%%")
    ]


def _is_ones_own(path: pathlib.Path) -> bool:
    folders = {part.lower() for part in path.parts[:-1]}
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and not folders & _OTHERS and not _TEST.fullmatch(path.stem)


def _is_in_environment(
    root: pathlib.Path, path: pathlib.Path, known: dict[pathlib.Path, bool]
) -> bool:
    """Whether a virtual environment, of any name, has the file."""
    for folder in list(path.parents)[:-1]:
        if folder not in known:
            known[folder] = (root / folder / "pyvenv.cfg").exists()
        if known[folder]:
            return True
    return False


def _is_readable(path: pathlib.Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= _LARGEST
    except OSError:
        return False


def _listed_by_git(root: pathlib.Path) -> list[pathlib.Path] | None:
    """What git knows or would add; None where this is no checkout, or git is absent."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    try:
        done = subprocess.run(
            [*command, "--exclude-standard"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    names = {os.fsdecode(name) for name in done.stdout.split(b"\0") if name}
    if not names and any(_walked(root)):
        return None  # all of it is ignored: somebody's scratch folder
    return [pathlib.Path(name) for name in names if name.endswith(_SUFFIXES)]


def _walked(root: pathlib.Path) -> Iterator[pathlib.Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name.lower() not in _OTHERS and not name.startswith(".")
        ]
        for name in names:
            if name.endswith(_SUFFIXES):
                yield pathlib.Path(folder, name).relative_to(root)
