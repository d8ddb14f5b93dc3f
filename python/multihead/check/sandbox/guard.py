# SPDX-License-Identifier: MIT
"""Runs code that may do anything, in this process, and stays whole.

What it prints is caught, what it raises becomes a finding, what it changes of the
process is put back, and it gets no more time than there is.
"""

import contextlib
import io
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..finding import Finding
from .limit import limited
from .state import Snapshot, random_streams_restored
from .traceback_report import finding_of


@dataclass
class Outcome:
    """What a call came to. With an error, findings[0] says what happened."""

    value: Any = None
    error: BaseException | None = None
    findings: list[Finding] = field(default_factory=list)
    printed: str = ""


class _Caught(io.TextIOBase):
    """Standard output while foreign code runs: keeps the beginning."""

    encoding = "utf-8"
    _KEPT = 2000

    def __init__(self) -> None:
        self.text = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if len(self.text) < self._KEPT:
            self.text += text[: self._KEPT - len(self.text)]
        return len(text)


class _Nobody(io.TextIOBase):
    """Standard input while foreign code runs."""

    def readable(self) -> bool:
        return True

    def readline(self, size: int = -1) -> str:
        raise EOFError("it waits for somebody to type")

    read = readline


class Guard:
    """Within `with Guard(...) as guard:`, guard.call runs foreign code.

    time_limit: seconds for all calls together. On leaving, the random streams of
    torch, numpy and random go on from where they were on entering.
    """

    def __init__(self, time_limit: float) -> None:
        self.time_limit = time_limit
        self._used = 0.0
        self._changed: dict[str, None] = {}  # by any call, in their order
        self._until_exit = contextlib.ExitStack()

    def __enter__(self) -> "Guard":
        stack = self._until_exit
        stack.enter_context(random_streams_restored())
        snapshot = Snapshot()
        stack.callback(snapshot.restore)
        stack.enter_context(warnings.catch_warnings())
        # On the error stream they would look like prints of the code.
        warnings.showwarning = lambda *_, **__: None
        if "matplotlib" not in sys.modules:  # no window that waits to be closed
            os.environ["MPLBACKEND"] = "Agg"
        return self

    def __exit__(self, *exception: object) -> None:
        self._until_exit.close()

    @property
    def remaining(self) -> float:
        """Seconds that foreign code may still use."""
        return max(0.0, self.time_limit - self._used)

    def call(self, function: Callable, *args: Any, **kwargs: Any) -> Outcome:
        """function(*args, **kwargs); see Outcome. Raises only the KeyboardInterrupt
        of somebody who interrupts the check itself."""
        return self.attempt(lambda: function(*args, **kwargs))

    def attempt(self, code: Callable, seconds: float | None = None) -> Outcome:
        """The same of code() without arguments. seconds: a limit of its own."""
        snapshot = Snapshot()
        outcome = self.run(code, seconds)
        changed = snapshot.restore()
        if changed:
            self._changed |= dict.fromkeys(changed)
            outcome.findings.append(_changes(list(self._changed)))
        return outcome

    def run(self, code: Callable[[], Any], seconds: float | None = None) -> Outcome:
        """The same without putting settings back. seconds: a limit of its own."""
        limit = self.remaining if seconds is None else min(seconds, self.remaining)
        start, process = time.monotonic(), os.getpid()
        outcome = Outcome()
        try:
            with _streams() as printed, _interruptible(), limited(limit):
                outcome.value = code()
        except _Interrupted:
            raise KeyboardInterrupt from None
        except BaseException as error:
            whole = self.time_limit if seconds is None else seconds
            outcome.error = error
            outcome.findings.append(finding_of(error, whole))
        if os.getpid() != process:  # a fork of the code's, and it came back
            os._exit(0)
        self._used += time.monotonic() - start
        outcome.printed = printed.text
        return outcome


def _changes(names: list[str]) -> Finding:
    *most, last = names
    named = f"{', '.join(most)} and {last}" if most else last
    return Finding(
        "changes_global_state",
        f"It changes {named} for the whole process and leaves it so.",
        "Whoever starts the program sets that. A function that needs it otherwise "
        "puts it back, as `with torch.random.fork_rng():` and "
        "`with torch.no_grad():` do. (Here it was put back.)",
    )


@contextlib.contextmanager
def _streams() -> Iterator[_Caught]:
    caught = _Caught()
    old = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, sys.stdout, sys.stderr = _Nobody(), caught, caught
    try:
        yield caught
    finally:
        sys.stdin, sys.stdout, sys.stderr = old


class _Interrupted(BaseException):
    """Somebody pressed Ctrl-C, or stopped the notebook's cell."""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Tells an interrupt from a KeyboardInterrupt that the code itself raises."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number, frame):
        raise _Interrupted

    handler = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
