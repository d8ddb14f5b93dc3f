# SPDX-License-Identifier: MIT
"""A time limit for code that does not know of it, in this process.

Best effort: an exception is raised inside the code, which a loop inside a C
extension does not notice. The command `multihead check` ends such a process from
outside.
"""

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator

# Code may swallow what is raised in it; it is raised again after so long.
_AGAIN = 0.25
_LONGEST = 1e8  # seconds that a timer can count


class OutOfTime(BaseException):
    """Raised inside code whose time is up; not an Exception, which code catches."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in what runs inside, after `seconds`."""
    seconds = min(max(seconds, 1e-3), _LONGEST)
    main = threading.current_thread() is threading.main_thread()
    with _by_signal(seconds) if main else _by_watchdog(seconds):
        yield


@contextlib.contextmanager
def _by_signal(seconds: float) -> Iterator[None]:
    armed = True

    def ring(number, frame):
        if armed:
            raise OutOfTime

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        try:
            yield
        finally:
            armed = False
    finally:  # even if it rang in the line above
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)


@contextlib.contextmanager
def _by_watchdog(seconds: float) -> Iterator[None]:
    thread = ctypes.c_ulong(threading.get_ident())
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    done = threading.Event()

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):
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
