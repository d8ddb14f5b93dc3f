# SPDX-License-Identifier: MIT
"""From an exception that code raised to a finding, in that code's own lines."""

import linecache
import os
import pathlib
import sysconfig
import traceback
from types import TracebackType

from ..finding import Finding
from .limit import OutOfTime

_OURS = str(pathlib.Path(__file__).parents[1])
_LIBRARIES = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_LONGEST = 300
# What no arguments of a call bring about.
_OWN = ("NameError", "UnboundLocalError", "ImportError", "SyntaxError")
_OWN += ("IndentationError", "RecursionError", "It ends the program")


def finding_of(error: BaseException, time_limit: float) -> Finding:
    """What an exception says about the code that raised it."""
    where = _where(error)
    if isinstance(error, OutOfTime):
        return Finding(
            "hangs",
            f"It had not come to an end after {time_limit:g} s.",
            "Look there, and where that is called, for a loop whose condition stays "
            "true. If it only needs longer, a higher time limit gives it more: "
            "`time_limit=`, or `--time-limit` of the command.",
            where,
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return Finding(
            "missing_package",
            f"It imports `{package}`, which this Python does not find.",
            f"Install it beside PyTorch, `pip install {package}`, or check the "
            "attention in a file of its own.",
            where,
        )
    if isinstance(error, SystemExit):
        return Finding(
            "raises",
            "It ends the program: it calls `exit()`.",
            "Return from the function, or raise an error that says what is wrong.",
            where,
        )
    if isinstance(error, SyntaxError):
        return Finding("raises", f"{type(error).__name__}: {error.msg}", "", where)
    return Finding("raises", message_of(error), _remedy(error), where)


def is_of_arguments(findings: list[Finding]) -> bool:
    """Whether what a call raised may be due to its arguments."""
    return bool(findings) and all(
        f.name == "raises" and not f.sentence.startswith(_OWN) for f in findings
    )


def message_of(error: BaseException) -> str:
    """The type and the text, as Python's own last line, shortened."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be printed)"
    name = type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    text = " ".join(lines)[:_LONGEST]
    return f"{name}: {text}" if text else name


def _remedy(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "A function calls itself without a case in which it stops."
    if isinstance(error, EOFError):
        return "Nobody answers `input()` here: make it an argument."
    return ""


def _where(error: BaseException) -> str:
    """ "attention.py, line 12, in attend" and the line; "" where nobody knows."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return _place(error.filename, error.lineno, "", (error.text or "").strip())
    frame = _frame(error.__traceback__)
    if frame is None:
        return ""
    file, line, name = frame
    return _place(file, line, name, linecache.getline(file, line).strip())


def _place(file: str, line: int, name: str, source: str) -> str:
    inside = f", in {name}" if name and not name.startswith("<") else ""
    quoted = f"\n`{source}`" if source and "`" not in source else f"\n{source}"
    return f"{shown(file)}, line {line}{inside}" + (quoted if source else "")


def shown(file: str) -> str:
    """A file as its author would name it."""
    if "ipykernel" in file or file.startswith("<ipython-input"):
        return "this notebook"
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return os.path.basename(file) if relative.startswith("..") else relative


def _frame(trace: TracebackType | None) -> tuple[str, int, str] | None:
    """File, line and function where it happened: the deepest that is neither ours
    nor a library's."""
    own = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(trace)
        if not frame.f_code.co_filename.startswith(_OURS)
        and not is_library(frame.f_code.co_filename)
    ]
    return own[-1] if own else None


def is_library(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    return file.startswith(_LIBRARIES) or file.startswith("<frozen")
