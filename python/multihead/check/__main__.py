# SPDX-License-Identifier: MIT
"""python -m multihead.check FILE[:NAME]: multihead.check, for a shell.

The command "multihead check" does the same in a process that it can end. Exit
status: 0 the code passed, 1 it is wrong, 2 it could not be judged or the report not be
written, 3 it is right only if something is meant that nothing states, and that --allow
does not name.
"""

import argparse
import contextlib
import errno
import io
import os
import sys
import time
import traceback

from . import Options, Report, examine
from .reading.suite import Progress
from .workplace.fix import patch

_SILENCE = 2.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(f"check: {message}")


def parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m multihead.check", description=__doc__)
    parser.add_argument("target", metavar="FILE[:NAME]")
    for name in ("--num-heads", "--embed-dim", "--num-kv-heads"):
        parser.add_argument(name, type=int, metavar="N")
    parser.add_argument("--mask", metavar="blocked|keep|additive")
    parser.add_argument("--call", metavar="EXPRESSION")
    parser.add_argument("--layout", choices=("batch-first", "sequence-first"))
    parser.add_argument("--causal", action="store_true", default=None)
    parser.add_argument("--allow", default="", metavar="NAME[,NAME]|all")
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument(
        "--fix", action="store_true", help="add a patch that repairs it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def report_for(arguments: argparse.Namespace, progress: Progress) -> Report:
    stated = dict(vars(arguments))
    names = ("target", "layout", "json", "fix")
    target, layout, _, fix = (stated.pop(name) for name in names)
    stated["batch_first"] = None if layout is None else layout == "batch-first"
    report = examine(target, Options(**stated), progress)
    if fix and report.cause:
        report.patch = patch(target, report, Options(**stated), progress)
    return report


def slowly() -> Progress:
    """Says on standard error what is done, if it takes long, once a second at most."""
    due = time.monotonic() + _SILENCE

    def say(name: str) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + 1
            with contextlib.suppress(OSError):  # it may be closed
                print(f"multihead: still at work: {name}", file=sys.stderr, flush=True)

    return say


class _Answer:
    """The file in which the command reads along. Code under test may close its
    descriptor (os.closerange) and get the number again for a file of its own; then
    the file is opened anew."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor, self._path = descriptor, path
        self._file = os.fstat(descriptor)

    def write(self, text: str) -> None:
        content = text.encode(errors="replace")  # file names may be no UTF-8
        if self._is_open():
            while content:
                content = content[os.write(self._descriptor, content) :]
        else:
            with open(self._path, "ab") as file:
                file.write(content)

    def _is_open(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._file)
        except OSError:
            return False


def answer(descriptor: int, path: str, words: list[str]) -> None:
    """Writes exit status and report, as JSON, for cli/check/check.cpp, and ends the
    process: whatever the code under test left to run at exit does not. The file to
    write in is open as ``descriptor``, and can be opened as ``path``."""
    file = _Answer(descriptor, path)
    say = slowly()

    def progress(name: str) -> None:
        marks = {"verdict": "judging\n", "loading": "loading\n"}
        file.write(marks.get(name, "running\n"))
        say(name)

    try:
        report = report_for(parser().parse_args(words), progress)
        status, text = report.exit_status, report.to_json()
    except (ValueError, OSError) as error:
        status, text = 2, f"{error}\n"
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:  # no fault of the code's
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        status, text = 2, f"check: multihead itself could not go on ({what})\n"
    file.write(f"report {status}\n{text}")
    os._exit(status)


def print_all(report: Report, as_json: bool) -> None:
    """Raises OSError where standard output does not take all of it."""
    try:
        if sys.stdout is None:  # it is closed
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # an encoding without "✓"
        if as_json:
            print(report.to_json())
        else:
            report.print()
            print("\n" + report.patch if report.patch else "", end="")
        sys.stdout.flush()
    except OSError as error:
        if sys.stdout is not None:
            # What is left in the buffer would fail once more when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        what = f"standard output must be writable, got {error.strerror}"
        raise OSError(what) from None


def main() -> int:
    try:
        arguments = parser().parse_args()
        report = report_for(arguments, slowly())
        print_all(report, arguments.json)
    except (ValueError, OSError) as error:
        print(f"multihead: {error}", file=sys.stderr)
        return 2
    except Exception:  # its own fault, which Python would make exit status 1: wrong
        traceback.print_exc()
        print(
            "multihead: check itself failed: nothing is said of the code",
            file=sys.stderr,
        )
        return 2
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main())
