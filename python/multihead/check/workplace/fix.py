# SPDX-License-Identifier: MIT
"""The smallest patch that repairs a fault, where an edit of the text can: each
candidate is run and checked, and only one that is right is shown."""

import difflib
import os
import pathlib
import time
from collections.abc import Callable

from ..options import Options
from ..report import Report
from .edits import Text, edits

_MOST = 40  # candidates that are run

Examine = Callable[[object, Options], Report]


def patch(path: str, name: str, report: Report, examine: Examine, **given) -> str:
    """A unified diff of the file at `path`, or "": nothing that was tried repairs the
    one fault of the `report` on what the file calls `name`.

    examine: checks the text that subject.target.overlaid shows in place of the file's.
    given: the options of the check; seconds: for all candidates together.
    """
    from ..subject.target import overlaid

    seconds = given.pop("seconds", 60.0)
    if not report.cause or report.unchecked or pathlib.Path(path).suffix != ".py":
        return ""
    before = pathlib.Path(path).read_text(encoding="utf-8")
    text = Text(before, name)
    end = time.monotonic() + seconds
    found = ""
    candidates = [e for fault in report.causes for e in edits(fault, text)]
    for edit in candidates[:_MOST]:
        if time.monotonic() > end:
            break
        after = text.edited(edit)
        if after == before or not _is_python(after):
            continue
        with overlaid(path, after):
            second = examine(f"{path}:{name}", Options(**given))
        if second.passed:
            found = after
            break
    return _diff(path, before, found) if found else ""


def _is_python(text: str) -> bool:
    try:
        compile(text, "patched", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _diff(path: str, before: str, after: str) -> str:
    """As `git apply` and `patch -p1` take it, from the current folder."""
    relative = os.path.relpath(path)
    shown = pathlib.Path(path if relative.startswith("..") else relative).as_posix()
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
