# SPDX-License-Identifier: MIT
"""Runs code that may do anything, in this process, and stays whole.

What it prints is caught, what it raises becomes a finding, in that code's own lines,
what it changes of the process is put back, and it gets no more time than there is. The
limit is best effort: an exception is raised inside the code, which a loop inside a C
extension does not notice. The command `multihead check` ends such a process from
outside.
"""

import builtins
import contextlib
import ctypes
import inspect
import io
import linecache
import os
import pathlib
import pdb
import signal
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..report import Finding
from .state import OF_SPEED, Snapshot, in_main_thread, random_streams_restored

# Code may swallow what is raised in it; it is raised again after so long.
_AGAIN = 0.25
_LONGEST = 1e8  # seconds that a timer can count
_TICK = 1e-3  # as near to a limit as clocks agree
_OURS = str(pathlib.Path(__file__).parents[1])
_LIBRARIES = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_MESSAGE = 300  # characters of an exception's text
_REMEDIES = {
    SystemExit: "Return from the function, or raise an error that says what is wrong.",
    RecursionError: "A function calls itself without a case in which it stops.",
    EOFError: "Nobody answers `input()` here: make it an argument.",
}
# What no arguments of a call bring about.
_OWN = ("NameError", "UnboundLocalError", "ImportError", "SyntaxError")
_OWN += ("IndentationError", "RecursionError", "EOFError", "It ends the program")


@dataclass
class Outcome:
    """What a call came to. With an error, findings[0] says what happened."""

    value: Any = None
    error: BaseException | None = None
    findings: list[Finding] = field(default_factory=list)
    printed: str = ""


class Stop(Exception):
    """Nothing more can be run: the target is not there, or the time is over."""

    def __init__(self, findings: list[Finding]):
        super().__init__(findings[0].sentence)
        self.findings = findings


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


# What a check called that something stands in for, and what its import raised.
stood_in: dict[str, ImportError] = {}


class Guard:
    """Within `with Guard(...) as guard:`, guard.call runs foreign code.

    time_limit: seconds for all calls together. Within it PyTorch computes in one
    thread: the tensors of a check are tiny, threads would only wait for each other. On
    leaving, the random streams of torch, numpy and random go on from where they were
    on entering.
    """

    def __init__(self, time_limit: float) -> None:
        self.time_limit = time_limit
        self._used, self._most = 0.0, _LONGEST
        self._changed: dict[str, None] = {}  # by any call, in their order
        self._until_exit = contextlib.ExitStack()

    def __enter__(self) -> "Guard":
        stood_in.clear()
        stack = self._until_exit
        stack.enter_context(random_streams_restored())
        snapshot = Snapshot()
        stack.callback(snapshot.restore)
        torch.set_num_threads(1)
        stack.enter_context(warnings.catch_warnings())
        # On the error stream they would look like prints of the code.
        warnings.showwarning = lambda *_, **__: None
        if "matplotlib" not in sys.modules:  # no window that waits to be closed
            os.environ["MPLBACKEND"] = "Agg"
        return self

    def __exit__(self, *exception: object) -> None:
        self._until_exit.close()

    def until_exit(self, callback: Callable[[], object]) -> None:
        """Has `callback` called on leaving."""
        self._until_exit.callback(callback)

    @contextlib.contextmanager
    def apart(self, seconds: float) -> Iterator[None]:
        """What runs within has so many seconds of its own."""
        kept = self.time_limit, self._used
        self.time_limit, self._used = seconds, 0.0
        try:
            yield
        finally:
            self.time_limit, self._used = kept

    @contextlib.contextmanager
    def each_at_most(self, seconds: float | None) -> Iterator[None]:
        """No call within takes longer than so many seconds, if that is given."""
        kept = self._most
        self._most = kept if seconds is None else min(kept, seconds)
        try:
            yield
        finally:
            self._most = kept

    @property
    def used(self) -> float:
        """Seconds that foreign code has used."""
        return self._used

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
            *most, last = self._changed
            names = f"{', '.join(most)} and {last}" if most else last
            of_speed = self._changed.keys() <= OF_SPEED
            finding = Finding(
                "changes_global_state",
                f"It changes {names} for the whole process and leaves it so.",
                "Whoever starts the program sets that. A function that needs it "
                "otherwise puts it back, as `with torch.random.fork_rng():` and "
                "`with torch.no_grad():` do. (Here it was put back.)",
                kind="remark" if of_speed else "failure",
            )
            outcome.findings.append(finding)
        return outcome

    def run(self, code: Callable[[], Any], seconds: float | None = None) -> Outcome:
        """The same without putting settings back. seconds: a limit of its own."""
        most = self._most if seconds is None else min(seconds, self._most)
        limit = min(most, self.remaining)
        clock, process = _Clock(), os.getpid()
        outcome = Outcome()
        try:
            with _streams() as printed, _interruptible(), _limited(limit, clock):
                with _written_to_nowhere(), _short_stacks():
                    outcome.value = code()
        except _Interrupted:
            raise KeyboardInterrupt from None
        except BaseException as error:
            whole = min(most, self.time_limit)
            outcome.error = error
            outcome.findings.append(finding_of(error, whole))
        if os.getpid() != process:  # a fork of the code's, and it came back
            os._exit(0)
        self._used += clock.passed()
        outcome.printed = printed.text
        return outcome


@contextlib.contextmanager
def _streams() -> Iterator[_Caught]:
    caught = _Caught()
    old = sys.stdin, sys.stdout, sys.stderr
    stop = pdb.set_trace
    sys.stdin, sys.stdout, sys.stderr = _Nobody(), caught, caught
    # Where its author stopped to look, nobody looks now.
    hook, sys.breakpointhook = sys.breakpointhook, _go_on
    pdb.set_trace = _go_on
    try:
        yield caught
    finally:
        sys.stdin, sys.stdout, sys.stderr = old
        sys.breakpointhook, pdb.set_trace = hook, stop


def _go_on(*args: object, **kwargs: object) -> None:
    pass


@contextlib.contextmanager
def _written_to_nowhere() -> Iterator[None]:
    """What code writes into a folder that is not there, as its log, is lost."""
    opened = builtins.open

    def open_it(file, mode="r", *args, **kwargs):
        try:
            return opened(file, mode, *args, **kwargs)
        except FileNotFoundError:
            if not set(mode) & set("wax"):
                raise
            return opened(os.devnull, mode.replace("x", "w"), *args, **kwargs)

    builtins.open = io.open = open_it  # pathlib has the second
    try:
        yield
    finally:
        builtins.open = io.open = opened


@contextlib.contextmanager
def _short_stacks() -> Iterator[None]:
    """`inspect.stack`, by which some code logs who called it, without the text of each
    line: to look for that among all modules takes 20 ms a call."""
    whole = inspect.stack

    def stack(context: int = 1) -> list[inspect.FrameInfo]:
        frames = []
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            where = code.co_filename, frame.f_lineno, code.co_name
            frames.append(inspect.FrameInfo(frame, *where, None, None))
            frame = frame.f_back
        return frames

    inspect.stack = stack
    try:
        yield
    finally:
        inspect.stack = whole


class _Interrupted(BaseException):
    """Somebody pressed Ctrl-C, or stopped the notebook's cell."""


class OutOfTime(BaseException):
    """Raised inside code whose time is up; not an Exception, which code catches."""


@contextlib.contextmanager
def _handler(number: signal.Signals, handler: Callable) -> Iterator[None]:
    old = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, old or signal.SIG_DFL)


def _interruptible() -> contextlib.AbstractContextManager[None]:
    """Tells an interrupt from a KeyboardInterrupt that the code itself raises."""

    def interrupt(number, frame):
        raise _Interrupted

    main = in_main_thread()
    return _handler(signal.SIGINT, interrupt) if main else contextlib.nullcontext()


class _Clock:
    """Seconds of this thread since it was made. That it waited for a processor, which
    others used, does not count, where the system tells (Linux)."""

    def __init__(self) -> None:
        self._statistics = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._start, self._waited = time.monotonic(), self._wait()

    def _wait(self) -> float:
        try:
            with open(self._statistics) as file:
                return int(file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def passed(self) -> float:
        waited = max(0.0, self._wait() - self._waited)
        return max(0.0, time.monotonic() - self._start - waited)


def _limited(seconds: float, clock: _Clock) -> contextlib.AbstractContextManager[None]:
    """Raises OutOfTime in what runs inside, when `clock` has passed `seconds`."""
    seconds = min(max(seconds, 1e-3), _LONGEST)
    limit = _by_signal if in_main_thread() else _by_watchdog
    return limit(seconds, clock)


@contextlib.contextmanager
def _by_signal(seconds: float, clock: _Clock) -> Iterator[None]:
    armed, told_by = True, sys.unraisablehook

    def ring(number, frame):
        left = seconds - clock.passed()
        if armed and left > _TICK:
            signal.setitimer(signal.ITIMER_REAL, left, _AGAIN)
        elif armed:
            raise OutOfTime

    def tell(unraisable):
        # In a destructor or a callback of the collector nothing can be raised. There
        # the time rings again, and what else is told of is told to its end: pytest
        # takes whatever interrupts its hook for a fault of the test.
        nonlocal armed
        was, armed = armed, False
        try:
            if unraisable.exc_type is not OutOfTime:
                told_by(unraisable)
        finally:
            armed = was

    with _handler(signal.SIGALRM, ring):
        sys.unraisablehook = tell
        timer = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
        try:
            try:
                yield
            finally:
                armed = False
        finally:  # even if it rang in the line above
            signal.setitimer(signal.ITIMER_REAL, *timer)
            sys.unraisablehook = told_by


@contextlib.contextmanager
def _by_watchdog(seconds: float, clock: _Clock) -> Iterator[None]:
    thread = ctypes.c_ulong(threading.get_ident())
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    done = threading.Event()

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):
            wait = seconds - clock.passed()
            if wait <= _TICK:
                raise_in(thread, ctypes.py_object(OutOfTime))
                wait = _AGAIN

    watchdog = threading.Thread(target=watch, daemon=True)
    watchdog.start()
    try:
        yield
    finally:
        # What is raised too late surfaces here. Taking it back by
        # PyThreadState_SetAsyncExc(id, NULL) would leave CPython 3.11 looking for it
        # at every instruction, and for ever where a profile function is set.
        while watchdog.is_alive():
            with contextlib.suppress(OutOfTime):
                done.set()
                watchdog.join()
        with contextlib.suppress(OutOfTime):
            for _ in range(10):
                pass


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
    # What stands in for something else is no fault of the code.
    if stood_in and not isinstance(error, ImportError):
        error = next(iter(stood_in.values()))
    if isinstance(error, ImportError) and error.name:
        return _missing(error, where)
    remedy = next((r for kind, r in _REMEDIES.items() if isinstance(error, kind)), "")
    sentence = message_of(error)
    if isinstance(error, SystemExit):
        sentence = "It ends the program: it calls `exit()`."
    elif isinstance(error, SyntaxError):
        sentence = f"{type(error).__name__}: {error.msg}"
    # One that the code raises itself, of a package or a part of it that is not there.
    kind = "unchecked" if isinstance(error, ImportError) else "failure"
    return Finding("raises", sentence, remedy, where, kind)


def _missing(error: ImportError, where: str) -> Finding:
    """What is said of code that needs what is not there; nothing could be told."""
    package, _, _ = error.name.partition(".")
    text = _text(error).rstrip(".")
    what = f"It imports `{package}`, which this Python does not find."
    remedy = (
        f"Install it beside PyTorch, `pip install {package}`, or check the "
        "attention in a file of its own."
    )
    if getattr(error, "of_neighbour", False):
        what = f"It imports `{error.name}` of its own package: {text}."
        remedy = "Check it where all of the package lies, or in a file of its own."
    elif package in sys.modules or not isinstance(error, ModuleNotFoundError):
        what = f"It needs `{error.name}`, which is not there: {text}."
        remedy = (
            f"Another version of `{package}` may have it; or check the attention in a "
            "file of its own."
        )
    return Finding("missing_package", what, remedy, where, kind="unchecked")


def is_of_arguments(findings: list[Finding]) -> bool:
    """Whether what a call raised may be due to its arguments."""
    return bool(findings) and all(
        f.name == "raises" and not f.sentence.startswith(_OWN) for f in findings
    )


def message_of(error: BaseException) -> str:
    """The type and the text, as Python's own last line, shortened."""
    name, text = type(error).__name__, _text(error)
    return f"{name}: {text}" if text else name


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be printed)"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines)[:_MESSAGE]


def _where(error: BaseException) -> str:
    """ "attention.py, line 12, in attend" and the line; "" where nobody knows."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        file, line, name, source = error.filename, error.lineno, "", error.text or ""
    elif own := [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_OURS)
        and not is_library(frame.f_code.co_filename)
    ]:
        code, line = own[-1]  # the deepest that is neither ours nor a library's
        file, name = code.co_filename, code.co_name
        source = linecache.getline(file, line)
    else:
        return ""
    source = source.strip()
    inside = f", in {name}" if name and not name.startswith("<") else ""
    quoted = f"\n`{source}`" if source and "`" not in source else f"\n{source}"
    return f"{_shown(file)}, line {line}{inside}" + (quoted if source else "")


def is_cell(file: str) -> bool:
    """Whether Jupyter gave this name to the code of a cell."""
    return "ipykernel" in file or file.startswith("<ipython-input")


def _shown(file: str) -> str:
    """A file as its author would name it."""
    if is_cell(file):
        return "this notebook"
    try:
        relative = os.path.relpath(file) if os.path.isabs(file) else file
    except FileNotFoundError:  # the folder that Python was started in is gone
        relative = file
    return os.path.basename(file) if relative.startswith("..") else relative


def is_library(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    return file.startswith(_LIBRARIES) or file.startswith("<frozen")
