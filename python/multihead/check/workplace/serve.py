# SPDX-License-Identifier: MIT
"""A Python that has imported what every check imports, and forks one for each.

cli/check/server.cpp starts it, and writes one request a line, JSON: {"answer": path,
"words": arguments of a check}. The reply is the number of the process that answers
there. It is nobody's child but the command's: the one in between has ended.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys

from ..__main__ import answer

_ANSWER = 3
_KILLED_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def serve() -> None:
    """Serves until the command closes its end."""
    parent = os.getppid()
    # A thread would not be there after a fork, what it holds would be locked.
    if len(os.listdir("/proc/self/task")) != 1:
        sys.exit(1)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            os.close(reading)
            child = os.fork()
            if child:
                os.write(writing, str(child).encode())
                os._exit(0)
            os.close(writing)
            _work(request, parent)
        os.close(writing)
        number = os.read(reading, 20)
        os.close(reading)
        os.waitpid(between, 0)
        sys.stdout.buffer.write(number + b"\n")
        sys.stdout.buffer.flush()


def _work(request: dict, parent: int) -> None:
    """What a process of its own does, from its first step."""
    try:
        os.setsid()
        while os.getppid() != parent:  # until the one in between has ended
            if os.getppid() == 1:  # and the command, too
                return
            os.sched_yield()
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(_KILLED_WITH_PARENT, signal.SIGKILL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # the code under test prints for nobody
            os.dup2(nothing, stream)
        path = request["answer"]
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), _ANSWER)
        os.write(_ANSWER, b"started\n")
        faulthandler.enable(_ANSWER)
        faulthandler.register(signal.SIGTERM, _ANSWER, chain=True)
        answer(_ANSWER, path, request["words"])
    finally:
        os._exit(2)
