# SPDX-License-Identifier: MIT
"""The smallest patch that repairs a fault, where an edit of the text can: each
candidate is run and checked, and only one that is right is shown."""

import difflib
import itertools
import os
import pathlib
import time

from ..options import Options
from ..reading.suite import Progress
from ..report import Report
from ..session import examine
from ..subject.script import overlaid
from .edits import Text, edits

_MOST = 40  # candidates that are run

_SECONDS = 60.0  # for all of them


def patch(
    target: str, report: Report, options: Options, progress: Progress | None = None
) -> str:
    """A unified diff of the target's file, or "": nothing that was tried repairs what
    the `report` says is wrong with it."""
    path, name = _named(target, report)
    if not report.cause or report.unchecked or path.suffix != ".py":
        return ""
    before = path.read_text(encoding="utf-8")
    text = Text(before, name)
    end = time.monotonic() + _SECONDS
    candidates = (e for fault in report.causes for e in edits(fault, text))
    for edit in itertools.islice(candidates, _MOST):
        if time.monotonic() > end:
            break
        after = text.edited(edit)
        if after == before or not _is_python(after):
            continue
        with overlaid(str(path), after):
            second = examine(f"{path}:{name}", options, progress)
        if second.cause is None:
            return _diff(path, before, after)
    return ""


def _named(target: str, report: Report) -> tuple[pathlib.Path, str]:
    """The file, and what the report calls the class or function in it."""
    path, _, name = target.rpartition(":")
    if path.endswith(".py") and name.isidentifier():
        return pathlib.Path(path), name
    return pathlib.Path(target), report.target.partition(" (")[0]


def _is_python(text: str) -> bool:
    try:
        compile(text, "patched", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _diff(path: pathlib.Path, before: str, after: str) -> str:
    """As `git apply` and `patch -p1` take it, from the current folder."""
    relative = os.path.relpath(path)
    shown = (path if relative.startswith("..") else pathlib.Path(relative)).as_posix()
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"a/{shown}",
        f"b/{shown}",
    )
    return "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
        for line in lines
    )
